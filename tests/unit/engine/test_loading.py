# SPDX-License-Identifier: Apache-2.0
"""R14: what loads, what is refused, and what the report says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from rlinf_phyai.engine import CheckpointError, Engine, RequestError
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
from .conftest import SIZES, assert_same_bits, build_engine, rollout_request, rollout_tensors, step_request

MakeEngine = Callable[..., Engine]
STATE = random_state(SIZES, seed=3)
VALUE_NAMES = [name for name in STATE if name.startswith("value_head.")]


@pytest.fixture
def expected(make_engine: MakeEngine) -> dict[str, Tensor]:
    """Outputs of the plain checkpoint, whose weights equal STATE."""
    return rollout_tensors(make_engine(), rollout_request())


def write(directory: Path, state: dict[str, Tensor] = STATE, **options: Any) -> Path:
    return write_checkpoint(directory, state, SIZES, **options)


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


def test_names_written_here_are_all_of_the_models_names(make_engine: MakeEngine) -> None:
    engine = make_engine()
    shapes = {name: tuple(tensor.shape) for name, tensor in engine.state_dict().items()}
    assert list(shapes.items()) == list(parameter_shapes(SIZES).items())
