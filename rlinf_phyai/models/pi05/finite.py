# SPDX-License-Identifier: Apache-2.0
"""Whether weights are finite: one fused reduction over many tensors, and one wait for its result."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def magnitudes(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Largest absolute values: one float32 vector per dtype, NaN where a tensor holds one. Does not wait for the device."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor.detach())
    return [torch.stack(torch._foreach_norm(group, ord=math.inf)).float() for group in by_dtype.values()]


def all_finite(magnitudes: list[Tensor]) -> bool:
    """Whether every tensor behind :func:`magnitudes` is free of NaN and infinity. Waits for the device, once."""
    return not magnitudes or bool(torch.cat(magnitudes).isfinite().all())


def non_finite(views: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that hold NaN or infinity, for messages; waits once per tensor."""
    return [name for name, view in views.items() if not view.is_meta and not bool(view.isfinite().all())]
