# SPDX-License-Identifier: Apache-2.0
"""Random sequences of begin, update, fail, abort, finish, step and close, from several threads, against a model of the engine.

Hypothesis chooses the calls and hands each to one of three threads in turn: the result of every call and the engine's state must
be those of a small model.
"""

from __future__ import annotations

import random
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
    EngineClosedError,
    EngineUnusableError,
    UpdateState,
    WeightUpdateError,
)

from .conftest import build_engine
from .numbered_weights import REQUEST, WEIGHTS, Workers, actions_of_all_mixtures, batch


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[tuple[int, int], Tensor]:
    return actions_of_all_mixtures(checkpoint)


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
