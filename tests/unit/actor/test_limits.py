# SPDX-License-Identifier: Apache-2.0
"""Verdicts name the figure, the limit and the meaning."""

from __future__ import annotations

import math

import pytest
import torch

from rlinf_phyai.actor.limits import Limits, judge

HEALTHY = {
    "actor/rollout_train_logprob_gap": 0.01,
    "actor/rollout_train_kl": 0.001,
    "actor/importance_sampling_weight": 1.0,
    "actor/importance_sampling_effective_sample_size": 0.95,
    "actor/rollout_train_value_gap": 0.001,
}


def test_healthy_figures_pass():
    verdicts = judge(HEALTHY, Limits())
    assert [v.name for v in verdicts] == list(HEALTHY)
    assert all(v.ok for v in verdicts)


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("actor/rollout_train_logprob_gap", 0.2, "at most 0.01"),
        ("actor/rollout_train_kl", 1.0, "at most 0.002"),
        ("actor/importance_sampling_weight", 0.1, "0.5 to 2"),
        ("actor/importance_sampling_weight", 3.0, "0.5 to 2"),
        ("actor/importance_sampling_effective_sample_size", 0.1, "at least 0.3"),
        ("actor/rollout_train_value_gap", 0.5, "at most 0.05"),
        ("actor/rollout_train_logprob_gap", math.nan, "nan"),
    ],
)
def test_one_figure_beyond_its_limit(name, value, words):
    failed = [v for v in judge(HEALTHY | {name: value}, Limits()) if not v.ok]
    assert [v.name for v in failed] == [name]
    assert words in str(failed[0])
    assert failed[0].meaning in str(failed[0])


def test_the_values_size_scales_their_limit():
    """Rounding is relative: bfloat16 values around 15 differed by 0.09 at full size, with the same parameters."""
    large = HEALTHY | {"actor/rollout_train_value_gap": 0.09, "actor/rollout_train_value_rms": 15.0}
    assert all(v.ok for v in judge(large, Limits()))
    for wrong in ({"actor/rollout_train_value_gap": 0.9}, {"actor/rollout_train_value_rms": 0.1}):
        assert [v.name for v in judge(large | wrong, Limits()) if not v.ok] == ["actor/rollout_train_value_gap"]


def test_what_was_not_reported_is_not_judged():
    assert judge({}, Limits()) == []


def test_limits_can_be_set():
    limits = Limits().replaced({"logprob_gap": 0.5})
    assert all(v.ok for v in judge(HEALTHY | {"actor/rollout_train_logprob_gap": 0.2}, limits))


def test_float32_allows_rounding_only():
    strict = Limits.for_dtype(torch.float32)
    assert Limits.for_dtype(torch.bfloat16) == Limits()
    failed = {v.name for v in judge(HEALTHY, strict) if not v.ok}
    assert failed == {
        "actor/rollout_train_logprob_gap",
        "actor/rollout_train_kl",
        "actor/rollout_train_value_gap",
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_fp8_prefix_is_allowed_its_own_rounding(dtype):
    measured = HEALTHY | {
        "actor/rollout_train_logprob_gap": 0.016,
        "actor/rollout_train_kl": 9.7e-3,
        "actor/rollout_train_value_gap": 0.2,
    }
    assert all(verdict.ok for verdict in judge(measured, Limits.for_dtype(dtype, "fp8")))
    assert len([verdict for verdict in judge(measured, Limits.for_dtype(dtype)) if not verdict.ok]) == 3


@pytest.mark.parametrize("pairs, words", [({"gap": 1.0}, "unknown limit 'gap'"), ({"kl": -1.0}, "kl is -1.0")])
def test_limits_that_make_no_sense(pairs, words):
    with pytest.raises(ValueError, match=words):
        Limits().replaced(pairs)
