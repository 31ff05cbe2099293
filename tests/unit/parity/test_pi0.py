# SPDX-License-Identifier: Apache-2.0
"""PI0 (state token, time in the action tokens, plain norms) against RLinf's own policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from rlinf_phyai.engine import Engine, RequestError
from rlinf_phyai.models.pi05 import PI05Request, scheduler

from ..engine.checkpoints import fill_parameters, parameter_shapes, write_checkpoint
from .comparison import (
    EVAL,
    JOINT,
    Case,
    assert_rescored,
    measured,
    run_engine,
)
from .conftest import cpu_engine
from .reference import REFERENCE_SIZES, Batch, Reference

Measure = Callable[[dict[str, float]], dict[str, float]]

PROMPT = 48
SIZES = REFERENCE_SIZES.but(pi05=False, prompt_tokens=PROMPT, value_hidden=(512, 256, 128))
CASES = [
    Case((20,), 4, 1),
    Case((1, 48), 3, JOINT, chunk=5, env_dim=7),
    Case((5, 1, 30), 1, 0),
    Case((7, 40), 10, 9),
    Case((7, 40), 3, EVAL),
    Case((9, 4), 3, JOINT, noise_method="flow_noise"),
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("pi0"), SIZES.but(noise_head=True), seed=7)


@pytest.fixture(scope="module")
def engines(reference: Reference) -> Iterator[dict[str, Engine]]:
    methods = ("flow_sde", "flow_noise")
    state = reference.state_dict()
    drop = [name for name in state if name.startswith("noise_head.")]
    bare = write_checkpoint(reference.directory / "bare", state, reference.sizes, drop=drop)
    built = {"flow_sde": cpu_engine(bare), "flow_noise": cpu_engine(reference.directory)}
    assert tuple(built) == methods
    yield built
    for engine in built.values():
        engine.close()


def pi0_measured(reference: Reference, engine: Engine, case: Case) -> dict[str, float]:
    batch = pi0_batch(reference, case)
    return measured(reference, engine, case, batch, state=batch.state)


def pi0_batch(reference: Reference, case: Case) -> Batch:
    return case.batch(reference.sizes.vocab, prompt_tokens=PROMPT)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pi0(case: Case, reference: Reference, engines: dict[str, Engine], measure: Measure) -> None:
    assert_rescored(measure(pi0_measured(reference, engines[case.noise_method], case)), case)


def test_critic_after_the_expert(tmp_path: Path, measure: Measure) -> None:
    """RLinf's usual critic for PI0."""
    reference = Reference(tmp_path, SIZES.but(value_after_vlm=False), seed=8)
    case = Case((20, 3), 3, 1, chunk=5, env_dim=7)
    with cpu_engine(tmp_path, value_mode="expert") as engine:
        found = measure(pi0_measured(reference, engine, case))
    assert max(found.values()) <= case.tolerance, found


def test_state_dict_has_the_actors_names_order_and_shapes(reference: Reference, engines: dict[str, Engine]) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in reference.state_dict().items()}
    assert list(parameter_shapes(reference.sizes).items()) == list(expected.items())
    views = engines["flow_noise"].state_dict()
    assert [(name, tuple(view.shape)) for name, view in views.items()] == list(expected.items())


def test_after_an_update_the_engine_equals_a_fresh_one(reference: Reference, tmp_path: Path) -> None:
    case = Case((20, 3), 3, 1)
    batch = pi0_batch(reference, case)
    old = reference.state_dict()
    parts = ("paligemma_with_expert.gemma_expert.model.", "state_proj.", "action_time_mlp_in.", "action_time_mlp_out.")
    new = {name: tensor.clone() for name, tensor in old.items() if name.startswith(parts)}
    fill_parameters(new, seed=11)
    noisy = Case(case.lengths, 3, JOINT, noise_method="flow_noise")
    with cpu_engine(reference.directory) as engine:
        run_engine(engine, noisy, batch, state=batch.state)  # every table holds the old weights
        with engine.weight_update(version=1) as update:
            update(new)
        found = run_engine(engine, noisy, batch, state=batch.state)
    with cpu_engine(write_checkpoint(tmp_path, old | new, reference.sizes)) as engine:
        fresh = run_engine(engine, noisy, batch, state=batch.state)
    assert torch.equal(found.log_probs, fresh.log_probs)
    assert torch.equal(found.chains, fresh.chains)


def test_a_state_token_that_the_actions_do_not_see_is_noticed(
    reference: Reference, engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "append_state", lambda *args: args[-2])
    found = pi0_measured(reference, engines["flow_sde"], CASES[0])
    for name in ("actions", "rescored"):
        assert found[name] > 25 * CASES[0].tolerance, (name, found)


def test_the_state_is_required(reference: Reference, engines: dict[str, Engine]) -> None:
    batch = pi0_batch(reference, CASES[0])
    request = PI05Request(batch.pixels[:, :2], batch.input_ids, batch.lang_lens, batch.noise)
    with pytest.raises(RequestError, match="state is missing; PI0 needs"):
        engines["flow_sde"].step(request)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_is_refused_at_once(
    reference: Reference, engines: dict[str, Engine], value: float
) -> None:
    """Without ``check_finite``: the state of a simulator that diverged would reach every action of its sample."""
    batch = pi0_batch(reference, Case((20, 3, 9), 3, 1))
    state = batch.state.clone()
    state[1, 0] = value
    request = PI05Request(batch.pixels[:, :2], batch.input_ids, batch.lang_lens, batch.noise, state=state)
    with pytest.raises(RequestError, match=r"state holds NaN or infinite values in the samples \[1\]"):
        engines["flow_sde"].step(request)
