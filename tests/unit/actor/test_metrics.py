# SPDX-License-Identifier: Apache-2.0
"""Figures of the mismatch against values computed by hand and by NumPy."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from rlinf_phyai.actor.correction import CorrectionConfig
from rlinf_phyai.actor.losses import FirstUpdate
from rlinf_phyai.actor.metrics import CorrectionSums, first_update_metrics

BASE = CorrectionConfig(recompute=True, fix=True, clip=1.5, action_dim=2)


@pytest.mark.parametrize(
    "level, per_element",
    [("token_level", math.log(2)), ("action_level", math.log(2) / 2), ("chunk_level", math.log(2) / 2)],
)
def test_gap_of_ln_2_per_unit(level, per_element):
    q = torch.zeros(1, 4, 1, 2)  # T, B, c, d: with one action per chunk, action and chunk are the same two elements
    mask = torch.tensor([[[True], [True], [False], [True]]])
    p = q + per_element
    p[0, 2] = 5.0  # masked: neither mean nor maximum may see it
    metrics = CorrectionSums.of(p, q, mask, replace(BASE, logprob_type=level), batch_dims=2).metrics()
    assert metrics["actor/importance_sampling_weight"] == pytest.approx(2.0, rel=1e-6)
    assert metrics["actor/importance_sampling_weight_max"] == pytest.approx(2.0, rel=1e-6)
    assert metrics["actor/importance_sampling_clip_fraction"] == 1.0
    assert metrics["actor/rollout_train_logprob_gap"] == pytest.approx(per_element, rel=1e-6)
    assert metrics["actor/behav_approx_kl"] == pytest.approx(-math.log(2), rel=1e-6)
    assert metrics["actor/importance_sampling_effective_sample_size"] == pytest.approx(1.0, rel=1e-6)
    assert metrics["actor/importance_sampling_chi2"] == pytest.approx(3.0, rel=1e-6)


def test_two_different_weights_by_hand():
    # weights 2 and 0.5: mean 1.25, ESS 2.5^2 / (2 * 4.25), chi2 = 4.25 / 2 - 1; half above 1.5, half below 0.8
    q = torch.zeros(1, 2, 1, 2)
    p = torch.tensor([math.log(2) / 2, -math.log(2) / 2]).reshape(1, 2, 1, 1).expand(1, 2, 1, 2)
    metrics = CorrectionSums.of(p, q, None, replace(BASE, clip_low=0.8), batch_dims=2).metrics()
    assert metrics["actor/importance_sampling_weight"] == pytest.approx(1.25, rel=1e-6)
    assert metrics["actor/importance_sampling_weight_max"] == pytest.approx(2.0, rel=1e-6)
    assert metrics["actor/importance_sampling_effective_sample_size"] == pytest.approx(6.25 / 8.5, rel=1e-6)
    assert metrics["actor/importance_sampling_chi2"] == pytest.approx(1.125, rel=1e-6)
    assert metrics["actor/importance_sampling_clip_fraction"] == 0.5
    assert metrics["actor/importance_sampling_clip_low_fraction"] == 0.5
    assert metrics["actor/behav_approx_kl"] == pytest.approx(0.0, abs=1e-7)


def test_pearson_is_numpys():
    torch.manual_seed(0)
    p = torch.randn(3, 4, 5, 2)
    q = 0.7 * p + 0.3 * torch.randn(3, 4, 5, 2) - 1.0
    metrics = CorrectionSums.of(p, q, None, BASE, batch_dims=2).metrics()
    expected = np.corrcoef(p.flatten().double().numpy(), q.flatten().double().numpy())[0, 1]
    assert metrics["actor/rollout_train_logprob_pearson"] == pytest.approx(expected, rel=1e-9)


def test_parts_add_up_to_the_whole():
    torch.manual_seed(0)
    p, q, mask = torch.randn(2, 6, 5, 2) / 9, torch.randn(2, 6, 5, 2) / 9, torch.rand(2, 6, 1) > 0.3
    whole = CorrectionSums.of(p, q, mask, BASE, batch_dims=2)
    parts = [
        CorrectionSums.of(p[:, i : i + 2], q[:, i : i + 2], mask[:, i : i + 2], BASE, batch_dims=2) for i in (0, 2, 4)
    ]
    for field in fields(whole):
        values = [getattr(part, field.name) for part in parts]
        combined = max(values) if field.name == "weight_max" else sum(values)
        assert getattr(whole, field.name) == pytest.approx(combined, rel=1e-9), field.name


def test_a_fully_masked_step_reports_nan_under_the_same_keys():
    p = torch.randn(2, 3, 5, 2)
    some = CorrectionSums.of(p, p, None, BASE, batch_dims=2).metrics()
    none_left = CorrectionSums.of(p, p, torch.zeros(2, 3, 1, dtype=torch.bool), BASE, batch_dims=2)
    assert none_left.metrics().keys() == some.keys()
    assert all(math.isnan(value) for value in none_left.metrics().values())
    assert none_left.bounded_mean == 1.0


def test_first_update_counts_unmasked_units_only():
    first = FirstUpdate()
    batch = {
        "logprobs": torch.tensor([0.0, 0.1, 3.0]),
        "old_logprobs": torch.zeros(3),
        "advantages": torch.ones(3),
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.05,
        "loss_mask": torch.tensor([True, True, False]),
    }
    first.observe(batch)
    metrics = first_update_metrics(first)
    assert metrics["actor/first_update/ratio_max_dev"] == pytest.approx(math.exp(0.1) - 1, rel=1e-5)
    assert metrics["actor/first_update/clip_fraction"] == 0.5
    first.observe({**batch, "loss_mask": torch.zeros(3, dtype=torch.bool)})
    assert first_update_metrics(first) == metrics
    assert all(math.isnan(value) for value in first_update_metrics(FirstUpdate()).values())
