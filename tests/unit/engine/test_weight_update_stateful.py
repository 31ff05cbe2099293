# SPDX-License-Identifier: Apache-2.0
"""Random sequences of begin, update, fail, abort, finish, step and close, from several threads, against a model of the engine.

The first test lets hypothesis choose the calls and hands each to one of three threads in turn: the result of every call and the
engine's state must be those of a small model. The second lets threads run freely: no step may ever see mixed weights.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from torch import Tensor

from rlinf_phyai.engine import (
    Engine,
    EngineClosedError,
    EngineUnusableError,
    UpdateState,
    WeightUpdateError,
)

from .checkpoints import EXPERT, LANGUAGE, random_state
from .conftest import SIZES, build_engine, step_request

TIME_LIMIT = 60.0  # seconds for one call: far above what it takes, so running into it is a deadlock

# Two batches of parameters that reach the result by different ways: tables, fused matrices, plain matrices.
PARTS: dict[str, tuple[str, ...]] = {
    "a": ("time_mlp_in.weight", "action_out_proj.bias", EXPERT + "model.norm.dense.weight"),
    "b": (
        LANGUAGE + "layers.0.self_attn.v_proj.weight",
        EXPERT + "model.layers.1.mlp.up_proj.weight",
        "action_in_proj.bias",
    ),
}
WEIGHTS = [random_state(SIZES, seed=3), random_state(SIZES, seed=11), random_state(SIZES, seed=12)]
"""Weights by number; number 0 is the checkpoint's own."""

REQUEST = step_request(batch=1)


def batch(part: str, number: int) -> dict[str, Tensor]:
    return {name: WEIGHTS[number][name] for name in PARTS[part]}


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[tuple[int, int], Tensor]:
    """Actions of engines that hold part a of one number and part b of another; all nine differ."""
    found = {}
    torch.set_num_threads(1)
    for a in range(3):
        for b in range(3):
            with build_engine(checkpoint, num_steps=1) as engine:
                with engine.weight_update() as update:
                    update(batch("a", a) | batch("b", b))
                found[a, b] = engine.step(REQUEST)
    values = list(found.values())
    assert not any(torch.equal(x, y) for i, x in enumerate(values) for y in values[:i])
    return found


class Workers:
    """Threads that run one call each when told to; a call that does not end in time is a deadlock."""

    def __init__(self, count: int) -> None:
        self._inboxes: list[queue.Queue[Any]] = [queue.Queue() for _ in range(count)]
        self._threads = [threading.Thread(target=self._run, args=(inbox,), daemon=True) for inbox in self._inboxes]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _run(inbox: queue.Queue[Any]) -> None:
        while (job := inbox.get()) is not None:
            call, answer = job
            try:
                answer.put((call(), None))
            except BaseException as error:  # handed to the caller
                answer.put((None, error))

    def call(self, worker: int, function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        answer: queue.Queue[Any] = queue.Queue()
        self._inboxes[worker].put((function, answer))
        try:
            return answer.get(timeout=TIME_LIMIT)
        except queue.Empty:
            raise AssertionError(f"no answer within {TIME_LIMIT} s: deadlock") from None

    def stop(self) -> None:
        for inbox in self._inboxes:
            inbox.put(None)
        for thread in self._threads:
            thread.join(TIME_LIMIT)


class SourceFailed(Exception):
    """A weight source that breaks off."""


SESSION = (UpdateState.CLEAN, UpdateState.DIRTY)
DEAD = (UpdateState.UNUSABLE, UpdateState.CLOSED)
NEEDS_SESSION = {"update", "poison", "rejected_update", "finish", "failing_finish", "abort"}
ACTIONS = ["begin"] * 5 + ["update"] * 10 + ["finish"] * 7 + ["step"] * 6 + ["recover"] * 5
ACTIONS += ["rejected_update", "failing_finish", "abort", "close"] * 2 + ["poison"]


class EngineMachine(RuleBasedStateMachine):
    """The model: state, version, committed numbers of the two parts, and what the open session has written.

    Every action is tried in every state; what must come of it follows from the model. hypothesis draws the seed of
    a sequence, not its calls: it likes to repeat values and to leave rules out, and such sequences seldom get into a session.
    """

    checkpoint: Path
    expected: dict[tuple[int, int], Tensor]
    seen: Counter[tuple[str, UpdateState]]
    committed_seen: set[tuple[int, int]]

    def __init__(self) -> None:
        super().__init__()
        self.workers = Workers(3)
        self.start()

    def start(self) -> None:
        self.engine = build_engine(self.checkpoint, num_steps=1)
        self.state = UpdateState.IDLE
        self.version = 0
        self.committed = {"a": 0, "b": 0}
        self.written: dict[str, int] = {}
        self.poisoned = False

    def teardown(self) -> None:
        self.workers.stop()
        self.engine.close()

    @initialize(seed=st.integers(0, 2**32 - 1))
    def choose_sequence(self, seed: int) -> None:
        self.draw = random.Random(seed)

    @rule()
    def act(self) -> None:
        draw = self.draw
        action, worker, part, number = draw.choice(ACTIONS), draw.randrange(3), draw.choice("ab"), draw.randrange(3)
        if action == "recover" and self.state not in DEAD:
            return
        note(f"thread {worker}: {action} (part {part}, number {number}) when {self.state.value}")
        self.seen[action, self.state] += 1
        getattr(self, action)(worker, part, number)

    @invariant()
    def same_state_and_version(self) -> None:
        assert self.engine.state is self.state
        assert self.engine.version == self.version

    def attempt(
        self, worker: int, action: str, call: Callable[[], Any], error: type[BaseException] | None = None
    ) -> tuple[Any] | None:
        """Runs a call that must succeed (``error`` None) or raise; returns its result when the state allows it at all."""
        demanded = error
        if (action in NEEDS_SESSION) != (self.state in SESSION):
            demanded = WeightUpdateError
        demanded = {UpdateState.CLOSED: EngineClosedError, UpdateState.UNUSABLE: EngineUnusableError}.get(
            self.state, demanded
        )
        result, found = self.workers.call(worker, call)
        if demanded is None:
            if found is not None:
                raise found
        else:
            assert type(found) is demanded, f"{action} when {self.state}: {found!r}, expected {demanded.__name__}"
        return (result,) if demanded is error else None

    def begin(self, worker: int, part: str, number: int) -> None:
        if self.attempt(worker, "begin", self.engine.begin_weight_update):
            self.state = UpdateState.CLEAN

    def update(self, worker: int, part: str, number: int) -> None:
        repeated = part in self.written
        call = lambda: self.engine.update_weights(batch(part, number))  # noqa: E731
        if self.attempt(worker, "update", call, WeightUpdateError if repeated else None) and not repeated:
            self.state = UpdateState.DIRTY
            self.written[part] = number

    def poison(self, worker: int, part: str, number: int) -> None:
        """A tensor with one NaN: taken in like any other, but the session cannot be committed any more."""
        bias = WEIGHTS[number]["time_mlp_in.bias"].clone()
        bias[number] = float("nan")
        repeated = self.poisoned
        call = lambda: self.engine.update_weights({"time_mlp_in.bias": bias})  # noqa: E731
        if self.attempt(worker, "poison", call, WeightUpdateError if repeated else None) and not repeated:
            self.state, self.poisoned = UpdateState.DIRTY, True

    def rejected_update(self, worker: int, part: str, number: int) -> None:
        def source() -> Iterator[tuple[str, Tensor]]:
            yield from batch(part, 1).items()
            if number == 0:
                raise SourceFailed
            yield ("no.such.name", torch.zeros(1)) if number == 1 else ("time_mlp_out.bias", torch.zeros(1))

        error = WeightUpdateError if number else SourceFailed
        self.attempt(worker, "rejected_update", lambda: self.engine.update_weights(source()), error)

    def finish(self, worker: int, part: str, number: int) -> None:
        version = self.version + number if part == "a" else None
        call = lambda: self.engine.finish_weight_update(version)  # noqa: E731
        if not self.attempt(worker, "finish", call, WeightUpdateError if self.poisoned else None):
            return
        if self.poisoned:
            self.seen["refused finish", self.state] += 1
            self.leave()
        else:
            self.version = self.version + 1 if version is None else version
            self.committed |= self.written
            self.written, self.state = {}, UpdateState.IDLE

    def failing_finish(self, worker: int, part: str, number: int) -> None:
        arguments: dict[str, Any] = {"version": -1} if part == "a" else {"require_all": True}
        call = lambda: self.engine.finish_weight_update(**arguments)  # noqa: E731
        before = self.state
        self.attempt(worker, "failing_finish", call, WeightUpdateError)
        if before in SESSION:
            self.leave()

    def abort(self, worker: int, part: str, number: int) -> None:
        if self.attempt(worker, "abort", self.engine.abort_weight_update):
            self.leave()

    def leave(self) -> None:
        """A session that ended without a commit."""
        self.state = UpdateState.UNUSABLE if self.state is UpdateState.DIRTY else UpdateState.IDLE
        self.written, self.poisoned = {}, False

    def step(self, worker: int, part: str, number: int) -> None:
        found = self.attempt(worker, "step", lambda: self.engine.step(REQUEST))
        if found:
            committed = self.committed["a"], self.committed["b"]
            assert torch.equal(found[0], self.expected[committed])
            self.committed_seen.add(committed)

    def close(self, worker: int, part: str, number: int) -> None:
        _, error = self.workers.call(worker, self.engine.close)
        assert error is None
        self.state, self.written, self.poisoned = UpdateState.CLOSED, {}, False

    def recover(self, worker: int, part: str, number: int) -> None:
        """What the errors advise: close, and build a new engine."""
        self.close(worker, part, number)
        self.start()


def test_random_sequences_follow_the_state_machine(checkpoint: Path, expected: dict[tuple[int, int], Tensor]) -> None:
    EngineMachine.checkpoint, EngineMachine.expected = checkpoint, expected
    EngineMachine.seen, EngineMachine.committed_seen = Counter(), set()
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=60,
            stateful_step_count=60,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],  # shrinking a failure may take minutes; the printed sequence is short enough
            suppress_health_check=list(HealthCheck),
        ),
    )
    # The sequences must have been everywhere; a generator that never gets into a session would prove nothing.
    living = {(action, state) for action in set(ACTIONS) - {"recover"} for state in (UpdateState.IDLE, *SESSION)}
    ended = {(action, state) for action in ("begin", "update", "finish", "step", "recover") for state in DEAD}
    refused = {("refused finish", UpdateState.DIRTY)}
    assert (living | ended | refused) - set(EngineMachine.seen) == set()
    assert len(EngineMachine.committed_seen) >= 6  # of 9 combinations of the two parts


@pytest.mark.parametrize("seed", [0, 1])
def test_free_running_threads_never_see_mixed_weights(
    seed: int, checkpoint: Path, expected: dict[tuple[int, int], Tensor]
) -> None:
    """Writers send whole versions in two batches or abort before the first write; readers step all the time."""
    engine = build_engine(checkpoint, num_steps=1)
    whole = [expected[number, number] for number in range(3)]
    stop_at = time.monotonic() + 4.0
    failures: list[str] = []
    counts = {"steps": 0, "commits": 0, "refused": 0}
    versions: list[int] = []
    guard = threading.Lock()

    def count(name: str) -> None:
        with guard:
            counts[name] += 1

    def reader() -> None:
        while time.monotonic() < stop_at:
            try:
                actions = engine.step(REQUEST)
            except WeightUpdateError:
                count("refused")
                time.sleep(0.001)
                continue
            count("steps")
            if not any(torch.equal(actions, known) for known in whole):
                failures.append("a step saw mixed weights")
                return

    def writer(index: int) -> None:
        draw = random.Random(100 * seed + index)
        while time.monotonic() < stop_at:
            number = draw.randrange(3)
            try:
                engine.begin_weight_update()
            except WeightUpdateError:
                count("refused")
                time.sleep(0.001)
                continue
            if draw.random() < 0.3:
                engine.abort_weight_update()
                continue
            engine.update_weights(batch("a", number))
            time.sleep(draw.random() * 0.005)  # leaves the lock between the two batches
            engine.update_weights(batch("b", number))
            engine.finish_weight_update()
            with guard:
                counts["commits"] += 1
                versions.append(engine.version)
            time.sleep(draw.random() * 0.005)

    def guarded(function: Callable[[], None]) -> None:
        torch.set_num_threads(1)
        try:
            function()
        except BaseException as error:
            failures.append(repr(error))

    targets: list[Callable[[], None]] = [reader, reader, lambda: writer(0), lambda: writer(1)]
    threads = [threading.Thread(target=guarded, args=(target,), daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIME_LIMIT)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    assert failures == []
    assert counts["steps"] > 0, counts
    assert counts["commits"] > 1, counts
    assert counts["refused"] > 0, counts
    assert engine.version == counts["commits"]
    assert max(versions) == engine.version
    engine.close()


def test_close_while_threads_work(checkpoint: Path) -> None:
    """Closing from outside ends every thread with the same clear error."""
    engine = build_engine(checkpoint, num_steps=1)
    errors: list[BaseException] = []

    def work(call: Callable[[], Any]) -> None:
        while True:
            try:
                call()
            except WeightUpdateError:
                time.sleep(0.001)
            except BaseException as error:
                errors.append(error)
                return

    def update() -> None:
        with engine.weight_update() as write:
            write(batch("a", 1) | batch("b", 1))

    threads = [
        threading.Thread(target=work, args=(call,), daemon=True)
        for call in (lambda: engine.step(REQUEST), lambda: engine.step(REQUEST), update)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    engine.close()
    for thread in threads:
        thread.join(TIME_LIMIT)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    assert [type(error) for error in errors] == [EngineClosedError] * 3


def test_an_unusable_engine_stays_unusable_for_all_threads(checkpoint: Path) -> None:
    engine: Engine = build_engine(checkpoint, num_steps=1)
    engine.begin_weight_update()
    engine.update_weights(batch("a", 1))
    engine.abort_weight_update()
    workers = Workers(3)
    for _ in range(3):
        for worker in range(3):
            for call in (lambda: engine.step(REQUEST), engine.begin_weight_update, engine.finish_weight_update):
                _, error = workers.call(worker, call)
                assert isinstance(error, EngineUnusableError)
    workers.stop()
    engine.close()
