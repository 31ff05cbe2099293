# SPDX-License-Identifier: Apache-2.0
"""Checksums of parameters: whether two processes hold the same weights, without moving the weights.

RLinf sends trainable parameters only, so frozen ones that were loaded from different files would differ silently for a
whole run. Both sides therefore compute one number per parameter once, and the driver compares.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf_phyai.errors import WeightUpdateError

_WORDS_PER_CHUNK = 1 << 24  # bounds the scratch memory of a 1 GB embedding table to a few hundred MB


@dataclass(frozen=True)
class Checksum:
    """Of one parameter: dtype, shape, and the sum of its 32-bit (or smaller) words weighted by position, mod 2^64."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    value: int


def checksum(tensor: Tensor, dtype: torch.dtype | None = None) -> Checksum:
    """Checksum of a tensor's bits; equal bits give equal numbers on any device.

    Args:
        tensor: any dense tensor.
        dtype: the tensor is cast to it first; None keeps its own.
    """
    tensor = tensor.detach().to(dtype or tensor.dtype).contiguous()
    flat = tensor.view(-1).view(torch.uint8)
    words = next(flat.view(kind) for kind, size in _WORDS if flat.numel() % size == 0)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _WORDS_PER_CHUNK):
        part = words[start : start + _WORDS_PER_CHUNK].to(torch.int64)
        weights = torch.arange(start, start + part.numel(), device=part.device, dtype=torch.int64) * 2 + 1
        total += (part * weights).sum()  # wraps around, in any order of summation
    return Checksum(tensor.dtype, tuple(tensor.shape), int(total))


_WORDS = ((torch.int32, 4), (torch.int16, 2), (torch.uint8, 1))


def checksums(parameters: Iterable[tuple[str, Tensor]], dtypes: Mapping[str, torch.dtype]) -> dict[str, Checksum]:
    """Checksums of the named parameters, each cast to ``dtypes[name]``; names that ``dtypes`` lacks are left out."""
    return {name: checksum(tensor, dtypes[name]) for name, tensor in parameters if name in dtypes}


def common_dtype(stored: torch.dtype, transport: torch.dtype | None) -> torch.dtype:
    """The type in which both sides hold the same bits: a narrower transport type has rounded the rollout's values."""
    if transport is None or not stored.is_floating_point or transport.itemsize >= stored.itemsize:
        return stored
    return transport


def require_equal(actor: Mapping[str, Checksum], rollout: Mapping[str, Checksum]) -> None:
    """Compares all parameters after the first weight sync.

    Raises:
        WeightUpdateError: a parameter differs, or one side lacks it; the message names the first of them.
    """
    missing = sorted(set(rollout) - set(actor))
    different = sorted(name for name in set(rollout) & set(actor) if rollout[name] != actor[name])
    if not missing and not different:
        return
    parts = []
    if different:
        parts.append(f"{len(different)} parameters differ between actor and rollout, first {different[:4]}")
    if missing:
        parts.append(f"the actor lacks {len(missing)} parameters of the rollout, first {missing[:4]}")
    raise WeightUpdateError(
        f"after the first weight sync {'; '.join(parts)}. Only trainable parameters are sent, so the others must"
        " come from the same files: set runner.ckpt_path to the checkpoint that the actor started from"
        " (runner.resume_dir reloads the actor alone), and the same model_path for actor and rollout."
    )
