# SPDX-License-Identifier: Apache-2.0
"""Threads that run freely: no step ever sees mixed weights, and nothing deadlocks."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf_phyai.engine import (
    Engine,
    EngineClosedError,
    EngineUnusableError,
    WeightUpdateError,
)

from .conftest import build_engine
from .numbered_weights import REQUEST, TIME_LIMIT, Workers, actions_of_all_mixtures, batch


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[tuple[int, int], Tensor]:
    return actions_of_all_mixtures(checkpoint)


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
