# SPDX-License-Identifier: Apache-2.0
"""Parts that come and go: the critic, and RL weights on top of a checkpoint (R6)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf_phyai.engine import CheckpointError, RequestError

from .checkpoints import (
    EMBEDDING,
    EXPERT_LM_HEAD,
    LM_HEAD,
    config_json,
    random_state,
)
from .conftest import SIZES, assert_same_bits, build_engine, rollout_request, rollout_tensors, step_request
from .loading_state import STATE, VALUE_NAMES, MakeEngine, write


@pytest.fixture
def expected(make_engine: MakeEngine) -> dict[str, Tensor]:
    """Outputs of the plain checkpoint, whose weights equal STATE."""
    return rollout_tensors(make_engine(), rollout_request())


# -- the critic -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def without_critic(tmp_path: Path) -> Path:
    return write(tmp_path / "sft", drop=VALUE_NAMES)


def test_without_a_critic_there_is_no_value(
    without_critic: Path, make_engine: MakeEngine, expected: dict[str, Tensor]
) -> None:
    engine = make_engine(without_critic)
    found = rollout_tensors(engine, rollout_request())
    assert "values" not in found
    assert float((found["actions"] - expected["actions"]).abs().max()) < 1e-5
    with pytest.raises(RequestError, match="value_mode"):
        engine.value(step_request())
    assert not any(name.startswith("value_head.") for name in engine.state_dict())


def test_configured_critic_without_weights_waits_for_them(
    without_critic: Path, make_engine: MakeEngine, expected: dict[str, Tensor]
) -> None:
    engine = make_engine(without_critic, value_mode="mean_token")
    assert engine.load_report.optional
    for call in (engine.rollout_step, engine.value):
        with pytest.raises(RequestError, match="value_head"):
            call(rollout_request())
    request = rollout_request()
    no_value = type(request)(**(vars(request) | {"compute_value": False}))
    assert engine.rollout_step(no_value).values is None
    assert engine.step(step_request()).isfinite().all()


def test_critic_weights_that_come_by_an_update(
    tmp_path: Path, make_engine: MakeEngine, expected: dict[str, Tensor]
) -> None:
    write(tmp_path, drop=VALUE_NAMES)
    own = config_json(SIZES)
    own["rlinf_phyai"]["value_head_sizes"] = list(SIZES.value_hidden or ())
    (tmp_path / "config.json").write_text(json.dumps(own))
    engine = make_engine(tmp_path, value_mode="mean_token")
    with engine.weight_update(version=1) as update:
        update({name: STATE[name] for name in VALUE_NAMES})
    assert engine.load_report.optional == []
    assert_same_bits(rollout_tensors(engine, rollout_request()), expected)


def test_half_a_critic_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, drop=["value_head.mlp.2.bias"])
    with pytest.raises(CheckpointError, match=r"value_head\.mlp\.2\.bias"):
        build_engine(tmp_path)


def test_critic_of_the_other_kind(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=r"value_head\.mlp\.0\.weight.*\(16, 48\).*\(16, 32\)"):
        build_engine(checkpoint, value_mode="expert")


# -- extra weights on top (R6) --------------------------------------------------------------------------------------------


def save_extra(file: Path, state: dict[str, Tensor]) -> Path:
    torch.save(state, file)
    return file


def test_extra_weights_replace_those_of_the_checkpoint(tmp_path: Path, make_engine: MakeEngine) -> None:
    """Any subset, frozen parameters too, under any accepted name."""
    other = random_state(SIZES, seed=8)
    subset = {name: other[name] for i, name in enumerate(other) if i % 3 == 0 and name not in (EMBEDDING, LM_HEAD)}
    file = save_extra(tmp_path / "run.pt", {f"model.{name}": tensor for name, tensor in subset.items()})
    mixed = make_engine(write(tmp_path / "mixed", STATE | subset))
    engine = make_engine(weights=file)
    assert_same_bits(rollout_tensors(engine, rollout_request()), rollout_tensors(mixed, rollout_request()))
    assert sorted(engine.load_report.loaded) == sorted(set(STATE) - {EXPERT_LM_HEAD})


def test_full_state_dict_of_a_run(tmp_path: Path, make_engine: MakeEngine) -> None:
    other = random_state(SIZES, seed=8)
    engine = make_engine(weights=save_extra(tmp_path / "run.pt", other))
    fresh = make_engine(write(tmp_path / "other", other))
    assert_same_bits(rollout_tensors(engine, rollout_request()), rollout_tensors(fresh, rollout_request()))


@pytest.mark.parametrize(
    "state, message",
    [
        ({"action_in_proj.scale": torch.zeros(3)}, r"action_in_proj\.scale"),
        ({"action_in_proj.bias": torch.zeros(3)}, r"action_in_proj\.bias.*\(3,\).*\(32,\)"),
        ({"action_in_proj.bias": torch.zeros(32), "model.action_in_proj.bias": torch.zeros(32)}, "twice"),
        ({EXPERT_LM_HEAD: STATE[EXPERT_LM_HEAD]}, "no parameter"),
        ({}, "no parameter"),
        ({"step": 3}, "flat mapping"),
        ({1: torch.zeros(32)}, "flat mapping"),
        ({"action_in_proj.bias": torch.zeros(32, device="meta")}, r"action_in_proj\.bias as a meta tensor"),
        ({"action_in_proj.bias": torch.zeros(32).to_sparse()}, r"action_in_proj\.bias as a torch\.sparse_coo tensor"),
        ({"model": {"action_in_proj.bias": torch.zeros(32)}}, "flat mapping"),
    ],
)
def test_extra_weights_that_do_not_fit(state: dict[str, Any], message: str, tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        build_engine(checkpoint, weights=save_extra(tmp_path / "run.pt", state))


def test_extra_weights_of_a_lora_run_are_merged(tmp_path: Path, make_engine: MakeEngine) -> None:
    name = "paligemma_with_expert.paligemma.model.language_model.layers.0.mlp.up_proj.weight"
    stem = name.replace(".paligemma.", ".paligemma.base_model.model.").removesuffix(".weight")
    gen = torch.Generator().manual_seed(0)
    before = STATE[name].float()
    a, b = torch.randn(2, before.shape[1], generator=gen), torch.randn(before.shape[0], 2, generator=gen)
    state = {
        f"{stem}.base_layer.weight": before,
        f"{stem}.lora_A.default.weight": a,
        f"{stem}.lora_B.default.weight": b,
    }
    engine = make_engine(weights=save_extra(tmp_path / "run.pt", state))
    torch.testing.assert_close(engine.state_dict()[name], before + b @ a)
    del state[f"{stem}.lora_B.default.weight"]
    with pytest.raises(CheckpointError, match=r"up_proj\.weight is incomplete"):
        make_engine(weights=save_extra(tmp_path / "half.pt", state))


def test_extra_weights_missing_or_truncated(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere\.pt does not exist"):
        build_engine(checkpoint, weights=tmp_path / "nowhere.pt")
    with pytest.raises(CheckpointError, match=r"is a directory; name the \.pt file inside"):
        build_engine(checkpoint, weights=tmp_path)
    file = save_extra(tmp_path / "run.pt", STATE)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"run\.pt cannot be read"):
        build_engine(checkpoint, weights=file)
