# SPDX-License-Identifier: Apache-2.0
"""Sigma plan, step choice and noise of the controller."""

from __future__ import annotations

import random

import pytest
import torch

from rlinf_phyai.rollout.sampling import FlowSampler, SamplingOptions, flow_sde_sigmas

SHAPE = (10, 32)


def _sampler(seed: int = 1, rank: int = 0, num_steps: int = 3, **options) -> FlowSampler:
    return FlowSampler(SamplingOptions(num_steps, 0.5, **options), SHAPE, seed, rank)


def test_sigmas_of_three_steps() -> None:
    sigmas = flow_sde_sigmas(3, 0.5)
    torch.testing.assert_close(sigmas, torch.tensor([0.866025, 0.707107, 0.353553]), atol=1e-6, rtol=0)
    delta = torch.tensor(1 / 3)
    torch.testing.assert_close(
        sigmas * delta.sqrt(), torch.tensor([0.5, 0.408248, 0.204124]), atol=1e-6, rtol=0
    )  # the standard deviations of the transitions
    assert sigmas.dtype == torch.float32


def test_sigma_of_one_step_is_the_noise_level() -> None:
    torch.testing.assert_close(flow_sde_sigmas(1, 0.37), torch.tensor([0.37]))


@pytest.mark.parametrize("num_steps", [1, 2, 3, 10])
def test_sigmas_equal_those_of_rlinf(num_steps: int) -> None:
    """RLinf's own formula, called: with velocity 0 and x = 1 its transition has ``std = sigma * sqrt(delta)``."""
    import types

    from rlinf.models.embodiment.openpi.openpi_action_model import OpenPi0ForRLActionPrediction as Policy

    config = types.SimpleNamespace(
        noise_level=0.5, noise_anneal=False, noise_method="flow_sde", add_value_head=False, value_after_vlm=True
    )
    stand_in = types.SimpleNamespace(
        config=config,
        get_velocity=lambda state, x, *_: (torch.zeros_like(x), x),
        _get_timesteps=lambda steps, device: Policy._get_timesteps(None, steps, device),
        _get_noise_level=lambda **kwargs: Policy._get_noise_level(types.SimpleNamespace(config=config), **kwargs),
    )
    wanted = []
    for step in range(num_steps):
        x = torch.ones(1, 2, 2)
        _, std, _, _ = Policy.sample_mean_var_val(
            stand_in, x, step, torch.zeros(1, 1), None, None, "flow_sde", num_steps
        )
        times = Policy._get_timesteps(None, num_steps, "cpu")
        wanted.append(std.flatten()[0] / torch.sqrt(times[step] - times[step + 1]))
    torch.testing.assert_close(flow_sde_sigmas(num_steps, 0.5), torch.stack(wanted), atol=0, rtol=2e-7)


def test_one_stochastic_step_for_the_whole_batch() -> None:
    sampler, seen = _sampler(), set()
    for _ in range(60):
        plan = sampler.plan(4, "train")
        step = int(plan.denoise_inds[0, 0])
        seen.add(step)
        assert plan.denoise_inds.shape == (4, 3)
        assert plan.denoise_inds.dtype == torch.int64
        assert bool((plan.denoise_inds == step).all())
        wanted = torch.zeros(4, 3)
        wanted[:, step] = flow_sde_sigmas(3, 0.5)[step]
        assert torch.equal(plan.sigmas, wanted)
    assert seen == {0, 1, 2}


def test_ignore_last_never_chooses_the_last_step() -> None:
    sampler = _sampler(num_steps=4, ignore_last=True)
    assert {int(sampler.plan(1, "train").denoise_inds[0, 0]) for _ in range(80)} == {0, 1, 2}


def test_joint_sampling_makes_every_step_stochastic() -> None:
    plan = _sampler(joint_logprob=True).plan(2, "train")
    assert torch.equal(plan.sigmas, flow_sde_sigmas(3, 0.5).repeat(2, 1))
    assert plan.denoise_inds.tolist() == [[0, 1, 2], [0, 1, 2]]


def test_evaluation_is_deterministic_after_its_start() -> None:
    plan = _sampler(joint_logprob=True).plan(2, "eval")
    assert not plan.sigmas.any()
    assert not plan.step_noise.any()
    assert plan.denoise_inds.tolist() == [[-1] * 3] * 2
    assert plan.noise.std() > 0.8


def test_noise_is_standard_normal_and_differs_everywhere() -> None:
    plan = _sampler().plan(64, "train")
    assert plan.noise.shape == (64, *SHAPE)
    assert plan.step_noise.shape == (64, 3, *SHAPE)
    for noise in (plan.noise, plan.step_noise):
        assert abs(float(noise.mean())) < 0.02
        assert abs(float(noise.std()) - 1) < 0.02
        assert noise.unique().numel() > 0.99 * noise.numel()


def test_seed_rank_and_global_step_decide_everything() -> None:
    def draw(seed: int, rank: int, step: int) -> list[torch.Tensor]:
        sampler = _sampler(seed, rank)
        sampler.set_global_step(step)
        plans = [sampler.plan(2, "train") for _ in range(3)]
        return [torch.cat([plan.noise.flatten(), plan.step_noise.flatten(), plan.sigmas.flatten()]) for plan in plans]

    random.seed(0)
    torch.manual_seed(0)
    first = draw(1, 0, 5)
    random.seed(99)
    torch.manual_seed(99)
    again = draw(1, 0, 5)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for other in (draw(2, 0, 5), draw(1, 1, 5), draw(1, 0, 6)):
        assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_the_numbers_of_a_step_do_not_depend_on_what_came_before() -> None:
    straight, resumed = _sampler(), _sampler()
    for _ in range(7):
        straight.plan(3, "train")
        straight.plan(3, "eval")
    straight.set_global_step(4)
    resumed.set_global_step(4)
    assert torch.equal(straight.plan(3, "train").noise, resumed.plan(3, "train").noise)


def test_repeating_the_global_step_does_not_repeat_numbers() -> None:
    sampler = _sampler()
    sampler.set_global_step(3)
    first = sampler.plan(2, "train").noise
    sampler.set_global_step(3)
    assert not torch.equal(sampler.plan(2, "train").noise, first)


def test_evaluating_does_not_change_training() -> None:
    with_evaluation, without = _sampler(), _sampler()
    with_evaluation.plan(5, "eval")
    assert torch.equal(with_evaluation.plan(2, "train").noise, without.plan(2, "train").noise)


def test_a_run_that_only_evaluates_needs_no_noise_level() -> None:
    sampler = FlowSampler(SamplingOptions(1, 0.0, ignore_last=True, trains=False), SHAPE, 0, 0)
    assert sampler.plan(2, "eval").noise.shape == (2, *SHAPE)
    with pytest.raises(ValueError, match="evaluation only"):
        sampler.plan(2, "train")


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="positive noise level"):
        SamplingOptions(3, 0.0)
    with pytest.raises(ValueError, match="ignore_last leaves no step"):
        SamplingOptions(1, 0.5, ignore_last=True)
    with pytest.raises(ValueError, match="at least 1 denoise step"):
        SamplingOptions(0, 0.5)
    with pytest.raises(ValueError, match="allowed: 'train', 'eval'"):
        _sampler().plan(1, "test")
    with pytest.raises(ValueError, match="batch is 0"):
        _sampler().plan(0, "train")
