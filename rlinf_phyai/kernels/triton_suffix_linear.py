# SPDX-License-Identifier: Apache-2.0
"""GEMMs of the action expert: a few rows against weights that are read once, so the weights' bandwidth is the floor.

A program owns a strip of output columns and, with split-K, a part of the inner dimension. The last program of a strip to
finish adds the parts in fixed order, so results do not depend on timing. Around the product a kernel can also apply

* AdaRMSNorm to its input (every program normalises all rows: cheap for few rows, and one launch less),
* gated GELU to its output (gate and up strips in one program),
* or the gated residual ``x += round(round(product) * gate)``.

Rounding follows :mod:`rlinf_phyai.kernels.torch_ops`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlinf_phyai.kernels.triton_common import dot_precision, gelu_tanh, multiprocessors, rounded, unsupported_reason

__all__ = ["SuffixGemm", "launch", "suffix_gemm_config", "suffix_linear", "unsupported_reason"]

MAX_ROWS = 128
"""Above this many rows cuBLAS is the better choice."""


@triton.jit
def _suffix_gemm_kernel(
    x_ptr, w_ptr, out_ptr, scale_ptr, shift_ptr, gate_ptr, part_ptr, counter_ptr, rows, columns, eps,
    K: tl.constexpr, PART_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    strip, split, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    dtype = x_ptr.dtype.element_ty
    n = strip * BLOCK_N + tl.arange(0, BLOCK_N)
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    k0 = split * PART_K
    inner = tl.arange(0, BLOCK_K)
    n_inside, m_inside = n < columns, m < rows
    w_rows = w_ptr + n[:, None].to(tl.int64) * K
    up_rows = w_rows + columns.to(tl.int64) * K

    x_rows = x_ptr + m[:, None] * K
    if NORM:
        squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
        for k in tl.static_range(0, K, BLOCK_K):
            x = tl.load(x_rows + k + inner[None, :], mask=m_inside[:, None] & (k + inner < K)[None, :], other=0.0)
            squares += x.to(tl.float32) * x.to(tl.float32)
        inverse = tl.math.rsqrt(tl.sum(squares, 1) / K + eps)[:, None]

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(k0, k0 + PART_K, BLOCK_K):
        k_inside = k + inner < K
        x = tl.load(x_rows + k + inner[None, :], mask=m_inside[:, None] & k_inside[None, :], other=0.0)
        if NORM:
            factor = 1.0 + tl.load(scale_ptr + k + inner, mask=k_inside, other=0.0)
            shift = tl.load(shift_ptr + k + inner, mask=k_inside, other=0.0)
            x = (x.to(tl.float32) * inverse * factor[None, :] + shift[None, :]).to(dtype)
        w_inside = n_inside[:, None] & k_inside[None, :]
        w = tl.load(w_rows + k + inner[None, :], mask=w_inside, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
        if GATED:
            up = tl.load(up_rows + k + inner[None, :], mask=w_inside, other=0.0)
            up_acc = tl.dot(x, tl.trans(up), up_acc, input_precision=PRECISION)

    here = m[:, None] * columns + n[None, :]
    inside = m_inside[:, None] & n_inside[None, :]
    if GATED:
        product = rounded(gelu_tanh(rounded(acc, dtype)), dtype) * rounded(up_acc, dtype)
        tl.store(out_ptr + here, product.to(dtype), mask=inside)
    else:
        finish = True
        if SPLITS > 1:
            tl.store(part_ptr + split * rows * columns + here, acc, mask=inside)
            tl.debug_barrier()  # every thread's part is written before the count is raised
            counter = counter_ptr + strip * tl.num_programs(2) + block
            finish = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
            if finish:
                tl.store(counter, 0)  # ready for the next launch
                acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                for part in tl.static_range(SPLITS):
                    parts = part_ptr + part * rows * columns + here
                    acc += tl.load(parts, mask=inside, other=0.0, cache_modifier=".cg")
        if finish:
            if RESIDUAL:
                gate = tl.load(gate_ptr + n, mask=n_inside, other=0.0).to(tl.float32)
                residual = tl.load(out_ptr + here, mask=inside, other=0.0).to(tl.float32)
                acc = residual + rounded(rounded(acc, dtype) * gate[None, :], dtype)
            tl.store(out_ptr + here, acc.to(dtype), mask=inside)


@dataclass(frozen=True)
class SuffixGemm:
    """Tile sizes of one launch."""

    block_m: int
    block_n: int
    block_k: int
    splits: int
    warps: int
    stages: int


def suffix_gemm_config(
    rows: int, columns: int, inner: int, device: torch.device, element_size: int, gated: bool, may_split: bool
) -> SuffixGemm:
    """Fixed choice by shape: strips of 32 columns, then as many splits of the inner dimension as fill the GPU."""
    sms = multiprocessors(device)
    block_m = min(128, max(16, triton.next_power_of_2(rows)))
    few = rows <= 16  # long inner tiles keep more of the weights in flight
    block_k = min((512 if few else 256) // element_size, max(16, triton.next_power_of_2(inner)))
    block_n = min(32, max(16, triton.next_power_of_2(columns)))
    programs = triton.cdiv(columns, block_n) * triton.cdiv(rows, block_m)
    splits = 1
    while (
        may_split
        and splits < (4 if few else 8)
        and programs * splits * 2 <= sms
        and inner % (splits * 2 * block_k) == 0
    ):
        splits *= 2
    stages = 3 if block_m >= 64 or gated or (few and not may_split) else 4
    if few and may_split and inner <= 8 * block_k:
        stages = 2
    return SuffixGemm(block_m, block_n, block_k, splits, warps=4, stages=stages)


def launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    config: SuffixGemm,
    *,
    norm: tuple[Tensor, Tensor, float] | None = None,
    gated: bool = False,
    gate: Tensor | None = None,
    counters: Tensor | None = None,
) -> None:
    """One launch of the kernel.

    Args:
        x: [M, K]; weight: [N, K], or [2N, K] when ``gated``; out: [M, N], the residual stream when ``gate`` is given.
        norm: AdaRMSNorm of x first: scale and shift float32 [K], eps.
        gate: [N] in x's type, gate of the residual.
        counters: int32 zeros, at least one per output tile; needed when ``config.splits > 1``. Left as zeros.
    """
    rows, inner = x.shape
    columns = out.shape[1]
    part = out
    if config.splits > 1:
        assert counters is not None
        part = x.new_empty((config.splits, rows, columns), dtype=torch.float32)
    grid = (triton.cdiv(columns, config.block_n), config.splits, triton.cdiv(rows, config.block_m))
    part_inner = triton.cdiv(triton.cdiv(inner, config.splits), config.block_k) * config.block_k
    _suffix_gemm_kernel[grid](
        x, weight, out, norm[0] if norm else x, norm[1] if norm else x, gate if gate is not None else x, part,
        counters if counters is not None else x, rows, columns, norm[2] if norm else 0.0,
        K=inner, PART_K=part_inner,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SPLITS=config.splits,
        NORM=norm is not None, GATED=gated, RESIDUAL=gate is not None, PRECISION=dot_precision(x),
        num_warps=config.warps, num_stages=config.stages,
        enable_fp_fusion=False,  # a fused multiply-add would skip the rounding of product * gate
    )  # fmt: skip


def suffix_linear(x: Tensor, weight: Tensor) -> Tensor:
    """See :func:`rlinf_phyai.kernels.torch_ops.suffix_linear`; cuBLAS above 128 rows."""
    rows, inner = x.shape
    columns = weight.shape[0]
    if rows > MAX_ROWS:
        return torch.nn.functional.linear(x, weight)
    out = x.new_empty((rows, columns))
    launch(x, weight, out, suffix_gemm_config(rows, columns, inner, x.device, x.element_size(), False, False))
    return out
