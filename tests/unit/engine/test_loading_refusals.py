# SPDX-License-Identifier: Apache-2.0
"""R14: checkpoints that are refused, each with what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlinf_phyai.engine import CheckpointError

from .checkpoints import (
    EMBEDDING,
    LM_HEAD,
    VLM,
)
from .conftest import build_engine
from .loading_state import STATE, write

# -- refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own_sizes", [True, False], ids=["own-sizes", "inferred"])
@pytest.mark.parametrize(
    "name",
    [
        "action_out_proj.bias",
        "action_in_proj.weight",
        "time_mlp_in.weight",
        VLM + "model.vision_tower.vision_model.embeddings.patch_embedding.weight",
        VLM + "model.vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight",
        VLM + "model.language_model.layers.0.self_attn.q_proj.weight",
        VLM + "model.language_model.norm.weight",
        "paligemma_with_expert.gemma_expert.model.layers.1.input_layernorm.dense.bias",
        "paligemma_with_expert.gemma_expert.model.layers.0.mlp.gate_proj.weight",
    ],
)
def test_missing_tensor_is_named(name: str, own_sizes: bool, tmp_path: Path) -> None:
    write(tmp_path, drop=[name])
    if not own_sizes:
        (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        build_engine(tmp_path)


def test_both_tied_tensors_missing(tmp_path: Path) -> None:
    write(tmp_path, drop=[EMBEDDING, LM_HEAD])
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight"):
        build_engine(tmp_path)


def test_tied_tensors_that_differ(tmp_path: Path) -> None:
    write(tmp_path, STATE | {LM_HEAD: STATE[LM_HEAD] + 1})
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight and .*lm_head\.weight"):
        build_engine(tmp_path)


@pytest.mark.parametrize("name", ["noise_head.weight", "model.extra", "action_in_proj.scale", "state_proj.weight"])
def test_unexpected_tensor_is_named(name: str, tmp_path: Path) -> None:
    write(tmp_path, STATE | {name: torch.zeros(3)})
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        build_engine(tmp_path)


def test_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    write(tmp_path, STATE | {"action_out_proj.weight": torch.zeros(8, 31)})
    with pytest.raises(CheckpointError, match=r"action_out_proj\.weight.*\(8, 31\).*\(8, 32\)"):
        build_engine(tmp_path)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    write(tmp_path, STATE | {"action_out_proj.weight": torch.zeros(8, 32, dtype=torch.int32)})
    with pytest.raises(CheckpointError, match=r"action_out_proj\.weight.*I32"):
        build_engine(tmp_path)


def test_a_tensor_that_comes_twice_after_renaming(tmp_path: Path) -> None:
    """L1: ``model.x`` and ``x`` are one parameter; silently taking the last one would hide a broken checkpoint."""
    write(tmp_path, STATE | {"model.action_out_proj.bias": STATE["action_out_proj.bias"] + 1})
    with pytest.raises(CheckpointError, match=r"action_out_proj\.bias.*twice"):
        build_engine(tmp_path)


def test_a_tensor_that_comes_in_two_shards(tmp_path: Path) -> None:
    write(tmp_path)
    save_file({"action_out_proj.bias": torch.ones(8)}, tmp_path / "z.safetensors")
    with pytest.raises(CheckpointError, match=r"action_out_proj\.bias.*twice"):
        build_engine(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 100, -1000])
def test_truncated_safetensors(kept: int, tmp_path: Path) -> None:
    file = write(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*truncated"):
        build_engine(tmp_path)


def test_missing_folder_and_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        build_engine(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"\*\.safetensors"):
        build_engine(tmp_path)


def test_another_model(tmp_path: Path) -> None:
    save_file({"some.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no PI0\.5 or PI0 model"):
        build_engine(tmp_path)
