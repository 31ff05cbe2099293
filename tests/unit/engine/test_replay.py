# SPDX-License-Identifier: Apache-2.0
"""L7: with noise, step noise and sigmas given a call repeats bit for bit; otherwise an explicit, seeded generator decides."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import torch

from rlinf_phyai.engine import Engine
from rlinf_phyai.models.pi05 import PI05RolloutRequest

from .conftest import (
    SIZES,
    STEPS,
    Target,
    assert_same_bits,
    rollout_fields,
    rollout_request,
    rollout_tensors,
    step_request,
)

MakeEngine = Callable[..., Engine]


def without_noise(**options: object) -> PI05RolloutRequest:
    return replace(rollout_request(**options), noise=None, step_noise=None)


def test_two_calls_agree_bit_for_bit(make_engine: MakeEngine, target: Target) -> None:
    engine = make_engine(target=target)
    request = rollout_request()
    assert_same_bits(rollout_tensors(engine, request), rollout_tensors(engine, request))
    assert torch.equal(engine.step(step_request()), engine.step(step_request()))


def test_calls_in_between_leave_no_trace(make_engine: MakeEngine, target: Target) -> None:
    """Other batch sizes, step counts, prompts, cameras and drawn noises share buffers with the repeated call."""
    engine = make_engine(target=target)
    first = rollout_tensors(engine, rollout_request())
    for options in (
        {"batch": 4, "seed": 1},
        {"batch": 1, "num_steps": 1, "sde_step": 0},
        {"batch": 3, "sde_step": None},
    ):
        rollout_tensors(engine, rollout_request(**options))
        rollout_tensors(engine, without_noise(**options))
    engine.step(step_request(batch=3, cameras=3))
    engine.value(step_request(batch=4))
    assert_same_bits(first, rollout_tensors(engine, rollout_request()))


def test_two_engines_agree(make_engine: MakeEngine, target: Target) -> None:
    request = rollout_request(batch=3)
    assert_same_bits(
        rollout_tensors(make_engine(target=target), request), rollout_tensors(make_engine(target=target), request)
    )


def test_outputs_are_the_callers_own(make_engine: MakeEngine, target: Target) -> None:
    """A later call does not change what an earlier one returned, and a caller who writes into it changes no later call."""
    engine = make_engine(target=target)
    first = rollout_tensors(engine, rollout_request())
    kept = {name: tensor.clone() for name, tensor in first.items()}
    rollout_tensors(engine, rollout_request(seed=7))
    assert_same_bits(first, kept)
    for tensor in first.values():
        tensor.fill_(float("nan"))
    assert_same_bits(kept, rollout_tensors(engine, rollout_request()))


def test_requests_are_not_modified(make_engine: MakeEngine) -> None:
    request = rollout_request()
    before = {f.name: getattr(request, f.name) for f in fields(request)}
    copies = {name: value.clone() for name, value in before.items() if isinstance(value, torch.Tensor)}
    engine = make_engine()
    engine.rollout_step(request)
    engine.value(request)
    for name, copy in copies.items():
        assert torch.equal(getattr(request, name), copy), name


def test_left_out_noise_comes_from_the_seeded_generator(make_engine: MakeEngine, target: Target) -> None:
    request = without_noise()
    runs = [rollout_tensors(make_engine(target=target, runtime={"seed": seed}), request) for seed in (5, 5, 6)]
    assert_same_bits(runs[0], runs[1])
    assert not torch.equal(runs[0]["chains"], runs[2]["chains"])


def test_consecutive_draws_differ_and_are_standard_normal(make_engine: MakeEngine) -> None:
    engine = make_engine()
    request = without_noise(batch=4, sde_step=None)
    noises = [rollout_tensors(engine, request)["chains"][:, 0] for _ in range(50)]
    assert not torch.equal(noises[0], noises[1])
    values = torch.cat(noises).flatten()  # 50 * 4 * 6 * 8 = 9600 draws: the mean's standard error is 0.01
    assert abs(float(values.mean())) < 0.05
    assert abs(float(values.std()) - 1) < 0.05


def test_drawn_noise_can_be_replayed_from_the_output(make_engine: MakeEngine) -> None:
    """The chain tells the noises that were drawn, so a sampled call can be repeated exactly up to float32 rounding."""
    engine = make_engine()
    request = without_noise(sde_step=None)
    sampled = rollout_tensors(engine, request)
    # logp = -ln(std) - ln(2 pi)/2 - eps^2/2 gives |eps|; compare with the chain's own by rescoring the first step.
    repeated = rollout_tensors(
        engine, replace(request, noise=sampled["chains"][:, 0], step_noise=torch.zeros(2, STEPS, 6, 8))
    )
    assert torch.equal(repeated["chains"][:, 0], sampled["chains"][:, 0])
    std = 0.6 * (1 / STEPS) ** 0.5
    eps = (sampled["chains"][:, 1] - repeated["chains"][:, 1]) / std
    log_prob = -torch.log(torch.tensor(std)) - 0.5 * torch.log(torch.tensor(2 * torch.pi)) - 0.5 * eps.square()
    assert float((log_prob - sampled["log_probs"][:, 0]).abs().max()) < 1e-4


def test_global_random_state_is_neither_read_nor_changed(make_engine: MakeEngine) -> None:
    request = without_noise()

    def run(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
        engine = make_engine()
        found = rollout_tensors(engine, request)
        engine.step(replace(step_request(), noise=None))
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]
        assert np.array_equal(np.random.get_state()[1], before[2])
        return found

    assert_same_bits(run(1), run(2))


def test_sigmas_encode_the_step_choice_per_sample(make_engine: MakeEngine) -> None:
    """Each sample may have its own stochastic step; every other transition is deterministic with log-prob exactly 0."""
    given = rollout_fields(batch=3, sde_step=None)
    given["sigmas"] = given["sigmas"] * torch.eye(3)
    engine = make_engine()
    output = engine.rollout_step(PI05RolloutRequest(**given))
    for sample in range(3):
        for step in range(3):
            assert bool((output.log_probs[sample, step] != 0).all()) == (sample == step)
            assert bool((output.log_probs[sample, step] == 0).all()) == (sample != step)


def test_all_deterministic_steps_equal_step(make_engine: MakeEngine) -> None:
    engine = make_engine()
    given = rollout_fields(batch=3)
    given["sigmas"] = torch.zeros(3, STEPS)
    output = engine.rollout_step(PI05RolloutRequest(**given))
    assert float((output.actions - engine.step(step_request(batch=3))).abs().max()) < 1e-6
    assert torch.count_nonzero(output.log_probs) == 0


def test_a_sample_does_not_depend_on_its_batch(make_engine: MakeEngine) -> None:
    engine = make_engine()
    given = rollout_fields(batch=4)
    whole = rollout_tensors(engine, PI05RolloutRequest(**given))
    for row in range(4):
        alone = {name: value[row : row + 1] for name, value in given.items()}
        single = rollout_tensors(engine, PI05RolloutRequest(**alone))
        for name, value in single.items():
            assert float((value - whole[name][row : row + 1]).abs().max()) < 1e-5, (row, name)


def test_shapes_and_types_of_the_output(make_engine: MakeEngine, target: Target) -> None:
    engine = make_engine(target=target, value_mode="mean_token")
    for batch in (1, 2, 3, 4):
        output = engine.rollout_step(rollout_request(batch=batch, num_steps=5))
        actions = (SIZES.horizon, SIZES.action_dim)
        assert output.actions.shape == (batch, *actions)
        assert output.chains.shape == (batch, 6, *actions)
        assert output.log_probs.shape == (batch, 5, *actions)
        assert output.values is not None
        assert output.values.shape == (batch, 1)
        for tensor in (output.actions, output.chains, output.log_probs, output.values):
            assert tensor.dtype == torch.float32
            assert tensor.device.type == target.device
            assert torch.isfinite(tensor).all()
        assert engine.step(step_request(batch=batch)).shape == (batch, *actions)
        assert engine.value(step_request(batch=batch)).shape == (batch, 1)
