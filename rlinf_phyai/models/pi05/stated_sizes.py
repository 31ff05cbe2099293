# SPDX-License-Identifier: Apache-2.0
"""The sizes that a checkpoint states itself: ``config.json``'s object under the key ``rlinf_phyai``.

RLinf and openpi know one size of PI0.5 and of PI0. A checkpoint with this object has another one, and actor and engine build that. Only
what the actor can build is allowed here; what the engine's own ``configuration`` holds besides (epsilons, the rotary base) is
fixed there. The defaults are those of the tiny model.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

CONFIG_KEY = "rlinf_phyai"
ACTOR_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class VisionSizes:
    """SigLIP. ``image_size`` stays 224: the input transforms resize to it."""

    hidden_size: int = 48
    intermediate_size: int = 96
    num_layers: int = 2
    num_heads: int = 4
    patch_size: int = 56
    image_size: int = 224

    @property
    def tokens(self) -> int:
        """Tokens per image."""
        return (self.image_size // self.patch_size) ** 2


@dataclass(frozen=True)
class GemmaSizes:
    """One Gemma stack."""

    width: int
    mlp_dim: int
    depth: int = 2
    num_heads: int = 8
    num_kv_heads: int = 1
    head_dim: int = 16


@dataclass(frozen=True)
class StatedSizes:
    """All sizes of a PI0.5 or PI0 model; what ``config.json`` holds under the key ``rlinf_phyai``.

    Widths differ on purpose, so that a swapped pair of dimensions fails instead of running.

    Attributes:
        params_dtype: type in which the actor holds the two transformers' matrices, one of :data:`ACTOR_DTYPES`.
    """

    vision: VisionSizes = field(default_factory=VisionSizes)
    prefix: GemmaSizes = field(default_factory=lambda: GemmaSizes(width=64, mlp_dim=160))
    expert: GemmaSizes = field(default_factory=lambda: GemmaSizes(width=32, mlp_dim=96))
    vocab_size: int = 1024
    action_horizon: int = 10
    action_dim: int = 32
    tokenizer_max_length: int = 200
    value_head_sizes: tuple[int, ...] = (64, 32)
    params_dtype: str = "float32"
    pi05: bool = True  # False: PI0

    def __post_init__(self) -> None:
        for name in ("depth", "num_heads", "num_kv_heads", "head_dim"):
            prefix, expert = getattr(self.prefix, name), getattr(self.expert, name)
            if prefix != expert:
                raise ValueError(
                    f"prefix.{name} is {prefix} and expert.{name} is {expert}: the expert attends to the prefix's keys "
                    "and values layer by layer, so both must agree."
                )
        if self.vision.image_size % self.vision.patch_size:
            raise ValueError(
                f"vision.image_size {self.vision.image_size} is not a multiple of vision.patch_size {self.vision.patch_size}."
            )
        if self.params_dtype not in ACTOR_DTYPES:
            raise ValueError(f"params_dtype is {self.params_dtype!r}; allowed: {', '.join(ACTOR_DTYPES)}.")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "StatedSizes":
        """The inverse of :meth:`to_dict`; unknown keys are a ``TypeError`` that names them."""
        values = dict(values)
        values["vision"] = VisionSizes(**values["vision"])
        values["prefix"] = GemmaSizes(**values["prefix"])
        values["expert"] = GemmaSizes(**values["expert"])
        values["value_head_sizes"] = tuple(values["value_head_sizes"])
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        values = asdict(self)
        values["value_head_sizes"] = list(self.value_head_sizes)
        return values


TINY_SIZES = {"pi05": StatedSizes(), "pi0": StatedSizes(pi05=False, tokenizer_max_length=48)}
"""The tiny model by the name of its kind. Prompt lengths are openpi's: PI0 does not spell the state out in the prompt."""


def read_stated_sizes(checkpoint_dir: str | Path) -> StatedSizes | None:
    """The sizes that a checkpoint folder states itself, or None for a checkpoint of the standard size.

    Raises:
        ValueError: ``config.json`` is not JSON, or its key ``rlinf_phyai`` does not describe a model.
    """
    values = _stated(checkpoint_dir)
    if values is None:
        return None
    try:
        return StatedSizes.from_dict(values)
    except (KeyError, TypeError, ValueError) as error:
        path = Path(checkpoint_dir) / "config.json"
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path}: key {CONFIG_KEY!r} does not describe a model: {reason}") from error


def actor_params_dtype(checkpoint_dir: str | Path) -> str:
    """Type in which the actor holds the matrices of a checkpoint's transformers, one of :data:`ACTOR_DTYPES`.

    RLinf's loader makes them bfloat16 whatever the files hold; a checkpoint that states its sizes states its type too.

    Raises:
        ValueError: ``config.json`` is not JSON, or its key ``rlinf_phyai`` names no such type.
    """
    values = _stated(checkpoint_dir)
    dtype = "bfloat16" if values is None else values.get("params_dtype", StatedSizes.params_dtype)
    if dtype not in ACTOR_DTYPES:
        path = Path(checkpoint_dir) / "config.json"
        raise ValueError(
            f"{path}: {CONFIG_KEY}.params_dtype is {dtype!r}; allowed: {', '.join(ACTOR_DTYPES)}. Correct it there."
        )
    return str(dtype)


def _stated(checkpoint_dir: str | Path) -> dict[str, Any] | None:
    path = Path(checkpoint_dir).expanduser() / "config.json"
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
    except ValueError as error:  # not JSON, or no text
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {str(content)[:40]!r}; expected a JSON object.")
    values = content.get(CONFIG_KEY)
    if not isinstance(values, dict | None):
        raise ValueError(
            f"{path}: key {CONFIG_KEY!r} does not describe a model: found {str(values)[:40]!r}, not an object"
        )
    return values
