# SPDX-License-Identifier: Apache-2.0
"""Importance weights: vectors computed by hand, and properties that hold for any log-probs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from omegaconf import OmegaConf

from rlinf_phyai.actor.correction import (
    LOG_WEIGHT_LIMIT,
    CorrectionConfig,
    advantage_weights,
    bound_weights,
    expand_mask,
    log_weights,
    sum_units,
)
from rlinf_phyai.actor.metrics import CorrectionSums

LEVELS = ("token_level", "action_level", "chunk_level")
BASE = CorrectionConfig(recompute=True, fix=True, clip=1.5, action_dim=3)


def config(**changes) -> CorrectionConfig:
    return replace(BASE, **changes)


# -- by hand ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "level, shape, expected",
    [("token_level", (2, 2, 3), 1.0), ("action_level", (2, 2), 3.0), ("chunk_level", (2,), 6.0)],
)
def test_units_sum_what_the_log_prob_type_says(level, shape, expected):
    units = sum_units(torch.ones(2, 2, 3), level, 3)
    assert units.shape == shape
    assert torch.equal(units, torch.full(shape, expected))


@pytest.mark.parametrize("mode, expected", [("truncate", 1.5), ("mask", 0.0), ("off", 1.0)])
def test_modes_above_the_bound(mode, expected):
    assert bound_weights(torch.tensor([2.0]), config(mode=mode)).item() == expected


@pytest.mark.parametrize("mode, expected", [("truncate", 0.5), ("mask", 0.0), ("off", 1.0)])
def test_modes_below_the_lower_bound(mode, expected):
    assert bound_weights(torch.tensor([0.25]), config(mode=mode, clip_low=0.5)).item() == expected


def test_a_bound_itself_is_inside():
    weights = torch.tensor([0.5, 1.5])
    assert torch.equal(bound_weights(weights, config(mode="mask", clip_low=0.5)), weights)


def test_offset_of_a_hundredth_over_a_chunk_of_35():
    q = torch.randn(4, 5, 7)
    weights = advantage_weights(q - 0.01, q, config(action_dim=7))
    torch.testing.assert_close(weights, torch.full((4,), math.exp(-0.35)), rtol=1e-5, atol=0)


def test_small_differences_survive_large_log_probs():
    # exactly representable: q = 100, p = q + 2**-13; 35 of them make 35 * 2**-13. Summing first would lose it.
    q = torch.full((1, 5, 7), 100.0)
    p = q + 2.0**-13
    assert log_weights(p, q, config(action_dim=7)).item() == 35 * 2.0**-13


def test_the_log_weight_is_clamped():
    p, q = torch.full((1, 2, 3), 100.0), torch.zeros(1, 2, 3)
    assert log_weights(p, q, BASE).item() == LOG_WEIGHT_LIMIT
    assert log_weights(q, p, BASE).item() == -LOG_WEIGHT_LIMIT


def test_normalised_weights_divide_by_the_mean_of_the_step():
    q = torch.zeros(2, 1, 3)
    p = torch.tensor([math.log(1.2) / 3, math.log(0.8) / 3]).reshape(2, 1, 1).expand(2, 1, 3)
    cfg = config(normalize=True, clip=10.0)
    mean = CorrectionSums.of(p, q, None, cfg).bounded_mean
    assert mean == pytest.approx(1.0, abs=1e-6)
    mean = CorrectionSums.of(p + math.log(2) / 3, q, None, cfg).bounded_mean
    weights = advantage_weights(p + math.log(2) / 3, q, cfg, normalizer=mean)
    torch.testing.assert_close(weights, torch.tensor([1.2, 0.8]))


def test_weights_are_detached():
    p = torch.zeros(1, 2, 3, requires_grad=True)
    assert not advantage_weights(p, torch.zeros(1, 2, 3), BASE).requires_grad


def test_shape_error_names_both_shapes():
    with pytest.raises(ValueError, match=r"\(4, 2, 3\).*\(4, 3, 3\)"):
        log_weights(torch.zeros(4, 2, 3), torch.zeros(4, 3, 3), BASE)


def test_action_dim_that_does_not_divide():
    with pytest.raises(ValueError, match=r"\(4, 2, 3\).*action_dim = 4"):
        sum_units(torch.zeros(4, 2, 3), "token_level", 4)


@pytest.mark.parametrize("side", ["actor", "rollout"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_scores_are_an_error_that_says_where(side, value):
    good, bad = torch.zeros(2, 2, 3), torch.zeros(2, 2, 3)
    bad[1, 0, 2] = value
    p, q = (bad, good) if side == "actor" else (good, bad)
    with pytest.raises(ValueError, match=rf"\({side}\): 1 of 12 values"):
        log_weights(p, q, BASE)


@pytest.mark.parametrize(
    "mask_shape, shape",
    [
        ((2, 3, 1), (2, 3)),
        ((2, 3, 1), (2, 3, 5)),
        ((2, 3, 5), (2, 3, 5)),
        ((2, 3, 1), (2, 3, 5, 7)),
        ((2, 3, 5), (2, 3, 5, 7)),
    ],
)
def test_masks_broadcast_to_units(mask_shape, shape):
    mask = torch.rand(mask_shape) > 0.5
    expanded = expand_mask(mask, shape)
    assert expanded.shape == shape
    reference = mask.reshape(*mask_shape[:2], *(() if len(shape) == 2 else (mask_shape[2], *[1] * (len(shape) - 3))))
    assert torch.equal(expanded, reference.expand(shape))


def test_a_mask_finer_than_the_units_is_an_error():
    with pytest.raises(ValueError, match=r"\(2, 3, 5\).*\(2, 3\)"):
        expand_mask(torch.ones(2, 3, 5, dtype=torch.bool), (2, 3))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"recompute": False}, "recompute_logprobs is off"),
        ({"clip": None}, "importance_sampling_clip is missing"),
        ({"clip": 0.0}, "must be greater than 0"),
        ({"clip": -1.0}, "must be greater than 0"),
        ({"clip": math.nan}, "must be greater than 0"),
        ({"clip_low": 2.0}, "importance_sampling_clip_low is 2.0"),
        ({"clip_low": -0.1}, "importance_sampling_clip_low is -0.1"),
        ({"mode": "drop"}, "truncate, mask, off"),
        ({"logprob_type": "sequence_level"}, "token_level, action_level, chunk_level"),
        ({"action_dim": 0}, "action_dim is 0"),
    ],
)
def test_config_errors_name_key_and_value(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_config_is_read_from_the_algorithm_section():
    cfg = OmegaConf.create(
        """
        algorithm: {logprob_type: action_level, recompute_logprobs: True, importance_sampling_fix: True,
                    importance_sampling_clip: 2, importance_sampling_clip_low: 0.5, importance_sampling_mode: off}
        actor: {model: {action_dim: 4}}
        """
    )
    assert CorrectionConfig.from_config(cfg) == CorrectionConfig(
        recompute=True, fix=True, clip=2.0, clip_low=0.5, mode="off", logprob_type="action_level", action_dim=4
    )
    bare = OmegaConf.create({"algorithm": {"logprob_type": "chunk_level"}, "actor": {"model": {}}})
    assert CorrectionConfig.from_config(bare) == CorrectionConfig(recompute=False, fix=False)


# -- properties ------------------------------------------------------------------------------------------------------

finite = st.floats(-40, 40, width=32)
scores = hnp.arrays("float32", (3, 2, 3), elements=finite).map(torch.from_numpy)
levels = st.sampled_from(LEVELS)
modes = st.sampled_from(["truncate", "mask", "off"])


@settings(max_examples=60, deadline=None)
@given(p=scores, q=scores, level=levels, mode=modes, clip=st.floats(0.1, 10), low=st.floats(0, 0.1))
def test_weights_stay_within_the_bounds(p, q, level, mode, clip, low):
    cfg = config(logprob_type=level, mode=mode, clip=clip, clip_low=low)
    weights = advantage_weights(p, q, cfg)
    assert torch.isfinite(weights).all()
    assert (weights >= 0).all()
    low32, clip32 = torch.tensor([low, clip])
    if mode == "truncate":
        assert ((weights >= low32) & (weights <= clip32)).all()
    elif mode == "mask":
        assert ((weights == 0) | ((weights >= low32) & (weights <= clip32))).all()
    else:
        assert (weights == 1).all()


@settings(max_examples=40, deadline=None)
@given(p=scores, level=levels)
def test_equal_scores_give_weight_one(p, level):
    assert (torch.exp(log_weights(p, p, config(logprob_type=level))) == 1).all()


@settings(max_examples=40, deadline=None)
@given(p=scores, q=scores, level=levels)
def test_swapping_the_scores_inverts_the_weight(p, q, level):
    cfg = config(logprob_type=level)
    assert torch.equal(log_weights(p, q, cfg), -log_weights(q, p, cfg))


@settings(max_examples=40, deadline=None)
@given(p=scores, q=scores, level=levels, order=st.permutations(range(3)))
def test_weights_follow_their_samples(p, q, level, order):
    cfg = config(logprob_type=level)
    order = list(order)
    assert torch.equal(log_weights(p[order], q[order], cfg), log_weights(p, q, cfg)[order])


@settings(max_examples=40, deadline=None)
@given(q=scores, level=levels, shift=st.floats(-0.5, 0.5, width=32))
def test_more_likely_for_the_actor_weighs_more(q, level, shift):
    weights = torch.exp(log_weights(q + shift, q, config(logprob_type=level)))
    assert ((weights - 1) * shift >= -1e-4).all()


@settings(max_examples=60, deadline=None)
@given(
    p=scores,
    q=scores,
    level=levels,
    mask=hnp.arrays("bool", (3, 1)).map(torch.from_numpy),
    garbage=hnp.arrays("float32", (3, 2, 3), elements=finite).map(torch.from_numpy),
)
def test_masked_samples_count_nowhere(p, q, level, mask, garbage):
    cfg = config(logprob_type=level)
    keep = mask.reshape(3, 1, 1)
    with_garbage = CorrectionSums.of(torch.where(keep, p, garbage), torch.where(keep, q, -garbage), mask, cfg)
    assert with_garbage == CorrectionSums.of(p, q, mask, cfg)
    kept = mask.flatten()
    only_kept = CorrectionSums.of(p[kept], q[kept], None, cfg)
    for name, value in vars(only_kept).items():
        assert getattr(with_garbage, name) == pytest.approx(value, rel=1e-9, abs=1e-9), name
