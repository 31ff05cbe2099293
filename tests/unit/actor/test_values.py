# SPDX-License-Identifier: Apache-2.0
"""Values for GAE: whose they are, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch

from rlinf_phyai.actor.values import (
    actor_values,
    check_value_source,
    choose_value_source,
    refuse_missing_values,
    value_gap_metrics,
)


def test_the_last_step_stays_the_rollouts():
    rollout = torch.full((3, 2, 1), torch.nan)
    rollout[-1] = torch.tensor([[5.0], [6.0]])
    values = actor_values(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), rollout)
    assert torch.equal(values, torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]], [[5.0], [6.0]]]))


@pytest.mark.parametrize("shape", [(2, 2, 1), (3, 3, 1), (3, 2, 5)])
def test_shapes_that_do_not_fit(shape):
    with pytest.raises(ValueError, match=r"\(2, 2\)"):
        actor_values(torch.zeros(2, 2), torch.zeros(shape))


def test_no_values_at_all():
    with pytest.raises(ValueError, match="returned no values"):
        actor_values(None, torch.zeros(3, 2, 1))


def test_missing_values_are_named_by_step():
    values = torch.zeros(4, 2, 1)
    refuse_missing_values(values)
    values[2, 0] = values[3, 1] = torch.nan
    with pytest.raises(ValueError, match=r"\(4, 2, 1\) is NaN at chunk steps \[2, 3\]"):
        refuse_missing_values(values)


def test_gap_over_unmasked_known_values():
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    rollout = torch.tensor([[1.5, 2.0], [torch.nan, 9.0], [0.0, 0.0]]).unsqueeze(-1)
    mask = torch.tensor([[True, True], [True, False]]).unsqueeze(-1)
    metrics = value_gap_metrics(values, rollout, mask)
    assert metrics == {
        "actor/rollout_train_value_gap": 0.25,
        "actor/rollout_train_value_gap_max": 0.5,
        "actor/rollout_train_value_rms": pytest.approx(math.sqrt((1 + 4) / 2)),
    }
    nothing = value_gap_metrics(values, rollout, torch.zeros_like(mask))
    assert nothing.keys() == metrics.keys()
    assert all(math.isnan(v) for v in nothing.values())


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("critic", True, True), "'critic'; allowed: auto, rollout, actor"),
        (("actor", False, True), "recompute_logprobs is off"),
        (("actor", True, False), "value_after_vlm: True"),
    ],
)
def test_refused_sources(arguments, message):
    with pytest.raises(ValueError, match=message):
        check_value_source(*arguments)


def test_auto_takes_the_actors_values_wherever_they_are_right():
    assert choose_value_source("auto", recompute=True, comparable=True) == "actor"
    assert choose_value_source("auto", recompute=False, comparable=True) == "rollout"
    assert choose_value_source("auto", recompute=True, comparable=False) == "rollout"
    assert choose_value_source("rollout", recompute=True, comparable=True) == "rollout"


def test_accepted_sources():
    check_value_source("auto", False, False)
    check_value_source("rollout", False, False)
    check_value_source("actor", True, True)
