# SPDX-License-Identifier: Apache-2.0
"""Products whose last wave of tiles is nearly empty, in two calls: whole waves, then the few rows that are left.

A GEMM on a Hopper GPU gives each multiprocessor one tile of 128 x 256 outputs at a time. 17152 rows x 2048 columns are 1072 tiles,
eight waves of 132 and one of 16, which takes as long as a full one. The rest alone is a small product, for which the library has
kernels that spread over the whole GPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rlinf_phyai.kernels.devices import missing_cuda
from rlinf_phyai.kernels.triton_common import multiprocessors

__all__ = ["linear", "unsupported_reason", "whole_waves"]

_TILE_ROWS, _TILE_COLUMNS = 128, 256
_LARGEST_REST = 0.25
"""Share of a wave: a fuller one is not worth a second launch."""


def unsupported_reason(device: torch.device) -> str | None:
    """Why the split cannot help on ``device``, or None."""
    return missing_cuda(device, "it needs")


def whole_waves(rows: int, columns: int, processors: int) -> int:
    """Leading rows that fill whole waves when the rest would be a nearly empty one, else all rows."""
    blocks, across = -(-rows // _TILE_ROWS), -(-columns // _TILE_COLUMNS)
    waves = blocks * across // processors
    head = waves * processors // across
    rest = (blocks - head) * across
    return head * _TILE_ROWS if head and 0 < rest <= _LARGEST_REST * processors else rows


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See :func:`rlinf_phyai.kernels.torch_ops.linear`."""
    rows = x.shape[0]
    head = whole_waves(rows, weight.shape[0], multiprocessors(x.device))
    if head == rows or bias is not None or x.dim() != 2:
        return F.linear(x, weight, bias)
    out = x.new_empty(rows, weight.shape[0])
    for part, target in ((x[:head], out[:head]), (x[head:], out[head:])):
        torch.mm(part, weight.t(), out=target)
    return out
