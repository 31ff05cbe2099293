# SPDX-License-Identifier: Apache-2.0
"""Sizes of a PI0.5 model, read from a checkpoint.

Sizes come from, in this order: ``config.json``'s ``rlinf_phyai`` object (our own checkpoints), the shapes of the tensors, and the
published PI0.5 sizes for what shapes cannot tell (number of heads, horizon, prompt length).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlinf_phyai.errors import CheckpointError

VALUE_MODES = ("mean_token", "last_token", "first_token", "expert")
"""Critic inputs: three poolings of the prefix output (critic after the VLM), or the expert's output per denoise step."""

NOISE_METHODS = ("flow_sde", "flow_cps", "flow_noise")
"""How a stochastic denoise step gets its noise; formulas in ``sampler.py``."""

NOISE_HEAD_SIZES = (128, 64)
"""Hidden sizes of flow-noise's MLP, fixed in RLinf's model."""


def _check_sizes(where: str, config: Any, optional: tuple[str, ...]) -> None:
    """Every field but the ``optional`` ones is a whole number of at least 1."""
    for name, value in vars(config).items():
        if name not in optional and (type(value) is not int or value < 1):
            raise ValueError(f"{where}: {name} is {value!r}; it must be an integer of at least 1.")


@dataclass(frozen=True)
class VisionConfig:
    """SigLIP tower. Defaults: So400m/14 at 224 pixels."""

    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_layers: int = 27
    num_heads: int = 16
    patch_size: int = 14
    image_size: int = 224
    layer_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        _check_sizes("vision", self, optional=("layer_norm_eps",))
        if self.image_size % self.patch_size or self.hidden_size % self.num_heads:
            raise ValueError(
                f"vision.image_size {self.image_size} must be a multiple of vision.patch_size {self.patch_size}, and "
                f"vision.hidden_size {self.hidden_size} of vision.num_heads {self.num_heads}."
            )

    @property
    def num_tokens(self) -> int:
        """Tokens of one image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True)
class GemmaConfig:
    """One Gemma stack: the prefix (2B) or the action expert (300M)."""

    width: int = 2048
    depth: int = 18
    mlp_dim: int = 16384
    num_heads: int = 8
    num_kv_heads: int = 1
    head_dim: int = 256
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        _check_sizes("prefix and expert", self, optional=("rope_theta", "norm_eps"))
        if self.head_dim % 2 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"head_dim {self.head_dim} must be even, and num_heads {self.num_heads} a multiple of num_kv_heads "
                f"{self.num_kv_heads}."
            )

    @property
    def attention_scale(self) -> float:
        return self.head_dim**-0.5


@dataclass(frozen=True)
class PI05Config:
    """All sizes of a PI0.5 model and of the policy on top of it.

    Attributes:
        action_horizon: actions the expert denoises at once (H).
        action_dim: padded model action dimension (D).
        tokenizer_max_length: prompt length of the actor, padding included.
        num_steps: default number of denoise steps (N) of ``step``.
        num_cameras: cameras of the actor's prefix, masked ones included.
        value_mode: one of VALUE_MODES, or None without a critic.
        chunk_critic_input: critic after the expert pools the first ``action_chunk`` outputs instead of all.
        value_head_sizes: hidden sizes of the critic.
        noise_method: one of NOISE_METHODS; ``flow_noise`` has parameters of its own (``noise_head.*``).
        pi05: False for PI0: a state token before the action tokens, and the time mixed into these instead of AdaRMS.
        noise_std_range: smallest and largest standard deviation of flow-noise, where the checkpoint has no noise head.
    """

    vision: VisionConfig = field(default_factory=VisionConfig)
    prefix: GemmaConfig = field(default_factory=GemmaConfig)
    expert: GemmaConfig = field(default_factory=lambda: GemmaConfig(width=1024, mlp_dim=4096))
    vocab_size: int = 257_152
    action_horizon: int = 10
    action_dim: int = 32
    action_chunk: int = 5
    action_env_dim: int = 7
    tokenizer_max_length: int = 200
    num_steps: int = 10
    num_cameras: int = 3
    value_mode: str | None = None
    chunk_critic_input: bool = False
    value_head_sizes: tuple[int, ...] = (1024, 512, 256)
    pi05: bool = True
    noise_method: str = "flow_sde"
    noise_std_range: tuple[float, float] = (0.08, 0.16)

    def __post_init__(self) -> None:
        if self.value_mode is not None and self.value_mode not in VALUE_MODES:
            raise ValueError(f"value_mode is {self.value_mode!r}; allowed: {', '.join(VALUE_MODES)} or None.")
        if self.noise_method not in NOISE_METHODS:
            raise ValueError(f"noise_method is {self.noise_method!r}; allowed: {', '.join(NOISE_METHODS)}.")
        try:
            smallest, largest = self.noise_std_range
            ordered = 0 < smallest < largest < math.inf
        except (TypeError, ValueError):  # no pair, or no numbers
            ordered = False
        if not ordered:
            raise ValueError(
                f"noise_std_range is {self.noise_std_range}; two numbers are needed, 0 < smallest < largest deviation."
            )
        others = (
            "vision", "prefix", "expert", "value_mode", "chunk_critic_input", "value_head_sizes", "noise_method",
            "noise_std_range", "pi05",
        )  # fmt: skip
        _check_sizes("pi05", self, optional=others)
        if not 1 <= self.action_chunk <= self.action_horizon:
            raise ValueError(
                f"action_chunk is {self.action_chunk} but the model predicts action_horizon {self.action_horizon} actions; "
                f"choose a chunk in 1..{self.action_horizon}."
            )
        shared = ("depth", "num_kv_heads", "head_dim", "num_heads")
        for name in shared:
            if getattr(self.prefix, name) != getattr(self.expert, name):
                raise ValueError(
                    f"prefix.{name} is {getattr(self.prefix, name)} and expert.{name} is {getattr(self.expert, name)}; the expert "
                    "attends to the prefix layer by layer, so they must agree."
                )

    @property
    def critic_after_vlm(self) -> bool:
        return self.value_mode in ("mean_token", "last_token", "first_token")

    @property
    def suffix_length(self) -> int:
        """Tokens of the expert: the actions, and PI0's state."""
        return self.action_horizon + (0 if self.pi05 else 1)

    @property
    def value_input_width(self) -> int:
        return self.prefix.width if self.critic_after_vlm else self.expert.width

    @classmethod
    def from_checkpoint(cls, checkpoint_dir: str | Path) -> PI05Config:
        """Sizes of the checkpoint in a directory (see the module's docstring).

        Raises:
            CheckpointError: no weights found, they are no PI0.5 model, or ``config.json`` is broken.
        """
        from rlinf_phyai.models.pi05.checkpoint import tensor_shapes

        directory = Path(checkpoint_dir).expanduser()
        shapes = tensor_shapes(directory)
        content = _read_json(directory / "config.json")
        try:
            return infer_config(shapes, content)
        except KeyError as error:
            raise CheckpointError(
                f"checkpoint {directory} lacks {error.args[0]}, which tells the model's sizes."
            ) from error
        except (TypeError, ValueError, IndexError, ZeroDivisionError) as error:
            raise CheckpointError(
                f"checkpoint {directory}: its tensors' shapes and config.json do not describe a PI0.5 model "
                f"({type(error).__name__}: {error})."
            ) from error

    def with_overrides(self, **overrides: Any) -> PI05Config:
        """A copy in which every override that is not None replaces the field of that name."""
        return replace(self, **{key: value for key, value in overrides.items() if value is not None})


def infer_config(shapes: Mapping[str, tuple[int, ...]], content: Mapping[str, Any]) -> PI05Config:
    """Sizes from canonical tensor names with shapes and the content of ``config.json``."""
    own = content.get("rlinf_phyai")
    if own is not None:
        try:
            return _from_own(own, shapes)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"config.json: the key rlinf_phyai does not describe a PI0.5 model ({type(error).__name__}: {error})."
            ) from error
    vlm, expert = "paligemma_with_expert.paligemma.model.", "paligemma_with_expert.gemma_expert.model."
    tower = f"{vlm}vision_tower.vision_model."
    hidden, _, patch, _ = shapes[f"{tower}embeddings.patch_embedding.weight"]
    positions = shapes[f"{tower}embeddings.position_embedding.weight"][0]
    vision = VisionConfig(
        hidden_size=hidden,
        intermediate_size=shapes[f"{tower}encoder.layers.0.mlp.fc1.weight"][0],
        num_layers=_depth(shapes, f"{tower}encoder.layers."),
        num_heads=max(1, hidden // 72),
        patch_size=patch,
        image_size=patch * round(positions**0.5),
    )
    embedding = (
        shapes.get(f"{vlm}language_model.embed_tokens.weight")
        or shapes["paligemma_with_expert.paligemma.lm_head.weight"]
    )
    pi05 = _is_pi05(shapes)
    horizon, prompt, value_head = (10, 200, (1024, 512, 256)) if pi05 else (50, 48, (512, 256, 128))
    fields: dict[str, Any] = {
        "pi05": pi05,
        "value_head_sizes": value_head,
        "vision": vision,
        "prefix": _gemma(shapes, f"{vlm}language_model."),
        "expert": _gemma(shapes, expert),
        "vocab_size": embedding[0],
        "action_dim": shapes["action_in_proj.weight"][1],
        "action_horizon": int(content.get("action_horizon", content.get("chunk_size", horizon))),
        "tokenizer_max_length": int(content.get("tokenizer_max_length", prompt)),
        "num_steps": int(content.get("num_inference_steps", PI05Config.num_steps)),
    }
    fields["action_chunk"] = min(PI05Config.action_chunk, fields["action_horizon"])
    return PI05Config(**(fields | _heads(shapes, fields["prefix"].width)))


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds a {type(content).__name__}; an object is expected.")
    return content


def _from_own(own: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> PI05Config:
    prefix = GemmaConfig(**own["prefix"])
    fields: dict[str, Any] = {
        "pi05": _is_pi05(shapes),
        "vision": VisionConfig(**own["vision"]),
        "prefix": prefix,
        "expert": GemmaConfig(**own["expert"]),
    }
    for name in ("vocab_size", "action_horizon", "action_dim", "tokenizer_max_length", "num_steps", "num_cameras"):
        if name in own:
            fields[name] = own[name]
    fields["action_chunk"] = min(PI05Config.action_chunk, fields.get("action_horizon", PI05Config.action_horizon))
    head = _heads(shapes, prefix.width)
    if "value_head_sizes" in own:
        head["value_head_sizes"] = tuple(own["value_head_sizes"])
    return PI05Config(**fields, **head)


def _is_pi05(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    return "time_mlp_in.weight" in shapes


def _depth(shapes: Mapping[str, tuple[int, ...]], stem: str) -> int:
    return 1 + max((int(name[len(stem) :].split(".", 1)[0]) for name in shapes if name.startswith(stem)), default=0)


def _gemma(shapes: Mapping[str, tuple[int, ...]], stem: str) -> GemmaConfig:
    layer = f"{stem}layers.0."
    queries, width = shapes[f"{layer}self_attn.q_proj.weight"]
    keys = shapes[f"{layer}self_attn.k_proj.weight"][0]
    head_dim = min(GemmaConfig.head_dim, keys)
    return GemmaConfig(
        width=width,
        depth=_depth(shapes, f"{stem}layers."),
        mlp_dim=shapes[f"{layer}mlp.gate_proj.weight"][0],
        num_heads=queries // head_dim,
        num_kv_heads=keys // head_dim,
        head_dim=head_dim,
    )


def _heads(shapes: Mapping[str, tuple[int, ...]], prefix_width: int) -> dict[str, Any]:
    """Critic (sizes and default mode) and noise head that a checkpoint holds; nothing when it holds none."""
    found: dict[str, Any] = {"noise_method": "flow_noise"} if "noise_head.logvar_min" in shapes else {}
    rows: list[tuple[int, ...]] = []
    while (shape := shapes.get(f"value_head.mlp.{2 * len(rows)}.weight")) is not None:
        rows.append(shape)
    if not rows:
        return found
    mode = "mean_token" if rows[0][1] == prefix_width else "expert"
    return found | {"value_head_sizes": tuple(shape[0] for shape in rows[:-1]), "value_mode": mode}
