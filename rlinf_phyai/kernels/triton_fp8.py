# SPDX-License-Identifier: Apache-2.0
"""Rows to FP8 without a pass of their own: inside the norm, inside the gated GELU, and for weights.

Reference and rounding rules: :mod:`rlinf_phyai.kernels.torch_ops`. Needs compute capability 9.0, whose tensor cores multiply FP8
at twice the rate of bfloat16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlinf_phyai.kernels.torch_ops import Quantized
from rlinf_phyai.kernels.triton_common import fp8_scaling, gelu_tanh, missing_device, new_quantized, rounded
from rlinf_phyai.kernels.triton_norms import add_rms_norm_fp8

__all__ = ["add_rms_norm_fp8", "gated_gelu_fp8", "quantize_rows", "unsupported_reason"]


def unsupported_reason(device: torch.device) -> str | None:
    """Why FP8 kernels cannot run on ``device``, or None."""
    return missing_device(device, "FP8 products need", 9, " (Hopper)")


@triton.jit
def _quantize_kernel(x_ptr, out_ptr, scale_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    factor, scale = fp8_scaling(x)
    tl.store(out_ptr + row * width + columns, (x * factor).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _gated_gelu_fp8_kernel(gate_up_ptr, out_ptr, scale_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    dtype = gate_up_ptr.dtype.element_ty
    start = gate_up_ptr + row * (2 * width)
    gate = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + width + columns, mask=inside, other=0.0).to(tl.float32)
    product = (rounded(gelu_tanh(gate), dtype) * up).to(dtype)  # kept in 16 bits until the row's maximum is known
    factor, scale = fp8_scaling(product)
    quantized = (product.to(tl.float32) * factor).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + columns, quantized, mask=inside)
    tl.store(scale_ptr + row, scale)


def _geometry(width: int, warps: int) -> dict[str, int]:
    """Block for a whole row, and at most ``warps`` warps."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), warps)}


def quantize_rows(x: Tensor, warps: int = 16, registers: int | None = 64) -> Quantized:
    """See :func:`rlinf_phyai.kernels.torch_ops.quantize_rows`. The options bound what a program takes: two must fit a multiprocessor."""
    rows, width = x.shape
    out = new_quantized(rows, width, x.device)
    _quantize_kernel[(rows,)](x, *out, width, **_geometry(width, warps), maxnreg=registers)
    return out


def gated_gelu_fp8(gate_up: Tensor, warps: int = 16, registers: int | None = 64) -> Quantized:
    """Gated GELU [M, 2F] -> [M, F], quantised: one read of the input, one write of a quarter of its size."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = new_quantized(rows, width, gate_up.device)
    _gated_gelu_fp8_kernel[(rows,)](gate_up, *out, width, **_geometry(width, warps), maxnreg=registers)
    return out
