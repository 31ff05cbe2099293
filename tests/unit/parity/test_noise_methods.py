# SPDX-License-Identifier: Apache-2.0
"""flow-noise (learned), flow-CPS and annealed noise: the engine against RLinf's own policy, and rescoring back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf_phyai.engine import Engine, RequestError
from rlinf_phyai.models.pi05 import sampler
from rlinf_phyai.rollout.sampling import FlowSampler, NoiseAnnealing, SamplingOptions

from ..engine.checkpoints import fill_parameters, parameter_shapes, write_checkpoint
from .comparison import (
    EVAL,
    JOINT,
    Case,
    assert_rescored,
    deviations,
    measured,
    rescored,
    run_engine,
)
from .conftest import cpu_engine
from .reference import Reference

Measure = Callable[[dict[str, float]], dict[str, float]]
MARGIN = 25  # above the tolerance of rescored log-probs too

LEARNED = [
    Case((20,), 3, 0, noise_method="flow_noise"),
    Case((1, 200), 3, JOINT, noise_method="flow_noise", chunk=5, env_dim=7),
    Case((5, 1, 30), 1, JOINT, noise_method="flow_noise"),
    Case((9, 3, 40), 10, 9, noise_method="flow_noise"),
    Case((12,), 10, JOINT, noise_method="flow_noise"),
    Case((7, 60), 3, EVAL, noise_method="flow_noise"),
]
SHARED_OUT = [
    Case((20,), 3, 0, noise_method="flow_cps", noise_level=0.3),
    Case((1, 200), 3, JOINT, noise_method="flow_cps", noise_level=0.99, chunk=5, env_dim=7),
    Case((5, 1, 30), 10, 8, noise_method="flow_cps", noise_level=1.0, ignore_last=True),
    Case((5, 2), 3, 2, noise_method="flow_cps"),  # its last step has no noise
    Case((7, 60), 3, EVAL, noise_method="flow_cps"),
]


@pytest.fixture(scope="module")
def learned_engine(noise_reference: Reference) -> Iterator[Engine]:
    with cpu_engine(noise_reference.directory) as engine:
        yield engine


@pytest.mark.parametrize("case", LEARNED, ids=str)
def test_flow_noise(case: Case, noise_reference: Reference, learned_engine: Engine, measure: Measure) -> None:
    assert_rescored(measure(measured(noise_reference, learned_engine, case)), case)


@pytest.mark.parametrize("case", SHARED_OUT, ids=str)
def test_flow_cps(case: Case, vlm_reference: Reference, engines: Callable[..., Engine], measure: Measure) -> None:
    engine = engines("mean_token", noise_method="flow_cps")
    assert_rescored(measure(measured(vlm_reference, engine, case)), case)


@pytest.mark.parametrize("case", [LEARNED[0], LEARNED[1]], ids=str)
def test_entropy_is_that_of_the_engines_noise(case: Case, noise_reference: Reference, learned_engine: Engine) -> None:
    """A log-prob and the noise that made it give the engine's deviation, and that the entropy."""
    batch = case.batch(noise_reference.sizes.vocab)
    output = run_engine(learned_engine, case, batch)
    _, entropy = rescored(noise_reference, case, batch, output)
    steps = case.sde_steps
    half_log_2pi = 0.5 * math.log(2 * math.pi)
    log_std = -(output.log_probs[:, steps] + half_log_2pi + 0.5 * batch.step_noise[:, steps].square())
    assert float(log_std.exp().std()) > 0.01  # learned, not constant
    assert math.log(0.08) - 1e-4 < float(log_std.min()) < float(log_std.max()) < math.log(0.16) + 1e-4
    torch.testing.assert_close(entropy[:, -len(steps) :], log_std + half_log_2pi + 0.5, atol=2e-5, rtol=0)


def test_all_steps_are_stochastic_where_none_are_named(noise_reference: Reference) -> None:
    case = Case((20, 3), 3, JOINT, noise_method="flow_noise")
    batch = case.batch(noise_reference.sizes.vocab)
    with cpu_engine(noise_reference.directory, num_steps=3) as engine:
        named, unnamed = (run_engine(engine, case, batch, **change) for change in ({}, {"stochastic_steps": None}))
    assert torch.equal(named.log_probs, unnamed.log_probs)
    assert torch.equal(named.chains, unnamed.chains)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"sigmas": torch.ones(2, 3)}, "sigmas must be None with noise_method flow_noise"),
        ({"stochastic_steps": torch.ones(2, 3)}, r"stochastic_steps has dtype torch\.float32"),
        ({"stochastic_steps": torch.ones(3, 3, dtype=torch.bool)}, r"stochastic_steps has shape \(3, 3\)"),
        ({"stochastic_steps": True}, "must be a bool tensor"),
    ],
)
def test_bad_step_choices(
    changes: dict[str, Any], message: str, noise_reference: Reference, learned_engine: Engine
) -> None:
    case = Case((20, 3), 3, JOINT, noise_method="flow_noise")
    with pytest.raises(RequestError, match=message):
        run_engine(learned_engine, case, case.batch(noise_reference.sizes.vocab), **changes)


def test_the_other_methods_name_their_steps_by_sigmas(engines: Callable[..., Engine]) -> None:
    case = Case((20,), 3, 0)
    batch = case.batch(64)
    with pytest.raises(RequestError, match="belongs to flow_noise"):
        run_engine(engines("mean_token"), case, batch, stochastic_steps=torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(RequestError, match="at most 1"):
        run_engine(engines("mean_token", noise_method="flow_cps"), case, batch, sigmas=torch.full((1, 3), 1.1))


# -- weights -----------------------------------------------------------------------------------------------------------


def test_state_dict_has_the_actors_names_order_and_shapes(noise_reference: Reference, learned_engine: Engine) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in noise_reference.state_dict().items()}
    assert list(parameter_shapes(noise_reference.sizes).items()) == list(expected.items())
    views = learned_engine.state_dict()
    assert [(name, tuple(view.shape)) for name, view in views.items()] == list(expected.items())
    for name, tensor in noise_reference.state_dict().items():
        assert views[name].is_meta or torch.equal(views[name], tensor), name


def test_after_an_update_the_engine_equals_a_fresh_one(noise_reference: Reference, tmp_path: Path) -> None:
    """The noise head alone moves; a checkpoint without one (supervised training) waits for the first sync."""
    case = Case((20, 3), 3, JOINT, noise_method="flow_noise")
    batch = case.batch(noise_reference.sizes.vocab)
    state = noise_reference.state_dict()
    head = {name: tensor.clone() for name, tensor in state.items() if name.startswith("noise_head.")}
    fill_parameters(head, seed=9)
    head["noise_head.logvar_min"] = torch.tensor([2 * math.log(0.05)])
    moved = write_checkpoint(tmp_path / "moved", state | head, noise_reference.sizes)
    bare = write_checkpoint(tmp_path / "bare", state, noise_reference.sizes, drop=head)
    with cpu_engine(moved) as engine:
        expected = run_engine(engine, case, batch)
    with cpu_engine(bare, noise_method="flow_noise", noise_std_range=(0.08, 0.16)) as engine:
        assert set(engine.load_report.optional) == set(head)
        assert torch.equal(engine.state_dict()["noise_head.logvar_min"], state["noise_head.logvar_min"])
        with pytest.raises(RequestError, match="the noise head has no weights yet"):
            run_engine(engine, case, batch)
        evaluation = Case(case.lengths, 3, EVAL, noise_method="flow_noise")
        assert not run_engine(engine, evaluation, batch).log_probs.any()  # needs no noise head
        with engine.weight_update(version=1) as update:
            update(head)
        found = run_engine(engine, case, batch)
    for name in ("actions", "chains", "log_probs", "values"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


# -- mistakes that these tests must notice -------------------------------------------------------------------------------


def constant_std(weights: Any, output: Tensor) -> Tensor:
    return torch.exp(0.5 * weights.noise_logvar[0]) * torch.ones(*output.shape[:2], weights.config.action_dim)


def linear_between_deviations(weights: Any, output: Tensor) -> Tensor:
    from rlinf_phyai.models.pi05.noise_head import noise_std

    low, high = (torch.exp(0.5 * bound) for bound in weights.noise_logvar)
    std = noise_std(weights, output)
    share = (2 * std.log() - weights.noise_logvar[0]) / (weights.noise_logvar[1] - weights.noise_logvar[0])
    return low + (high - low) * share


@pytest.mark.parametrize("wrong", [constant_std, linear_between_deviations])
def test_a_wrong_noise_head_is_noticed(
    wrong: Callable[..., Tensor], noise_reference: Reference, learned_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "noise_std", wrong)
    for case in (LEARNED[0], LEARNED[1]):
        found = measured(noise_reference, learned_engine, case)
        for name in ("actions", "log_probs", "rescored"):
            assert found[name] > MARGIN * case.tolerance, (name, found)


def test_noise_scaled_by_the_step_length_is_noticed(
    noise_reference: Reference, learned_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flow-SDE's sqrt(delta) has no place in flow-noise."""
    original = sampler.noise_std
    monkeypatch.setattr(sampler, "noise_std", lambda weights, output: original(weights, output) * math.sqrt(1 / 3))
    found = measured(noise_reference, learned_engine, LEARNED[1])
    assert found["rescored"] > MARGIN * LEARNED[1].tolerance


# -- annealing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["flow_sde", "flow_cps"])
@pytest.mark.parametrize("step", [0, 7, 100, 1000])
def test_annealed_noise_follows_the_global_step(
    step: int, method: str, vlm_reference: Reference, engines: Callable[..., Engine], measure: Measure
) -> None:
    """The controller's plan at a global step against the actor, which was told the same step."""
    case = Case((14, 3), 3, JOINT, noise_method=method)
    batch = case.batch(vlm_reference.sizes.vocab)
    params = (0.7, 0.3, 100)
    options = SamplingOptions(3, 0.5, True, noise_method=method, annealing=NoiseAnnealing(*params))
    controller = FlowSampler(options, (10, 32), seed=0, rank=0)
    controller.set_global_step(step)
    vlm_reference.model.set_global_step(step)
    try:
        anneal = {"noise_anneal": True, "noise_params": list(params)}
        expected = vlm_reference.sample(
            batch, None, noise_method=method, joint_logprob=True, action_chunk=10, action_env_dim=32, **anneal
        )
    finally:
        vlm_reference.model.set_global_step(0)
    engine = engines("mean_token", noise_method=method)
    output = run_engine(engine, case, batch, sigmas=controller.plan(2, "train").sigmas)
    found = measure(deviations(case, batch, expected, output))
    assert max(found.values()) <= case.tolerance, found
    if step:  # a level that stood still would be noticed
        controller.set_global_step(0)
        stale = run_engine(engine, case, batch, sigmas=controller.plan(2, "train").sigmas)
        assert deviations(case, batch, expected, stale)["actions"] > MARGIN * case.tolerance
