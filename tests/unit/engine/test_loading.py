# SPDX-License-Identifier: Apache-2.0
"""R14: which layouts and sizes load, and what the report says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from rlinf_phyai.engine import CheckpointError
from rlinf_phyai.models.pi05 import PI05Config, load_config

from .checkpoints import (
    EMBEDDING,
    EXPERT_LM_HEAD,
    LM_HEAD,
    VLM,
    PI05Sizes,
    config_json,
    parameter_shapes,
    random_state,
    write_checkpoint,
)
from .conftest import SIZES, assert_same_bits, build_engine, rollout_request, rollout_tensors
from .loading_state import STATE, MakeEngine, write


@pytest.fixture
def expected(make_engine: MakeEngine) -> dict[str, Tensor]:
    """Outputs of the plain checkpoint, whose weights equal STATE."""
    return rollout_tensors(make_engine(), rollout_request())


def old_nesting(name: str) -> str:
    """The name under the PaliGemma nesting of older transformers releases."""
    for new, old in (
        (VLM + "model.language_model.", VLM + "language_model.model."),
        (VLM + "lm_head.", VLM + "language_model.lm_head."),
        (VLM + "model.vision_tower.", VLM + "vision_tower."),
        (VLM + "model.multi_modal_projector.", VLM + "multi_modal_projector."),
    ):
        if name.startswith(new):
            return old + name[len(new) :]
    return name


# -- layouts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "model."], ids=["openpi", "lerobot"])
@pytest.mark.parametrize(
    "drop", [(), (LM_HEAD,), (EMBEDDING,), (EXPERT_LM_HEAD,), (LM_HEAD, EXPERT_LM_HEAD)],
    ids=["all", "no-lm_head", "no-embedding", "no-expert-lm_head", "no-heads"],
)  # fmt: skip
def test_layouts(
    prefix: str, drop: tuple[str, ...], tmp_path: Path, make_engine: MakeEngine, expected: dict[str, Tensor]
) -> None:
    engine = make_engine(write(tmp_path, prefix=prefix, drop=drop))
    assert_same_bits(rollout_tensors(engine, rollout_request()), expected)
    report = engine.load_report
    assert sorted(report.loaded) == sorted(set(STATE) - set(drop) - {EXPERT_LM_HEAD})
    assert report.missing == report.unexpected == report.optional == report.casts == []
    assert report.ignored == ([] if EXPERT_LM_HEAD in drop else [EXPERT_LM_HEAD])


@pytest.mark.parametrize("prefix", ["", "model."])
def test_older_transformers_nesting(
    prefix: str, tmp_path: Path, make_engine: MakeEngine, expected: dict[str, Tensor]
) -> None:
    renamed = {old_nesting(name): tensor for name, tensor in STATE.items()}
    assert len(set(renamed) - set(STATE)) > 10
    engine = make_engine(write(tmp_path, renamed, prefix=prefix))
    assert_same_bits(rollout_tensors(engine, rollout_request()), expected)


def test_several_shards(tmp_path: Path, make_engine: MakeEngine, expected: dict[str, Tensor]) -> None:
    names = list(STATE)
    for i in range(3):
        shard = {name: STATE[name].clone() for name in names[i::3]}
        save_file(shard, tmp_path / f"model-{i + 1:05d}-of-00003.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config_json(SIZES)))
    assert_same_bits(rollout_tensors(make_engine(tmp_path), rollout_request()), expected)


@pytest.mark.parametrize("folder", ["model_state_dict", "actor/model_state_dict"])
def test_layouts_of_rlinf_runs(
    folder: str, tmp_path: Path, make_engine: MakeEngine, expected: dict[str, Tensor]
) -> None:
    (tmp_path / folder).mkdir(parents=True)
    torch.save(STATE, tmp_path / folder / "full_weights.pt")
    (tmp_path / "config.json").write_text(json.dumps(config_json(SIZES)))
    assert_same_bits(rollout_tensors(make_engine(tmp_path), rollout_request()), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts_are_counted(dtype: torch.dtype, tmp_path: Path, make_engine: MakeEngine) -> None:
    narrow = {name: tensor.to(dtype) for name, tensor in STATE.items()}
    engine = make_engine(write(tmp_path / "narrow", narrow))
    assert len(engine.load_report.casts) == len(engine.load_report.loaded)
    assert f"{dtype} -> torch.float32" in engine.load_report.casts[0]
    wide = make_engine(write(tmp_path / "wide", {name: tensor.float() for name, tensor in narrow.items()}))
    assert wide.load_report.casts == []
    assert_same_bits(rollout_tensors(engine, rollout_request()), rollout_tensors(wide, rollout_request()))


def test_report_summary_counts(make_engine: MakeEngine) -> None:
    summary = make_engine().load_report.summary()
    assert f"{len(STATE) - 1} loaded" in summary
    assert "0 missing, 0 optional, 0 unexpected, 1 ignored, 0 casts" in summary


def test_normaliser_files_of_lerobot_are_no_weights(
    tmp_path: Path, make_engine: MakeEngine, expected: dict[str, Tensor]
) -> None:
    write(tmp_path, prefix="model.")
    save_file(
        {"observation.state.mean": torch.zeros(3)}, tmp_path / "policy_preprocessor_step_2_normalizer.safetensors"
    )
    assert_same_bits(rollout_tensors(make_engine(tmp_path), rollout_request()), expected)


# -- sizes ----------------------------------------------------------------------------------------------------------------


def test_load_config_reads_the_sizes(checkpoint: Path) -> None:
    config = load_config(checkpoint, PI05Config)
    assert (config.vision.image_size, config.vision.patch_size) == (SIZES.image_size, SIZES.patch_size)
    assert config.tokenizer_max_length == SIZES.prompt_tokens
    assert (config.action_horizon, config.action_dim) == (SIZES.horizon, SIZES.action_dim)
    assert (config.prefix.width, config.expert.width) == (SIZES.prefix_width, SIZES.expert_width)
    assert config.value_head_sizes == SIZES.value_hidden
    assert config.value_mode == "mean_token"


def test_sizes_from_the_tensors_alone(tmp_path: Path, make_engine: MakeEngine) -> None:
    """A checkpoint without our own key: shapes tell most sizes, published PI0.5 values the rest."""
    sizes = PI05Sizes(
        vision_width=144, vision_heads=2, head_dim=256, heads=8, prompt_tokens=200, horizon=10, action_dim=32
    )
    state = random_state(sizes, seed=4)
    lerobot = {"type": "pi05", "chunk_size": 10, "max_action_dim": 32, "tokenizer_max_length": 200}
    outputs = []
    for folder, content in (("own", config_json(sizes)), ("lerobot", lerobot), ("bare", None)):
        write_checkpoint(tmp_path / folder, state, sizes)
        if content is None:
            (tmp_path / folder / "config.json").unlink()
        else:
            (tmp_path / folder / "config.json").write_text(json.dumps(content))
        engine = make_engine(tmp_path / folder)
        outputs.append(rollout_tensors(engine, rollout_request(sizes=sizes)))
    assert_same_bits(outputs[0], outputs[1])
    assert_same_bits(outputs[0], outputs[2])


@pytest.mark.parametrize("sizes", [
    PI05Sizes(kv_heads=2), PI05Sizes(heads=1), PI05Sizes(layers=1), PI05Sizes(layers=3, heads=2, head_dim=8),
    PI05Sizes(image_size=42, patch_size=14, vision_layers=2), PI05Sizes(prompt_tokens=1, horizon=1), PI05Sizes(prefix_width=32),
])  # fmt: skip
def test_any_size_runs(sizes: PI05Sizes, tmp_path: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(write_checkpoint(tmp_path, random_state(sizes), sizes), action_chunk=1)
    found = rollout_tensors(engine, rollout_request(sizes=sizes))
    assert found["actions"].shape == (2, sizes.horizon, sizes.action_dim)
    assert all(torch.isfinite(tensor).all() for tensor in found.values())


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"rlinf_phyai": {"vision": {}}}', '{"rlinf_phyai": {"vision": {"size": 3}}}']
)
def test_broken_config_json(content: str, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        build_engine(tmp_path)


@pytest.mark.parametrize("stack, name, value", [
    ("prefix", "depth", "2"),
    ("prefix", "width", 48.5),
    ("vision", "patch_size", 0),
    ("vision", "num_heads", 5),
    ("", "action_dim", -1),
    ("", "num_cameras", 0),
    ("", "tokenizer_max_length", 0),
])  # fmt: skip
def test_own_sizes_that_are_none(stack: str, name: str, value: Any, tmp_path: Path) -> None:
    write(tmp_path)
    content = config_json(SIZES)
    own = content["rlinf_phyai"]
    (own[stack] if stack else own)[name] = value
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=rf"config\.json.*{name}"):
        build_engine(tmp_path)


@pytest.mark.parametrize("value", ["ten", None, 0, [1]])
def test_a_horizon_that_is_none(value: Any, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"action_horizon": value}))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        build_engine(tmp_path)


@pytest.mark.parametrize("end", ["patch_embedding.weight", "action_in_proj.weight", "layers.0.self_attn.q_proj.weight"])
def test_tensors_of_another_rank_tell_no_sizes(end: str, tmp_path: Path) -> None:
    write(tmp_path, {name: t.flatten() if name.endswith(end) else t for name, t in STATE.items()})
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="shapes"):
        build_engine(tmp_path)


@pytest.mark.parametrize("name", ["num_cameras", "tokenizer_max_length", "action_env_dim", "num_steps"])
@pytest.mark.parametrize("value", [0, -1, 2.5, "x"])
def test_arguments_that_are_no_sizes(name: str, value: Any, checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=rf"{name} is .*integer of at least 1"):
        build_engine(checkpoint, **{name: value})


def test_sizes_that_contradict_the_tensors(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_json(SIZES.but(prefix_mlp=41))))
    with pytest.raises(CheckpointError, match=r"gate_proj.*\(40, 48\).*\(41, 48\)"):
        build_engine(tmp_path)


def test_names_written_here_are_all_of_the_models_names(make_engine: MakeEngine) -> None:
    engine = make_engine()
    shapes = {name: tuple(tensor.shape) for name, tensor in engine.state_dict().items()}
    assert list(shapes.items()) == list(parameter_shapes(SIZES).items())
