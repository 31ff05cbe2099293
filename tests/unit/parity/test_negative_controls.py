# SPDX-License-Identifier: Apache-2.0
"""Small mistakes that the parity tests must notice: each one, made on purpose in the engine, leaves the tolerance far behind.

A sampled log-prob alone tells little: x' = mean + std * eps, so it is a function of eps whatever the mean is. The judge is the
actor's log-prob of the engine's own chain ("rescored"), which is also what the importance weight sees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlinf_phyai.engine import Engine
from rlinf_phyai.kernels import torch_ops
from rlinf_phyai.models.pi05 import scheduler as scheduler_module
from rlinf_phyai.models.pi05 import value as value_module

from .comparison import Case, deviations, reported_log_probs, rescored, run_engine, run_reference
from .conftest import cpu_engine
from .reference import Batch, Reference, ReferenceOutput

CASE = Case((20, 3), 3, 1)
MARGIN = 5  # a mistake must exceed the tolerance by this factor

Setup = tuple[Reference, Batch, ReferenceOutput]


@pytest.fixture(scope="module")
def setup(vlm_reference: Reference) -> Setup:
    batch = CASE.batch(vlm_reference.sizes.vocab)
    return vlm_reference, batch, run_reference(vlm_reference, CASE, batch)


def measured(setup: Setup, engine: Engine, **changes: Any) -> dict[str, float]:
    reference, batch, expected = setup
    output = run_engine(engine, CASE, batch, **changes)
    again, _ = rescored(reference, CASE, batch, output)
    gap = float((again - reported_log_probs(CASE, batch, output)).abs().max())
    return deviations(CASE, batch, expected, output) | {"rescored": gap}


def patched_engine(setup: Setup, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, function: Any) -> Engine:
    """An engine built while one of its functions is another one."""
    assert hasattr(module, name)
    monkeypatch.setattr(module, name, function)
    return cpu_engine(setup[0].directory, value_mode="mean_token")


def assert_noticed(found: dict[str, float], *names: str) -> None:
    for name in names:
        assert found[name] > MARGIN * CASE.tolerance, f"{name}: {found} would pass or nearly pass as {CASE.tolerance}"


def test_unchanged_engine_passes(setup: Setup, engines: Callable[..., Engine]) -> None:
    assert max(measured(setup, engines("mean_token")).values()) <= CASE.tolerance


def test_exact_gelu_in_the_vision_tower(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def exact(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(F.linear(x, weight, bias))

    engine = patched_engine(setup, monkeypatch, torch_ops, "linear_gelu", exact)
    assert_noticed(measured(setup, engine), "values", "actions", "rescored")


def test_exact_gelu_in_the_gemma_stacks(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def exact(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate) * up

    engine = patched_engine(setup, monkeypatch, torch_ops, "gated_gelu", exact)
    assert_noticed(measured(setup, engine), "values", "actions", "rescored")


def test_pooling_over_valid_tokens_only(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def valid_only(
        mode: Any, output: Tensor, padded: Tensor, lengths: Tensor, padding: Tensor, valid: Tensor
    ) -> Tensor:
        return torch.where(valid, output, 0).sum(dim=1) / lengths[:, None]

    engine = patched_engine(setup, monkeypatch, value_module, "_pool", valid_only)
    found = measured(setup, engine)
    assert_noticed(found, "values")
    assert found["actions"] <= CASE.tolerance


def test_padded_rows_that_attend_to_nothing(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The actor's fully masked rows see all keys with equal weight; a row of zeros in their place is wrong."""
    original = value_module._extra_rows

    def zeros(*args: Any) -> Tensor:
        return torch.zeros_like(original(*args))

    found = measured(setup, patched_engine(setup, monkeypatch, value_module, "_extra_rows", zeros))
    assert_noticed(found, "values")
    assert found["actions"] <= CASE.tolerance


def test_swapped_cameras(setup: Setup, engines: Callable[..., Engine]) -> None:
    found = measured(setup, engines("mean_token"), pixel_values=setup[1].pixels[:, [1, 0]])
    assert_noticed(found, "values", "actions", "rescored")


def test_unscaled_prompt_embeddings(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def unscaled(weights: Any, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, weights.embedding)

    monkeypatch.setattr(value_module, "embed_prompt", unscaled)
    engine = patched_engine(setup, monkeypatch, scheduler_module, "embed_prompt", unscaled)
    assert_noticed(measured(setup, engine), "values", "actions", "rescored")


def test_one_prompt_token_too_few(setup: Setup, engines: Callable[..., Engine]) -> None:
    shorter = setup[1].lang_lens - 1
    ids = setup[1].input_ids.clone()
    ids[torch.arange(2), shorter] = 0
    assert_noticed(
        measured(setup, engines("mean_token"), lang_lens=shorter, input_ids=ids), "values", "actions", "rescored"
    )


def test_suffix_that_sees_padded_prompt_slots(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts have 20 and 3 tokens; letting the shorter one's suffix attend to 17 padded slots must show."""

    def unmasked(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
        return torch_ops.attention(q, k, v, torch.full_like(lengths, k.shape[1]), scale)

    engine = patched_engine(setup, monkeypatch, torch_ops, "suffix_attention", unmasked)
    assert_noticed(measured(setup, engine), "actions", "rescored")


def test_flow_sde_without_its_drift_term(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch_ops.denoise_update

    def ode_mean(x: Tensor, velocity: Tensor, noise: Tensor, sigma: Tensor, time: float, delta: float) -> Any:
        mean, _ = original(x, velocity, noise, torch.zeros_like(sigma), time, delta)
        _, log_prob = original(x, velocity, noise, sigma, time, delta)
        return mean + noise * (sigma * delta**0.5)[:, None, None], log_prob

    assert_noticed(
        measured(setup, patched_engine(setup, monkeypatch, torch_ops, "denoise_update", ode_mean)),
        "actions",
        "rescored",
    )


def test_log_prob_without_its_normaliser(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch_ops.denoise_update

    def unnormalised(*args: Any) -> Any:
        new, log_prob = original(*args)
        return new, torch.where(log_prob != 0, log_prob + torch_ops._HALF_LOG_2PI, log_prob)

    found = measured(setup, patched_engine(setup, monkeypatch, torch_ops, "denoise_update", unnormalised))
    assert_noticed(found, "log_probs", "rescored")
    assert found["actions"] <= CASE.tolerance
