# SPDX-License-Identifier: Apache-2.0
"""A weight sync knows its training step; the runner compares all parameters after the first one, and only then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rlinf.runners.embodied_runner import EmbodiedRunner

from rlinf_phyai.checksum import checksums
from rlinf_phyai.driver.runner import PhyaiRunner
from rlinf_phyai.errors import WeightUpdateError


class _Handle:
    """A call that runs no earlier than it is waited for: Ray promises no order of calls that are not."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def wait(self) -> Any:
        return self._function()


class _StockGroup:
    """RLinf's own workers."""

    step = -1

    def set_global_step(self, step: int) -> _Handle:
        return _Handle(lambda: setattr(self, "step", step))


class _Group(_StockGroup):
    """A worker group as the driver sees it: one result per rank."""

    def __init__(self, *states: dict[str, torch.Tensor]) -> None:
        self.states, self.asked = states, 0

    def parameter_checksums(self, dtypes: dict[str, torch.dtype] | None = None) -> _Handle:
        self.asked += 1
        return _Handle(
            lambda: [
                checksums(s.items(), dtypes or {name: tensor.dtype for name, tensor in s.items()}) for s in self.states
            ]
        )


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> PhyaiRunner:
    def sync(self: Any) -> None:
        self.steps_at_sync = (self.actor.step, self.rollout.step)

    monkeypatch.setattr(EmbodiedRunner, "update_rollout_weights", sync)
    runner = object.__new__(PhyaiRunner)
    runner.global_step = 0
    return runner


def test_every_sync_knows_its_step(runner: PhyaiRunner) -> None:
    """RLinf's actor labels the weights with it, and the engine draws that step's random numbers."""
    runner.actor = runner.rollout = _Group({"a": torch.zeros(1)})
    for step in (3, 4):  # the first step of a resumed run, and the next
        runner.global_step = step
        runner.update_rollout_weights()
        assert runner.steps_at_sync == (step, step)


def test_equal_parameters_pass_once_and_are_not_compared_again(runner: PhyaiRunner) -> None:
    state = {"a": torch.randn(3, 4), "b": torch.randn(5)}
    runner.actor = _Group({name: tensor.double() for name, tensor in state.items()})  # compared in the rollout's type
    runner.rollout = _Group(state, state)
    runner.update_rollout_weights()
    runner.update_rollout_weights()
    assert (runner.actor.asked, runner.rollout.asked) == (1, 1)


def test_a_difference_on_any_rollout_rank_stops_the_run(runner: PhyaiRunner) -> None:
    state = {"frozen.weight": torch.randn(3), "b": torch.randn(5)}
    runner.actor = _Group(state)
    runner.rollout = _Group(state, {**state, "frozen.weight": state["frozen.weight"] + 1})
    with pytest.raises(WeightUpdateError, match=r"frozen\.weight.*ckpt_path.*resume_dir"):
        runner.update_rollout_weights()


def test_workers_that_cannot_say_are_left_alone(runner: PhyaiRunner) -> None:
    runner.actor, runner.rollout = _StockGroup(), _Group({"a": torch.zeros(1)})
    runner.update_rollout_weights()
    assert runner.rollout.asked == 0
