# SPDX-License-Identifier: Apache-2.0
"""The tiny checkpoint: deterministic, complete, and RLinf's own loader builds a model from it."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file, save_file

from rlinf_phyai import plugin
from rlinf_phyai.errors import CheckpointError
from rlinf_phyai.models.pi05.libero_sentences import LIBERO_SENTENCES
from rlinf_phyai.models.pi05.stated_sizes import (
    CONFIG_KEY,
    TINY_SIZES,
    GemmaSizes,
    StatedSizes,
    VisionSizes,
    read_stated_sizes,
)
from rlinf_phyai.models.pi05.tiny import make_tiny_checkpoint
from tests.openpi_options import OPENPI_OPTIONS

OTHER = StatedSizes(
    vision=VisionSizes(hidden_size=32, intermediate_size=40, num_layers=1, num_heads=2, patch_size=112),
    prefix=GemmaSizes(width=24, mlp_dim=56, depth=3, num_heads=4, num_kv_heads=2, head_dim=8),
    expert=GemmaSizes(width=16, mlp_dim=40, depth=3, num_heads=4, num_kv_heads=2, head_dim=8),
    vocab_size=700,
    action_horizon=8,
    tokenizer_max_length=48,
    value_head_sizes=(20,),
)


def model_section(checkpoint: Path, **openpi: Any) -> DictConfig:
    """``actor.model`` of the examples for this checkpoint."""
    options = OPENPI_OPTIONS | openpi
    return OmegaConf.create(
        {"model_type": "openpi", "model_path": str(checkpoint), "precision": None, "is_lora": False, "openpi": options}
    )


def observation(batch: int, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    image = (batch, 256, 256, 3)
    return {
        "main_images": torch.randint(0, 256, image, generator=generator, dtype=torch.uint8),
        "wrist_images": torch.randint(0, 256, image, generator=generator, dtype=torch.uint8),
        "extra_view_images": None,
        "states": torch.randn(batch, 8, generator=generator),
        "task_descriptions": list(LIBERO_SENTENCES[:batch]),
    }


@pytest.fixture(scope="module")
def get_model() -> Any:
    """RLinf's ``get_model`` with the plugin registered."""
    import rlinf.models

    plugin.register()
    return rlinf.models.get_model


def test_same_seed_same_bytes(tiny_checkpoint: Path, tmp_path: Path) -> None:
    again = make_tiny_checkpoint(tmp_path / "again", seed=0)
    files = sorted(path.relative_to(tiny_checkpoint) for path in tiny_checkpoint.rglob("*") if path.is_file())
    assert len(files) == 4
    for file in files:
        assert (again / file).read_bytes() == (tiny_checkpoint / file).read_bytes(), file
    other = make_tiny_checkpoint(tmp_path / "other", seed=1)
    assert (other / "model.safetensors").read_bytes() != (tiny_checkpoint / "model.safetensors").read_bytes()


def test_config_survives_the_file(tiny_checkpoint: Path, tmp_path: Path) -> None:
    assert read_stated_sizes(tiny_checkpoint) == StatedSizes()
    assert read_stated_sizes(make_tiny_checkpoint(tmp_path, config=OTHER)) == OTHER
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "pi05"}))
    assert read_stated_sizes(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps({CONFIG_KEY: {"vision": {}, "prefix": {}}}))
    with pytest.raises(ValueError, match=CONFIG_KEY):
        read_stated_sizes(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        read_stated_sizes(tmp_path)


def test_sizes_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match=r"prefix.depth is 2 and expert.depth is 3"):
        StatedSizes(expert=GemmaSizes(width=32, mlp_dim=96, depth=3))
    with pytest.raises(ValueError, match="not a multiple"):
        StatedSizes(vision=VisionSizes(patch_size=50))


def test_sentences_are_liberos() -> None:
    """Every task sentence of the five suites, so that prompts of the simulator are known to the tokenizer."""
    from libero.libero.benchmark import get_benchmark_dict

    suites = get_benchmark_dict()
    names = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")
    languages = {task.language for name in names for task in suites[name]().tasks}
    assert set(LIBERO_SENTENCES) == languages


def test_tokenizer_ids(tiny_checkpoint: Path) -> None:
    """PaliGemma's special tokens; the closing line end is one token; any text can be encoded."""
    import sentencepiece

    tokenizer = sentencepiece.SentencePieceProcessor(
        model_file=str(tiny_checkpoint / "big_vision" / "paligemma_tokenizer.model")
    )
    assert (tokenizer.pad_id(), tokenizer.eos_id(), tokenizer.bos_id(), tokenizer.unk_id()) == (0, 1, 2, 3)
    assert tokenizer.vocab_size() <= StatedSizes().vocab_size
    assert tokenizer.encode("\n") == [4]
    for text in (*LIBERO_SENTENCES, "Ünïcode 漢字 !?"):
        assert tokenizer.unk_id() not in tokenizer.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert max(len(tokenizer.encode(text)) for text in LIBERO_SENTENCES) < 40


@pytest.mark.parametrize("config", [StatedSizes(), OTHER], ids=["default", "other"])
def test_rlinf_loads_every_weight_in_float32(get_model: Any, tmp_path: Path, config: StatedSizes) -> None:
    checkpoint = make_tiny_checkpoint(tmp_path, config=config)
    model = get_model(model_section(checkpoint))
    state = model.state_dict()
    stored = load_file(checkpoint / "model.safetensors")
    assert [name for name in state if name not in stored] == [n for n in state if n.startswith("value_head.")]
    assert set(stored) <= set(state)
    for name, tensor in stored.items():
        assert state[name].dtype == torch.float32, name
        assert torch.equal(state[name], tensor), name
    sizes = [module.out_features for module in model.value_head.mlp if isinstance(module, torch.nn.Linear)]
    assert sizes == [*config.value_head_sizes, 1]
    dense = [tensor for name, tensor in stored.items() if name.endswith("norm.dense.weight")]
    assert dense
    assert all(tensor.abs().max() > 0 for tensor in dense)
    trainable = {name.split(".")[0] for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert "value_head" in trainable
    assert not any(p.requires_grad for p in model.paligemma_with_expert.paligemma.parameters())


@pytest.fixture(scope="module")
def tiny_pi0(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny_pi0"), config=TINY_SIZES["pi0"])


def test_rlinf_loads_pi0(get_model: Any, tiny_pi0: Path) -> None:
    """RLinf's own PI0 has exactly the file's names: a state projection and time MLPs on the actions, no AdaRMS."""
    model = get_model(model_section(tiny_pi0, config_name="pi0_libero"))
    assert not model.pi05
    state, stored = model.state_dict(), load_file(tiny_pi0 / "model.safetensors")
    assert {name for name in state if not name.startswith("value_head.")} == set(stored)
    for name, tensor in stored.items():
        assert torch.equal(state[name], tensor), name
    assert {"state_proj.weight", "action_time_mlp_in.weight", "action_time_mlp_out.bias"} <= set(stored)
    assert not any("time_mlp" in name and not name.startswith("action_") for name in stored)
    assert not any(".dense." in name for name in stored)


def test_pi0_acts_and_rescores(get_model: Any, tiny_pi0: Path) -> None:
    model = get_model(model_section(tiny_pi0, config_name="pi0_libero"))
    actions, result = model.predict_action_batch(observation(2))
    inputs = result["forward_inputs"]
    assert actions.shape == (2, 5, 7)
    assert inputs["tokenized_prompt"].shape == (2, TINY_SIZES["pi0"].tokenizer_max_length)
    output = model(forward_inputs=inputs, compute_values=True)
    torch.testing.assert_close(output["logprobs"], result["prev_logprobs"], atol=1e-5, rtol=0)
    moved = model(forward_inputs=inputs | {"observation/state": inputs["observation/state"] + 0.5})
    assert (moved["logprobs"] - output["logprobs"]).abs().max() > 1e-3  # it reads the state


@pytest.mark.parametrize("mode", ["mean_token", "last_token", "first_token"])
@pytest.mark.parametrize("config", [StatedSizes(), OTHER], ids=["default", "other"])
def test_it_acts_and_rescores(get_model: Any, tmp_path: Path, config: StatedSizes, mode: str) -> None:
    model = get_model(model_section(make_tiny_checkpoint(tmp_path, config=config), value_vlm_mode=mode))
    actions, result = model.predict_action_batch(observation(2))
    inputs = result["forward_inputs"]
    assert actions.shape == (2, 5, 7)
    assert inputs["chains"].shape == (2, 4, config.action_horizon, 32)
    assert inputs["tokenized_prompt"].shape == (2, config.tokenizer_max_length)
    output = model(forward_inputs=inputs, compute_values=True)
    torch.testing.assert_close(output["logprobs"], result["prev_logprobs"], atol=1e-5, rtol=0)
    torch.testing.assert_close(output["values"], result["prev_values"][:, 0], atol=1e-6, rtol=0)
    output["logprobs"].sum().backward()
    gradient = model.paligemma_with_expert.gemma_expert.model.layers[0].self_attn.q_proj.weight.grad
    assert gradient.abs().max() > 0


def test_critic_after_the_expert(get_model: Any, tiny_checkpoint: Path) -> None:
    model = get_model(model_section(tiny_checkpoint, value_after_vlm=False))
    assert model.value_head.mlp[0].in_features == StatedSizes().expert.width
    assert model.predict_action_batch(observation(1))[1]["prev_values"].shape == (1, 1)


def test_pooling_equals_rlinfs_own(get_model: Any, tmp_path: Path) -> None:
    """With RLinf's token counts (patch 14, 200 prompt tokens) its hard-coded pooling can judge ours."""
    from rlinf.models.embodiment.openpi.openpi_action_model import OpenPi0ForRLActionPrediction

    standard = dataclasses.replace(StatedSizes(), vision=VisionSizes(patch_size=14))
    for mode in ("mean_token", "last_token", "first_token"):
        model = get_model(model_section(make_tiny_checkpoint(tmp_path, config=standard), value_vlm_mode=mode))
        prefix = torch.randn(2, 968, standard.prefix.width, generator=torch.Generator().manual_seed(0))
        expected = OpenPi0ForRLActionPrediction.get_value_from_vlm(model, prefix)
        torch.testing.assert_close(model.get_value_from_vlm(prefix), expected, atol=1e-6, rtol=0)


def test_building_takes_under_two_seconds(get_model: Any, tiny_checkpoint: Path) -> None:
    """CPU seconds of this process, so that a busy machine does not decide."""
    get_model(model_section(tiny_checkpoint))  # imports
    started = time.process_time()
    get_model(model_section(tiny_checkpoint))
    assert time.process_time() - started < 2.0


def test_openpi_options_without_a_size_are_refused(get_model: Any, tiny_checkpoint: Path) -> None:
    with pytest.raises(NotImplementedError, match="dsrl"):
        get_model(model_section(tiny_checkpoint, use_dsrl=True))


def test_a_missing_weight_is_an_error(get_model: Any, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """RLinf's loader alone would leave it random."""
    broken = Path(shutil.copytree(tiny_checkpoint, tmp_path / "broken"))
    tensors = load_file(broken / "model.safetensors")
    tensors["action_in_proj.wrong"] = tensors.pop("action_in_proj.weight")
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(
        CheckpointError,
        match=r"does not have: action_in_proj.wrong\..*lacks 1 tensors of the model: action_in_proj.weight\.",
    ):
        get_model(model_section(broken))


def test_building_leaves_no_trace(get_model: Any, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    from rlinf.models.embodiment.openpi import openpi_action_model

    original = openpi_action_model.OpenPi0ForRLActionPrediction
    monkeypatch.setenv("OPENPI_DATA_HOME", "/somewhere")
    cfg = model_section(tiny_checkpoint)
    before = OmegaConf.to_yaml(cfg)
    get_model(cfg)
    assert openpi_action_model.OpenPi0ForRLActionPrediction is original
    assert os.environ["OPENPI_DATA_HOME"] == "/somewhere"
    assert OmegaConf.to_yaml(cfg) == before


def test_other_checkpoints_go_to_rlinf_untouched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from rlinf_phyai.actor import model_provider

    seen: list[Any] = []
    monkeypatch.setattr(model_provider, "rlinf_get_model", lambda cfg, dtype: seen.append((cfg, dtype)) or "theirs")
    cfg = model_section(tmp_path)  # a folder without config.json
    assert model_provider.build_openpi(cfg, torch.bfloat16) == "theirs"
    assert seen == [(cfg, torch.bfloat16)]
    assert seen[0][0] is cfg
