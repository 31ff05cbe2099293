# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, AdaRMSNorm and LayerNorm, each also fused with the residual addition in front of it.

All are bound by memory: a program walks over rows with the weights in registers, so each element is read and written once.
Reference and rounding rules: :mod:`rlinf_phyai.kernels.torch_ops`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rlinf_phyai.kernels.torch_ops import Quantized
from rlinf_phyai.kernels.triton_common import fp8_scaling, multiprocessors, new_quantized, rounded, unsupported_reason

__all__ = [
    "ada_rms_norm",
    "add_ada_rms_norm",
    "add_layer_norm",
    "add_rms_norm",
    "add_rms_norm_fp8",
    "layer_norm",
    "rms_norm",
    "unsupported_reason",
]

_PROGRAMS_PER_SM = 16
"""Bounds the grid: enough 128-thread programs to fill an SM, each then walks over several rows."""


@triton.jit
def _rms_kernel(
    x_ptr, y_ptr, gate_ptr, scale_ptr, shift_ptr, out_ptr, row_scale_ptr, rows, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr, SHIFT: tl.constexpr,
    QUANTIZE: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    dtype = x_ptr.dtype.element_ty
    factor = 1.0 + tl.load(scale_ptr + columns, mask=inside, other=0.0)
    if SHIFT:
        shift = tl.load(shift_ptr + columns, mask=inside, other=0.0)
    if GATE:
        gate = tl.load(gate_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    for row in range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0)):
        here = row * D + columns
        x = tl.load(x_ptr + here, mask=inside, other=0.0).to(tl.float32)
        if ADD:
            y = tl.load(y_ptr + here, mask=inside, other=0.0).to(tl.float32)
            if GATE:
                y = rounded(y * gate, dtype)
            x = rounded(x + y, dtype)
            tl.store(x_ptr + here, x.to(dtype), mask=inside)
        normed = x * tl.math.rsqrt(tl.sum(x * x, 0) / D + eps) * factor
        if SHIFT:
            normed += shift
        if QUANTIZE:
            normed = rounded(normed, dtype)
            factor_fp8, row_scale = fp8_scaling(normed)
            normed *= factor_fp8
            tl.store(row_scale_ptr + row, row_scale)
        tl.store(out_ptr + here, normed.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _layer_norm_kernel(
    x_ptr, y_ptr, weight_ptr, bias_ptr, out_ptr, rows, eps, D: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr
):
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    dtype = x_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    for row in range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0)):
        here = row * D + columns
        x = tl.load(x_ptr + here, mask=inside, other=0.0).to(tl.float32)
        if ADD:
            x = rounded(x + tl.load(y_ptr + here, mask=inside, other=0.0).to(tl.float32), dtype)
            tl.store(x_ptr + here, x.to(dtype), mask=inside)
        centred = tl.where(inside, x - tl.sum(x, 0) / D, 0.0)
        normed = centred * tl.math.rsqrt(tl.sum(centred * centred, 0) / D + eps) * weight + bias
        tl.store(out_ptr + here, normed.to(dtype), mask=inside)


def _geometry(x: Tensor) -> tuple[int, int, int, int]:
    """Rows, row length, block and warps: 16 elements a thread."""
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    return x.numel() // width, width, block, min(max(block // 512, 1), 16)


def _rms(
    x: Tensor, y: Tensor | None, gate: Tensor | None, scale: Tensor, shift: Tensor | None, eps: float,
    quantized: Quantized | None = None,
) -> Tensor:  # fmt: skip
    rows, width, block, warps = _geometry(x)
    out, row_scale = quantized or (x.new_empty(x.shape), scale)
    grid = (min(rows, multiprocessors(x.device) * _PROGRAMS_PER_SM),)
    _rms_kernel[grid](
        x, y if y is not None else x, gate if gate is not None else x, scale, shift if shift is not None else scale, out,
        row_scale, rows, eps, D=width, BLOCK=block, ADD=y is not None, GATE=gate is not None, SHIFT=shift is not None,
        QUANTIZE=quantized is not None, num_warps=warps,
        enable_fp_fusion=False,  # a fused multiply-add would skip the rounding of y * gate
    )  # fmt: skip
    return out


def _layer(x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    rows, width, block, warps = _geometry(x)
    out = x.new_empty(x.shape)
    grid = (min(rows, multiprocessors(x.device) * _PROGRAMS_PER_SM),)
    _layer_norm_kernel[grid](
        x,
        y if y is not None else x,
        weight,
        bias,
        out,
        rows,
        eps,
        D=width,
        BLOCK=block,
        ADD=y is not None,
        num_warps=warps,
    )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See :func:`rlinf_phyai.kernels.torch_ops.rms_norm`."""
    return _rms(x, None, None, weight, None, eps)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See :func:`rlinf_phyai.kernels.torch_ops.add_rms_norm`; updates x in place."""
    return _rms(x, y, None, weight, None, eps)


def add_rms_norm_fp8(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Quantized:
    """See :func:`rlinf_phyai.kernels.torch_ops.add_rms_norm_fp8`; updates x in place."""
    out = new_quantized(x.shape[0], x.shape[1], x.device)
    _rms(x, y, None, weight, None, eps, out)
    return out


def ada_rms_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """See :func:`rlinf_phyai.kernels.torch_ops.ada_rms_norm`."""
    return _rms(x, None, None, scale, shift, eps)


def add_ada_rms_norm(x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """See :func:`rlinf_phyai.kernels.torch_ops.add_ada_rms_norm`; updates x in place."""
    return _rms(x, y, gate, scale, shift, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See :func:`rlinf_phyai.kernels.torch_ops.layer_norm`."""
    return _layer(x, None, weight, bias, eps)


def add_layer_norm(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See :func:`rlinf_phyai.kernels.torch_ops.add_layer_norm`; updates x in place."""
    return _layer(x, y, weight, bias, eps)
