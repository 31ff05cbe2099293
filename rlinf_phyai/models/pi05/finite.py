# SPDX-License-Identifier: Apache-2.0
"""Whether weights are finite: reductions over many tensors, and one wait for their result. And which samples of an input are not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

_LARGE = 1 << 22  # elements


def magnitudes(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Largest absolute values: float32 vectors, NaN where a tensor holds one. Does not wait for the device.

    Small tensors of one dtype share a launch. A large one gets a reduction of its own, which reads several times faster
    than the fused one.
    """
    single: list[Tensor] = []
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() >= _LARGE:
            single.append(torch.linalg.vector_norm(tensor.detach(), ord=math.inf).float())
        else:
            by_dtype.setdefault(tensor.dtype, []).append(tensor.detach())
    fused = [torch.stack(torch._foreach_norm(group, ord=math.inf)).float() for group in by_dtype.values()]
    return [*fused, torch.stack(single)] if single else fused


def all_finite(magnitudes: list[Tensor]) -> bool:
    """Whether every tensor behind :func:`magnitudes` is free of NaN and infinity. Waits for the device, once."""
    return not magnitudes or bool(torch.cat(magnitudes).isfinite().all())


def non_finite(views: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that hold NaN or infinity, for messages; waits once per tensor."""
    return [name for name, view in views.items() if not view.is_meta and not bool(view.isfinite().all())]


def non_finite_rows(batch: Tensor) -> list[int]:
    """Samples of ``[B, n]`` that hold NaN or infinity; waits for the device."""
    return (~torch.isfinite(batch)).any(dim=1).nonzero().flatten().tolist()
