# SPDX-License-Identifier: Apache-2.0
"""Random PI0.5 checkpoints of any size, written without rlinf, openpi, transformers or the engine itself.

The names and shapes below are spelled out once more on purpose: the engine has its own list, and the parity tests check this
one against RLinf's ``state_dict()``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VLM = "paligemma_with_expert.paligemma."
TOWER = VLM + "model.vision_tower.vision_model."
LANGUAGE = VLM + "model.language_model."
EXPERT = "paligemma_with_expert.gemma_expert."
EMBEDDING = LANGUAGE + "embed_tokens.weight"
LM_HEAD = VLM + "lm_head.weight"
NOISE_BOUNDS = {"noise_head.logvar_min": 2 * math.log(0.08), "noise_head.logvar_max": 2 * math.log(0.16)}
EXPERT_LM_HEAD = EXPERT + "lm_head.weight"


@dataclass(frozen=True)
class PI05Sizes:
    """Sizes of a test model. ``value_hidden`` None means no critic; ``value_after_vlm`` gives the critic's input."""

    vision_width: int = 32
    vision_mlp: int = 48
    vision_layers: int = 1
    vision_heads: int = 2
    prefix_width: int = 48
    prefix_mlp: int = 40
    expert_width: int = 32
    expert_mlp: int = 24
    layers: int = 2
    heads: int = 4
    kv_heads: int = 1
    head_dim: int = 16
    vocab: int = 64
    image_size: int = 28
    patch_size: int = 14
    prompt_tokens: int = 12
    horizon: int = 6
    action_dim: int = 8
    value_hidden: tuple[int, ...] | None = (16, 8)
    value_after_vlm: bool = True
    noise_head: bool = False
    pi05: bool = True

    @property
    def image_tokens(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    def but(self, **changes: Any) -> PI05Sizes:
        return replace(self, **changes)


def parameter_shapes(sizes: PI05Sizes) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the actor's ``state_dict()``, in its order."""
    s = sizes
    shapes: dict[str, tuple[int, ...]] = {
        TOWER + "embeddings.patch_embedding.weight": (s.vision_width, 3, s.patch_size, s.patch_size),
        TOWER + "embeddings.patch_embedding.bias": (s.vision_width,),
        TOWER + "embeddings.position_embedding.weight": (s.image_tokens, s.vision_width),
    }

    def with_bias(name: str, out: int, inp: int | None) -> None:
        shapes[name + ".weight"] = (out,) if inp is None else (out, inp)
        shapes[name + ".bias"] = (out,)

    for i in range(s.vision_layers):
        layer = f"{TOWER}encoder.layers.{i}."
        with_bias(layer + "layer_norm1", s.vision_width, None)
        for part in ("k_proj", "v_proj", "q_proj", "out_proj"):
            with_bias(f"{layer}self_attn.{part}", s.vision_width, s.vision_width)
        with_bias(layer + "layer_norm2", s.vision_width, None)
        with_bias(layer + "mlp.fc1", s.vision_mlp, s.vision_width)
        with_bias(layer + "mlp.fc2", s.vision_width, s.vision_mlp)
    with_bias(TOWER + "post_layernorm", s.vision_width, None)
    with_bias(VLM + "model.multi_modal_projector.linear", s.prefix_width, s.vision_width)

    def stack(root: str, width: int, mlp: int, adaptive: bool) -> None:
        queries, keys = s.heads * s.head_dim, s.kv_heads * s.head_dim

        def norm(name: str) -> None:
            if adaptive:
                with_bias(name + ".dense", 3 * width, width)
            else:
                shapes[name + ".weight"] = (width,)

        for i in range(s.layers):
            layer = f"{root}layers.{i}."
            shapes[layer + "self_attn.q_proj.weight"] = (queries, width)
            shapes[layer + "self_attn.k_proj.weight"] = (keys, width)
            shapes[layer + "self_attn.v_proj.weight"] = (keys, width)
            shapes[layer + "self_attn.o_proj.weight"] = (width, queries)
            shapes[layer + "mlp.gate_proj.weight"] = (mlp, width)
            shapes[layer + "mlp.up_proj.weight"] = (mlp, width)
            shapes[layer + "mlp.down_proj.weight"] = (width, mlp)
            norm(layer + "input_layernorm")
            norm(layer + "post_attention_layernorm")
        norm(root + "norm")

    shapes[EMBEDDING] = (s.vocab, s.prefix_width)
    stack(LANGUAGE, s.prefix_width, s.prefix_mlp, adaptive=False)
    shapes[LM_HEAD] = (s.vocab, s.prefix_width)
    stack(EXPERT + "model.", s.expert_width, s.expert_mlp, adaptive=s.pi05)
    shapes[EXPERT_LM_HEAD] = (s.vocab, s.expert_width)
    with_bias("action_in_proj", s.expert_width, s.action_dim)
    with_bias("action_out_proj", s.action_dim, s.expert_width)
    if s.pi05:
        with_bias("time_mlp_in", s.expert_width, s.expert_width)
        with_bias("time_mlp_out", s.expert_width, s.expert_width)
    else:
        with_bias("state_proj", s.expert_width, s.action_dim)
        with_bias("action_time_mlp_in", s.expert_width, 2 * s.expert_width)
        with_bias("action_time_mlp_out", s.expert_width, s.expert_width)
    if s.value_hidden is not None:
        previous = s.prefix_width if s.value_after_vlm else s.expert_width
        for i, width in enumerate((*s.value_hidden, 1)):
            with_bias(f"value_head.mlp.{2 * i}", width, previous)
            previous = width
    if s.noise_head:
        shapes |= {"noise_head.logvar_min": (1,), "noise_head.logvar_max": (1,)}
        previous = s.expert_width
        for i, width in enumerate((128, 64, s.action_dim)):
            with_bias(f"noise_head.mlp_logvar.moduleList.{i}.linear_1", width, previous)
            previous = width
    return shapes


def fill_parameters(parameters: Mapping[str, Tensor], seed: int) -> None:
    """Writes random values into the parameters, in name order, from an explicit seed.

    Those of the transformers are bfloat16 values: openpi's loaders round the float32 ones among them, a weight update does
    not, and a test that compares the two must not see that.
    Everything is non-zero (AdaRMS ``dense``, norm weights, biases and the critic too: zeros hide errors), and scaled so that
    activations, velocities and values stay of order one.
    """
    gen = torch.Generator().manual_seed(seed)
    for name in sorted(parameters):
        tensor = parameters[name]
        values = _random(name, tuple(tensor.shape), gen)
        tensor.data.copy_(values.bfloat16() if name.startswith("paligemma_with_expert.") else values)


def _random(name: str, shape: tuple[int, ...], gen: torch.Generator) -> Tensor:
    if name in NOISE_BOUNDS:
        return torch.full(shape, NOISE_BOUNDS[name])
    values = torch.randn(shape, generator=gen)
    if name.endswith(".bias"):
        return values * 0.1
    if "layer_norm" in name or "post_layernorm" in name:
        return 1 + 0.2 * values
    if name.endswith(("layernorm.weight", "language_model.norm.weight", "gemma_expert.model.norm.weight")):
        return values * 0.2
    if "position_embedding" in name:
        return values * 0.3
    if "embed_tokens" in name or "lm_head" in name:
        return values * shape[1] ** -0.5
    fan_in = 1
    for size in shape[1:]:
        fan_in *= size
    gain = (
        1.5
        if any(part in name for part in ("q_proj", "k_proj", "patch_embedding", "value_head", "noise_head"))
        else 1.0
    )
    return values * gain * fan_in**-0.5


def random_state(sizes: PI05Sizes, seed: int = 0) -> dict[str, Tensor]:
    """A random state dict in the actor's order; the tied output head equals the embedding."""
    state = {name: torch.empty(shape) for name, shape in parameter_shapes(sizes).items()}
    fill_parameters({name: tensor for name, tensor in state.items() if name != LM_HEAD}, seed)
    state[LM_HEAD] = state[EMBEDDING].clone()
    return state


def config_json(sizes: PI05Sizes) -> dict[str, Any]:
    """``config.json`` with the sizes that tensor shapes do not tell."""
    gemma = {
        "depth": sizes.layers,
        "num_heads": sizes.heads,
        "num_kv_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
    }
    own = {
        "vision": {
            "hidden_size": sizes.vision_width,
            "intermediate_size": sizes.vision_mlp,
            "num_layers": sizes.vision_layers,
            "num_heads": sizes.vision_heads,
            "patch_size": sizes.patch_size,
            "image_size": sizes.image_size,
        },
        "prefix": gemma | {"width": sizes.prefix_width, "mlp_dim": sizes.prefix_mlp},
        "expert": gemma | {"width": sizes.expert_width, "mlp_dim": sizes.expert_mlp},
        "vocab_size": sizes.vocab,
        "action_horizon": sizes.horizon,
        "action_dim": sizes.action_dim,
        "tokenizer_max_length": sizes.prompt_tokens,
    }
    return {"model_type": "pi05", "rlinf_phyai": own}


def write_checkpoint(
    directory: Path,
    state: Mapping[str, Tensor],
    sizes: PI05Sizes,
    *,
    prefix: str = "",
    drop: Iterable[str] = (),
) -> Path:
    """Writes ``model.safetensors`` (every name under ``prefix``, without ``drop``) and ``config.json``."""
    directory.mkdir(parents=True, exist_ok=True)
    dropped = set(drop)
    tensors = {
        prefix + name: value.detach().clone().contiguous() for name, value in state.items() if name not in dropped
    }
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config_json(sizes), indent=2))
    return directory
