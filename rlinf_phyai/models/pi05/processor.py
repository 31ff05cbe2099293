# SPDX-License-Identifier: Apache-2.0
"""Camera images, robot state and task sentence to model inputs; model actions to robot actions.

Needs neither openpi nor transformers, works on whole batches on the engine's device, and gives bit for bit what the
training actor's own per-sample transforms give. Formulas:

* pixels: uint8 ``p`` -> float32 ``p / 255 * 2 - 1``, each operation rounded to float32 (looked up in a table of 256
  values);
* state, quantile: ``(x - q01) / (q99 - q01 + 1e-6) * 2 - 1``; z-score: ``(x - mean) / (std + 1e-6)``; in float64;
* action, quantile: ``(a + 1) / 2`` in float32, then ``* (q99 - q01 + 1e-6) + q01`` in float64; z-score:
  ``a * (std + 1e-6) + mean`` in float64. Dimensions without statistics pass through.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlinf_phyai.models.pi05.finite import non_finite_rows
from rlinf_phyai.models.pi05.resize import PilBilinearResize, runs_triton
from rlinf_phyai.models.pi05.tokenizer import PromptTokenizer

_EPSILON = 1e-6  # keeps a constant dimension finite; part of the trained normalisation
_FORMAT = 1
_OPTIONS_FILE = "processor.json"
_TOKENIZER_FILE = "tokenizer.model"


@dataclass(frozen=True)
class ProcessorOptions:
    """Everything that changes what the processor computes. All of it is written by :meth:`PI05Processor.save`.

    Attributes:
        image_size: side of the square model image, pixels.
        max_token_len: prompt length after padding, tokens.
        discrete_state_input: write the state into the prompt (bin numbers) instead of leaving it out.
        action_dim: width of the model's state and action vectors, padding included.
        action_env_dim: leading action dimensions the robot uses.
        use_quantiles: quantile normalisation; False means z-score.
    """

    image_size: int = 224
    max_token_len: int = 200
    discrete_state_input: bool = False
    action_dim: int = 32
    action_env_dim: int = 7
    use_quantiles: bool = True


@dataclass(frozen=True)
class NormStats:
    """Statistics of one vector (``state`` or ``actions``); float64 arrays of equal length, quantiles may be absent."""

    mean: np.ndarray
    std: np.ndarray
    q01: np.ndarray | None = None
    q99: np.ndarray | None = None

    @classmethod
    def from_values(cls, values: Mapping[str, Any], name: str) -> NormStats:
        """Builds from a mapping with ``mean``, ``std`` and optionally ``q01``, ``q99``.

        Raises:
            ValueError: a missing key, a nested list or different lengths; the message names the vector and the key.
        """
        arrays: dict[str, np.ndarray] = {}
        for key in ("mean", "std", "q01", "q99"):
            value = values.get(key)
            if value is None and key in ("mean", "std"):
                raise ValueError(f"normalisation statistics of {name!r} lack {key!r}")
            if value is None:
                continue
            array = np.asarray(value, dtype=np.float64)
            if array.ndim != 1 or array.shape != arrays.get("mean", array).shape:
                raise ValueError(
                    f"normalisation statistics of {name!r}: {key!r} has shape {array.shape}; expected one vector as"
                    " long as 'mean'"
                )
            arrays[key] = array
        return cls(**arrays)

    def to_values(self) -> dict[str, list[float] | None]:
        """The JSON form that :meth:`from_values` reads."""
        fields = {key: getattr(self, key) for key in ("mean", "std", "q01", "q99")}
        return {key: None if array is None else array.tolist() for key, array in fields.items()}


def load_norm_stats(path: Path | str) -> dict[str, NormStats]:
    """Reads a ``norm_stats.json`` as openpi and RLinf checkpoints hold it.

    Raises:
        FileNotFoundError: no such file; the message names the path that was looked for.
        ValueError: not the expected layout.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no normalisation statistics at {path}")
    content = json.loads(path.read_text())
    if not isinstance(content, dict) or not isinstance(content.get("norm_stats"), dict):
        raise ValueError(
            f"{path} has no object 'norm_stats'; expected {{'norm_stats': {{'state': ..., 'actions': ...}}}}"
        )
    return {name: NormStats.from_values(values, name) for name, values in content["norm_stats"].items()}


class PI05Processor:
    """Input and output transforms of PI0.5 for batches.

    Args:
        options: see :class:`ProcessorOptions`.
        tokenizer: its ``max_len`` must equal ``options.max_token_len``.
        norm_stats: statistics named ``state`` and ``actions``; None leaves both vectors as they are.
        device: where images are processed.

    Raises:
        ValueError: options, tokenizer and statistics that do not fit together.
    """

    def __init__(
        self,
        options: ProcessorOptions,
        tokenizer: PromptTokenizer,
        norm_stats: Mapping[str, NormStats] | None,
        device: torch.device | str = "cpu",
    ) -> None:
        if tokenizer.max_len != options.max_token_len:
            raise ValueError(f"tokenizer.max_len is {tokenizer.max_len} but max_token_len is {options.max_token_len}")
        if not 1 <= options.action_env_dim <= options.action_dim:
            raise ValueError(
                f"action_env_dim is {options.action_env_dim}; allowed: 1..{options.action_dim} (action_dim)"
            )
        for name in ("state", "actions") if norm_stats is not None else ():
            if norm_stats is None or name not in norm_stats:
                raise ValueError(f"normalisation statistics lack {name!r}; found {sorted(norm_stats or ())}")
            stats = norm_stats[name]
            if options.use_quantiles and (stats.q01 is None or stats.q99 is None):
                raise ValueError(f"use_quantiles is set but the statistics of {name!r} have no q01/q99")
        if norm_stats is not None and options.use_quantiles and len(norm_stats["actions"].mean) > options.action_dim:
            raise ValueError(
                f"statistics of 'actions' have {len(norm_stats['actions'].mean)} dimensions, the model has"
                f" {options.action_dim}"
            )
        self.options = options
        self.tokenizer = tokenizer
        self.norm_stats = None if norm_stats is None else dict(norm_stats)
        self.device = torch.device(device)
        self._vectors: dict[tuple[int, int, torch.device], torch.Tensor] = {}
        self._resize = PilBilinearResize(options.image_size, options.image_size)
        self._one_launch = runs_triton(self.device)
        levels = torch.arange(256, dtype=torch.uint8).to(torch.float32)
        # Made on the CPU: CUDA divides by a constant through its reciprocal, one bit off the actor's CPU result.
        self._levels = (levels / 255.0 * 2.0 - 1.0).to(self.device)

    # -- inputs -----------------------------------------------------------------------------------------------------

    def pixel_values(self, cameras: Sequence[torch.Tensor]) -> torch.Tensor:
        """Resizes and scales the images of a batch.

        Args:
            cameras: one uint8 ``[B, height, width, 3]`` tensor per used camera, in the model's camera order; sizes
                may differ between cameras. Tensors elsewhere are copied to the processor's device once, as uint8.

        Returns:
            float32 ``[B, cameras, 3, image_size, image_size]`` in [-1, 1].

        Raises:
            ValueError: wrong dtype, rank or channel count, or cameras with different batch sizes.
        """
        if not cameras:
            raise ValueError("no camera image given")
        for index, images in enumerate(cameras):
            if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[-1] != 3:
                raise ValueError(
                    f"camera {index} has dtype {images.dtype} and shape {tuple(images.shape)}; expected uint8"
                    " [B, height, width, 3]"
                )
            if images.shape[0] != cameras[0].shape[0]:
                raise ValueError(f"camera {index} has {images.shape[0]} images, camera 0 has {cameras[0].shape[0]}")
        on_device = [images.to(self.device, non_blocking=True) for images in cameras]
        if self._one_launch:
            side = self.options.image_size
            pixels = self._levels.new_empty(cameras[0].shape[0], len(cameras), 3, side, side)
            for index, images in enumerate(on_device):
                self._resize.to_levels(images, self._levels, pixels[:, index])
            return pixels
        if all(images.shape == on_device[0].shape for images in on_device):
            resized = self._resize(torch.stack(on_device, dim=1).flatten(0, 1)).unflatten(0, (-1, len(cameras)))
        else:
            resized = torch.stack([self._resize(images) for images in on_device], dim=1)
        return self._levels.index_select(0, resized.flatten().to(torch.int32)).view(resized.shape)

    def normalize_state(self, states: torch.Tensor) -> torch.Tensor:
        """Normalises robot states.

        Args:
            states: ``[B, n]`` floating point, n at most ``action_dim``, in the robot's units.

        Returns:
            float64 ``[B, n]``, not padded.

        Raises:
            ValueError: wrong rank, or more dimensions than statistics or model have.
        """
        if states.dim() != 2 or not states.is_floating_point() or states.shape[1] > self.options.action_dim:
            raise ValueError(
                f"states have dtype {states.dtype} and shape {tuple(states.shape)}; expected floating point [B, n] with"
                f" n <= {self.options.action_dim}"
            )
        values = states.to(torch.float64)
        if self.norm_stats is None:
            return values
        stats = self.norm_stats["state"]
        width = values.shape[1]
        if width > len(stats.mean):
            raise ValueError(f"states have {width} dimensions, the normalisation statistics only {len(stats.mean)}")
        if self.options.use_quantiles:
            low, high = self._vector(stats.q01, width, values.device), self._vector(stats.q99, width, values.device)
            return (values - low) / (high - low + _EPSILON) * 2.0 - 1.0
        mean, std = self._vector(stats.mean, width, values.device), self._vector(stats.std, width, values.device)
        return (values - mean) / (std + _EPSILON)

    def pad_state(self, states: torch.Tensor) -> torch.Tensor:
        """Zero-pads normalised states ``[B, n]`` to ``[B, action_dim]``."""
        return torch.nn.functional.pad(states, (0, self.options.action_dim - states.shape[1]))

    def tokenize(self, sentences: list[str], states: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Prompt tokens of a batch.

        Args:
            sentences: B task sentences.
            states: raw states ``[B, n]``; needed with ``discrete_state_input``, else ignored.

        Returns:
            Ids ``[B, max_token_len]`` int64 padded right with 0, and lengths ``[B]`` int64; both on the CPU.

        Raises:
            ValueError: a state that belongs into the prompt is missing, or is not finite.
        """
        if not self.options.discrete_state_input:
            return self.tokenizer(sentences)
        if states is None:
            raise ValueError("discrete_state_input is set: the prompt needs the robot state, but states is None")
        normalized = self.normalize_state(states.cpu())
        bad = non_finite_rows(normalized)
        if bad:  # its bin would be a number like any other
            raise ValueError(
                f"the robot state that belongs into the prompt holds NaN or infinite values in the samples {bad}; look at what the "
                "simulator reported, then at norm_stats.json"
            )
        return self.tokenizer(sentences, normalized.numpy())

    # -- outputs ----------------------------------------------------------------------------------------------------

    def unnormalize_actions(self, actions: torch.Tensor, action_chunk: int | None = None) -> torch.Tensor:
        """Turns model actions into robot actions.

        Args:
            actions: float32 ``[B, horizon, action_dim]`` on any device.
            action_chunk: leading steps to keep; None keeps all.

        Returns:
            float64 ``[B, action_chunk, action_env_dim]`` in the robot's units, on the same device.

        Raises:
            ValueError: wrong shape, or ``action_chunk`` beyond the horizon.
        """
        options = self.options
        if actions.dim() != 3 or actions.shape[2] != options.action_dim:
            raise ValueError(f"actions have shape {tuple(actions.shape)}; expected [B, horizon, {options.action_dim}]")
        if action_chunk is not None and not 1 <= action_chunk <= actions.shape[1]:
            raise ValueError(f"action_chunk is {action_chunk}; allowed: 1..{actions.shape[1]} (the action horizon)")
        kept = actions[:, :action_chunk, : options.action_env_dim].to(torch.float32)
        if self.norm_stats is None:
            return kept.to(torch.float64)
        stats = self.norm_stats["actions"]
        known = min(len(stats.mean), options.action_env_dim)
        if options.use_quantiles:
            low, high = self._vector(stats.q01, known, kept.device), self._vector(stats.q99, known, kept.device)
            scaled = ((kept[..., :known] + 1.0) / 2.0).to(torch.float64) * (high - low + _EPSILON) + low
        else:
            mean, std = self._vector(stats.mean, known, kept.device), self._vector(stats.std, known, kept.device)
            scaled = kept[..., :known].to(torch.float64) * (std + _EPSILON) + mean
        if known == options.action_env_dim:
            return scaled
        rest = kept[..., known:].to(torch.float64)
        if not options.use_quantiles:
            rest = rest * (1.0 + _EPSILON)  # z-score pads its statistics with mean 0 and deviation 1
        return torch.cat([scaled, rest], dim=-1)

    def _vector(self, values: np.ndarray | None, width: int, device: torch.device) -> torch.Tensor:
        """A statistic on a device, copied there once: a copy from pageable memory would wait for all queued work."""
        assert values is not None
        key = (id(values), width, device)
        if key not in self._vectors:
            self._vectors[key] = torch.from_numpy(values[:width]).to(device)
        return self._vectors[key]

    # -- files ------------------------------------------------------------------------------------------------------

    def save(self, directory: Path | str) -> None:
        """Writes ``processor.json`` (options and statistics) and ``tokenizer.model`` into ``directory``."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        stats = (
            None if self.norm_stats is None else {name: value.to_values() for name, value in self.norm_stats.items()}
        )
        content = {"format": _FORMAT, "options": dataclasses.asdict(self.options), "norm_stats": stats}
        (directory / _OPTIONS_FILE).write_text(json.dumps(content, indent=2) + "\n")
        (directory / _TOKENIZER_FILE).write_bytes(self.tokenizer.model_proto)

    @classmethod
    def from_checkpoint(
        cls,
        directory: Path | str,
        options: ProcessorOptions | None = None,
        tokenizer: Path | str | None = None,
        asset_id: str = "physical-intelligence/libero",
        device: torch.device | str = "cpu",
    ) -> PI05Processor:
        """Builds from a policy checkpoint, which holds the statistics but not every option.

        Args:
            directory: the checkpoint; statistics are read from ``<directory>/<asset_id>/norm_stats.json``.
            options: see :class:`ProcessorOptions`; None takes the defaults.
            tokenizer: sentencepiece model; None looks for ``big_vision/paligemma_tokenizer.model`` in the checkpoint.

        Raises:
            FileNotFoundError: statistics or tokenizer are missing; the message names the path.
        """
        directory, options = Path(directory), options or ProcessorOptions()
        path = Path(tokenizer) if tokenizer is not None else directory / "big_vision" / "paligemma_tokenizer.model"
        stats = load_norm_stats(directory / asset_id / "norm_stats.json")
        return cls(options, PromptTokenizer.from_file(path, options.max_token_len), stats, device)

    @classmethod
    def load(cls, directory: Path | str, device: torch.device | str = "cpu") -> PI05Processor:
        """Reads what :meth:`save` wrote; no option has to be passed again.

        Raises:
            FileNotFoundError: a file is missing; the message names it.
            ValueError: an unknown option or another format version.
        """
        directory = Path(directory)
        path = directory / _OPTIONS_FILE
        if not path.is_file():
            raise FileNotFoundError(f"no saved processor at {path}; write one with PI05Processor.save")
        content = json.loads(path.read_text())
        if content.get("format") != _FORMAT:
            raise ValueError(f"{path} has format {content.get('format')!r}; this version reads format {_FORMAT}")
        allowed = {field.name for field in dataclasses.fields(ProcessorOptions)}
        found = set(content["options"])
        if found != allowed:
            raise ValueError(
                f"{path}: unknown options {sorted(found - allowed)}, missing options {sorted(allowed - found)}"
            )
        options = ProcessorOptions(**content["options"])
        stats = content["norm_stats"]
        return cls(
            options,
            PromptTokenizer.from_file(directory / _TOKENIZER_FILE, options.max_token_len),
            None if stats is None else {name: NormStats.from_values(values, name) for name, values in stats.items()},
            device,
        )
