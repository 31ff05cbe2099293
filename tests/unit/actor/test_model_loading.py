# SPDX-License-Identifier: Apache-2.0
"""A model built without initialisation equals RLinf's own, and a checkpoint that lacks a tensor is refused by name."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlinf_phyai.errors import CheckpointError
from rlinf_phyai.models.pi05.checkpoint import EMBEDDING, EXPERT_LM_HEAD, LM_HEAD
from tests.openpi_options import OPENPI_OPTIONS

from ..parity.reference import REFERENCE_SIZES, patched_sizes

HEADS = ("value_head.", "noise_head.")


@pytest.fixture(scope="module")
def small_sizes() -> Iterator[None]:
    """RLinf and openpi build small models of their own classes."""
    with patched_sizes(REFERENCE_SIZES):
        yield


@pytest.fixture(scope="module")
def standard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as openpi's: bfloat16, no sizes in its config.json, no heads."""
    from rlinf_phyai.models.pi05.configuration import GemmaConfig, PI05Config, VisionConfig
    from rlinf_phyai.models.pi05.random_checkpoint import make_random_checkpoint
    from rlinf_phyai.models.pi05.tiny import train_tokenizer

    s = REFERENCE_SIZES
    stack = {"depth": s.layers, "num_heads": s.heads, "num_kv_heads": s.kv_heads, "head_dim": s.head_dim}
    config = PI05Config(
        vision=VisionConfig(s.vision_width, s.vision_mlp, s.vision_layers, s.vision_heads),
        prefix=GemmaConfig(width=s.prefix_width, mlp_dim=s.prefix_mlp, **stack),
        expert=GemmaConfig(width=s.expert_width, mlp_dim=s.expert_mlp, **stack),
        vocab_size=s.vocab,
    )
    directory = tmp_path_factory.mktemp("standard")
    tokenizer = directory / "tokenizer.model"  # the vocabulary above is too small for one of its own
    tokenizer.write_bytes(train_tokenizer(1024))
    return make_random_checkpoint(directory / "checkpoint", config, seed=5, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def with_heads(standard: Path, small_sizes: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a critic, in float32 (which the model rounds), embedding and output head both stored."""
    directory = Path(shutil.copytree(standard, tmp_path_factory.mktemp("with_heads") / "checkpoint"))
    g = torch.Generator().manual_seed(6)
    state = {name: tensor.float() for name, tensor in load_file(standard / "model.safetensors").items()}
    state = {name: tensor + 1e-4 * torch.randn(tensor.shape, generator=g) for name, tensor in state.items()}
    state[LM_HEAD] = state[EMBEDDING].clone()
    for name, tensor in stock(section(standard)).state_dict().items():
        if name.startswith("value_head."):
            state[name] = torch.randn(tensor.shape, generator=g)
    save_file(state, directory / "model.safetensors")
    return directory


def section(checkpoint: Path, **openpi: Any) -> DictConfig:
    """``actor.model`` of the examples."""
    options = OPENPI_OPTIONS | openpi
    return OmegaConf.create({"model_type": "openpi", "model_path": str(checkpoint), "openpi": options})


def stock(cfg: DictConfig) -> nn.Module:
    """RLinf's own build. The draws of the two transformers are hidden from the heads, which would depend on their number."""
    from openpi.models_pytorch import pi0_pytorch
    from rlinf.models.embodiment.openpi import get_model

    from rlinf_phyai.checkpoint_setup import own_tokenizer

    original = pi0_pytorch.PaliGemmaWithExpertModel

    def pair(*args: Any, **options: Any) -> nn.Module:
        state = torch.get_rng_state()
        module = original(*args, **options)
        torch.set_rng_state(state)
        return module

    torch.manual_seed(11)
    with mock.patch.object(pi0_pytorch, "PaliGemmaWithExpertModel", pair), own_tokenizer(cfg.model_path):
        return get_model(cfg)


def ours(cfg: DictConfig) -> nn.Module:
    """Our build; memory that nobody wrote holds NaN."""
    from rlinf_phyai.actor.model_provider import build_openpi

    torch.manual_seed(11)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(4).isnan().all()
        return build_openpi(cfg)
    finally:
        torch.use_deterministic_algorithms(False)


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, all buffers, and the plain tensor attributes of the rotary embeddings."""
    found = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    for name, module in model.named_modules():
        found |= {f"{name}.{key}": value for key, value in vars(module).items() if isinstance(value, Tensor)}
    return found


@pytest.mark.parametrize(
    ("checkpoint", "options"),
    [
        ("standard", {}),
        ("with_heads", {}),
        (
            "with_heads",
            {"value_after_vlm": True, "train_expert_only": False, "noise_method": "flow_noise", "joint_logprob": True},
        ),
        ("standard", {"value_after_vlm": False}),
        ("standard", {"add_value_head": False}),
    ],
    ids=["no head stored", "critic stored", "flow-noise", "critic after the expert", "no critic"],
)
def test_equals_rlinfs_own_bit_for_bit(
    small_sizes: None, checkpoint: str, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    cfg = section(request.getfixturevalue(checkpoint), **options)
    expected, found = stock(cfg), ours(cfg)
    assert type(found) is type(expected)
    assert [type(m) for m in found.modules()] == [type(m) for m in expected.modules()]
    assert "load_state_dict" not in vars(found)
    wanted, have = tensors(expected), tensors(found)
    assert list(have) == list(wanted)
    for name, tensor in wanted.items():
        assert have[name].dtype == tensor.dtype, name
        assert have[name].device == tensor.device, name
        assert have[name].requires_grad == tensor.requires_grad, name
        assert torch.equal(have[name], tensor), name
        assert not have[name].isnan().any(), name
    assert list(found.state_dict()) == list(expected.state_dict())
    assert found.paligemma_with_expert.paligemma.lm_head.weight is (
        found.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight
    )
    assert [m._fsdp_wrap_name for m in found.modules()] == [m._fsdp_wrap_name for m in expected.modules()]


def test_state_dict_of_an_rlinf_run(small_sizes: None, with_heads: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(with_heads, tmp_path / "run"))
    state = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    (directory / "model_state_dict").mkdir()
    torch.save(state, directory / "model_state_dict" / "full_weights.pt")
    wanted, found = stock(section(directory)).state_dict(), ours(section(directory)).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("layout", ["safetensors", "RLinf run"])
def test_the_engine_holds_what_the_actor_holds(
    small_sizes: None, with_heads: Path, layout: str, tmp_path: Path
) -> None:
    """A float32 checkpoint: RLinf's loader rounds the transformers' norms too, though they are float32 in the end."""
    from rlinf_phyai.models.pi05.configuration import PI05Config
    from rlinf_phyai.models.pi05.loading import load_checkpoint
    from rlinf_phyai.models.pi05.weights import PI05Weights

    directory = Path(shutil.copytree(with_heads, tmp_path / "checkpoint"))
    if layout == "RLinf run":
        (directory / "model_state_dict").mkdir()
        torch.save(load_file(directory / "model.safetensors"), directory / "model_state_dict" / "full_weights.pt")
        (directory / "model.safetensors").unlink()
    actor = ours(section(directory)).state_dict()
    config = PI05Config.from_checkpoint(directory).with_overrides(value_mode="mean_token")
    weights = PI05Weights(config, torch.device("cpu"), torch.bfloat16)
    load_checkpoint(weights, directory, None, progress=False)
    assert set(weights.views) == set(actor)
    different = [
        name
        for name, view in weights.views.items()
        if not view.is_meta and not (view.dtype == actor[name].dtype and torch.equal(view, actor[name]))
    ]
    assert different == []


def changed(checkpoint: Path, target: Path, change: Any) -> Path:
    directory = Path(shutil.copytree(checkpoint, target))
    state = load_file(directory / "model.safetensors")
    change(state)
    save_file(state, directory / "model.safetensors")
    return directory


NORM = "paligemma_with_expert.gemma_expert.model.layers.1.input_layernorm.dense.bias"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop(NORM), rf"lacks 1 tensors of the model: {NORM}"),
        (lambda s: s.pop("time_mlp_in.bias"), r"lacks 1 tensors of the model: time_mlp_in.bias"),
        (lambda s: s.pop(EMBEDDING) is s.pop(LM_HEAD), r"lacks 2 tensors .*embed_tokens"),
        (
            lambda s: s.update({NORM: s[NORM][:-1].clone()}),
            rf"wrong shape: {NORM}: found \(3071,\), the model has \(3072,\)",
        ),
        (lambda s: s.update({f"{NORM}2": s[NORM].clone()}), rf"this model does not have: {NORM}2"),
        (lambda s: s.pop("value_head.mlp.2.bias"), r"a part of the critic only; missing: value_head.mlp.2.bias"),
        (lambda s: s.update({LM_HEAD: s[LM_HEAD] + 1}), r"are one tensor in this model but differ"),
    ],
    ids=["norm", "projection", "embedding", "shape", "unknown", "half a critic", "tied differ"],
)
def test_a_checkpoint_that_does_not_fit(
    small_sizes: None, with_heads: Path, tmp_path: Path, change: Any, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        ours(section(changed(with_heads, tmp_path / "changed", change)))
    assert str(tmp_path / "changed") in str(error.value)


def test_names_of_the_lerobot_layout(small_sizes: None, with_heads: Path, tmp_path: Path) -> None:
    """RLinf's loader alone finds none of these names and trains random weights."""

    def rename(state: dict[str, Tensor]) -> None:
        for name in list(state):
            state[f"model.{name}"] = state.pop(name)

    found = ours(section(changed(with_heads, tmp_path / "lerobot", rename))).state_dict()
    wanted = ours(section(with_heads)).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_a_head_that_the_run_does_not_use_is_named(
    small_sizes: None, with_heads: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        model = ours(section(with_heads, add_value_head=False))
    assert not hasattr(model, "value_head")
    assert "value_head, which this run does not use" in caplog.text


def test_the_experts_output_head_may_be_absent(small_sizes: None, standard: Path, tmp_path: Path) -> None:
    """No action depends on it, and other converters drop it: it gets the values that transformers gives a new one."""
    model = ours(section(changed(standard, tmp_path / "changed", lambda state: state.pop(EXPERT_LM_HEAD))))
    weight = model.state_dict()[EXPERT_LM_HEAD].float()
    assert weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_a_build_that_loads_nothing_is_refused() -> None:
    from rlinf.models.embodiment.openpi import openpi_action_model

    from rlinf_phyai.actor.model_loading import building

    with pytest.raises(CheckpointError, match="loaded no weights"), building(lambda config: nn.Linear(1, 1), "here"):
        openpi_action_model.OpenPi0ForRLActionPrediction(None)
