# SPDX-License-Identifier: Apache-2.0
"""Weights by number, the actions that each mixture of them gives, and threads that run one call each."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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


def actions_of_all_mixtures(checkpoint: Path) -> dict[tuple[int, int], Tensor]:
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
