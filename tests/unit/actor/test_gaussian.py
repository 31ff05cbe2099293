# SPDX-License-Identifier: Apache-2.0
"""Distances between the two policies, recovered from log-probs of samples with known means."""

from __future__ import annotations

import math

import pytest
import torch
from omegaconf import OmegaConf

from rlinf_phyai.actor.gaussian import GaussianSettings, gaussian_metrics, mean_shift, step_deviations

SETTINGS = GaussianSettings(num_steps=3, noise_level=0.5, action_dim=7)


def test_deviations_of_three_steps():
    torch.testing.assert_close(step_deviations(3, 0.5), torch.tensor([0.5, 0.408248, 0.204124]), rtol=1e-5, atol=0)
    assert step_deviations(1, 0.5).tolist() == [0.5]


def test_deviations_are_the_rollouts():
    from rlinf_phyai.rollout.sampling import flow_sde_sigmas

    for steps in (1, 2, 3, 10):
        expected = flow_sde_sigmas(steps, 0.7) * math.sqrt(1 / steps)
        torch.testing.assert_close(step_deviations(steps, 0.7), expected, rtol=1e-5, atol=0)


def scores(shift: torch.Tensor, steps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 log-probs [T,B,5,7] of samples from q under q and under p, whose mean lies ``shift`` deviations higher."""
    g = torch.Generator().manual_seed(0)
    s = step_deviations(3, 0.5).double()[steps][..., None, None].expand(*steps.shape, 5, 7)
    z = torch.randn(*steps.shape, 5, 7, generator=g, dtype=torch.float64)
    q = torch.distributions.Normal(0.0, s).log_prob(z * s)
    p = torch.distributions.Normal(shift * s, s).log_prob(z * s)
    return p.float(), q.float()


def test_a_known_shift_is_found_again():
    steps = torch.tensor([[0, 1, 2, 1], [2, 2, 0, 1]])
    shift = torch.linspace(0.01, 0.07, 7, dtype=torch.float64).expand(2, 4, 5, 7)
    p, q = scores(shift, steps)
    metrics = gaussian_metrics(p, q, steps, None, SETTINGS)
    for j in range(7):
        assert metrics[f"actor/rollout_train_mean_shift/dim_{j}"] == pytest.approx(0.01 * (j + 1), rel=0.05)
    expected = float(5 * shift[0, 0, 0].square().sum() / 2)
    assert metrics["actor/rollout_train_kl"] == pytest.approx(expected, rel=0.05)
    for k in range(3):
        assert metrics[f"actor/rollout_train_kl/step_{k}"] == pytest.approx(expected, rel=0.05)


def test_each_step_has_its_own_divergence():
    steps = torch.tensor([[0, 1]])
    shift = torch.zeros(1, 2, 5, 7, dtype=torch.float64)
    shift[0, 1] = 0.1
    metrics = gaussian_metrics(*scores(shift, steps), steps, None, SETTINGS)
    assert metrics["actor/rollout_train_kl/step_0"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["actor/rollout_train_kl/step_1"] == pytest.approx(35 * 0.01 / 2, rel=0.05)
    assert math.isnan(metrics["actor/rollout_train_kl/step_2"])


def test_masked_samples_do_not_count():
    steps = torch.tensor([[0, 0]])
    shift = torch.zeros(1, 2, 5, 7, dtype=torch.float64)
    shift[0, 1] = 5.0
    p, q = scores(shift, steps)
    masked = gaussian_metrics(p, q, steps, torch.tensor([[[True], [False]]]), SETTINGS)
    assert masked["actor/rollout_train_kl"] == pytest.approx(0.0, abs=1e-9)
    assert masked["actor/rollout_train_mean_shift/dim_3"] == pytest.approx(0.0, abs=1e-9)
    nothing = gaussian_metrics(p, q, steps, torch.zeros(1, 2, 1, dtype=torch.bool), SETTINGS)
    assert nothing.keys() == masked.keys()
    assert all(math.isnan(v) for v in nothing.values())


def test_rounding_of_log_probs_is_far_below_any_limit():
    steps = torch.zeros(4, 64, dtype=torch.int64)
    p, _ = scores(torch.zeros(4, 64, 5, 7, dtype=torch.float64), steps)
    one_ulp = torch.nextafter(p, torch.full_like(p, 10.0))
    assert gaussian_metrics(one_ulp, p, steps, None, SETTINGS)["actor/rollout_train_kl"] < 1e-8


def test_a_sample_at_the_mean():
    peak = torch.full((1, 1, 1, 1), -math.log(0.5) - 0.5 * math.log(2 * math.pi))
    assert mean_shift(peak + 1e-7, peak, torch.full((1, 1), 0.5)).item() < 1e-3


def test_a_constant_offset_moves_no_mean_far():
    steps = torch.zeros(8, 64, dtype=torch.int64)
    p, _ = scores(torch.zeros(8, 64, 5, 7, dtype=torch.float64), steps)
    shift = mean_shift(p, p + 0.01, torch.full((8, 64), 0.5))
    assert shift.max() <= math.sqrt(0.02) + 1e-6  # at the peak, where log-probs say least about the mean


@pytest.mark.parametrize(
    "openpi, expected",
    [
        ("{num_steps: 4, noise_level: 0.3}", GaussianSettings(4, 0.3, 7)),
        ("{num_steps: 4, noise_method: flow_noise}", None),
        ("{num_steps: 4, joint_logprob: true}", None),
        ("{num_steps: 4, safe_get_logprob: true}", None),
        ("{num_steps: 4, noise_method: flow_cps}", None),
        ("{num_steps: 4, noise_anneal: true}", GaussianSettings(4, 0.5, 7)),
        ("{}", None),
    ],
)
def test_settings(openpi, expected):
    cfg = OmegaConf.create(f"actor: {{model: {{openpi: {openpi}}}}}")
    assert GaussianSettings.from_config(cfg) == expected
