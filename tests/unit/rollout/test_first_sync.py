# SPDX-License-Identifier: Apache-2.0
"""The runner compares all parameters after the first weight sync, and only then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rlinf.runners.embodied_runner import EmbodiedRunner

from rlinf_phyai.checksum import checksums
from rlinf_phyai.errors import WeightUpdateError
from rlinf_phyai.runner import PhyaiRunner


class _Handle:
    def __init__(self, result: list[Any]) -> None:
        self._result = result

    def wait(self) -> list[Any]:
        return self._result


class _Group:
    """A worker group as the driver sees it: one result per rank."""

    def __init__(self, *states: dict[str, torch.Tensor]) -> None:
        self.states, self.asked = states, 0

    def parameter_checksums(self, dtypes: dict[str, torch.dtype] | None = None) -> _Handle:
        self.asked += 1
        return _Handle(
            [checksums(s.items(), dtypes or {name: tensor.dtype for name, tensor in s.items()}) for s in self.states]
        )


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> PhyaiRunner:
    monkeypatch.setattr(EmbodiedRunner, "update_rollout_weights", lambda self: None)
    return object.__new__(PhyaiRunner)


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
    runner.actor, runner.rollout = object(), _Group({"a": torch.zeros(1)})
    runner.update_rollout_weights()
    assert runner.rollout.asked == 0
