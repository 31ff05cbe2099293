# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding of q and k and the write of k and v into the cache, one program a token.

Reference and rounding rules: :func:`rlinf_phyai.kernels.torch_ops.rope_cache`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rlinf_phyai.kernels.triton_common import rounded, unsupported_reason

__all__ = ["rope_cache", "unsupported_reason"]


@triton.jit
def rotate_halves(first, second, cos, sin, dtype: tl.constexpr):
    """Both halves of a rotated head; products and sums are rounded as the eager actor rounds them."""
    new_first = rounded(first * cos, dtype) - rounded(second * sin, dtype)
    new_second = rounded(second * cos, dtype) + rounded(first * sin, dtype)
    return new_first.to(dtype), new_second.to(dtype)


@triton.jit
def _rope_cache_kernel(
    qkv_ptr, cos_ptr, sin_ptr, starts_ptr, q_ptr, k_ptr, v_ptr, length, slots,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    sample = token // length
    slot = token % length
    if STARTS:
        slot += tl.load(starts_ptr + sample)
    dtype = q_ptr.dtype.element_ty
    width: tl.constexpr = 2 * HALF
    columns = tl.arange(0, HALF_BLOCK)
    inside = columns < HALF
    cos = tl.load(cos_ptr + slot * HALF + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + slot * HALF + columns, mask=inside, other=0.0).to(tl.float32)[None, :]

    source = qkv_ptr + token.to(tl.int64) * ((Q_HEADS + 2 * KV_HEADS) * width)
    heads = tl.arange(0, HEAD_BLOCK)[:, None]
    rotated = (heads < Q_HEADS + KV_HEADS) & inside[None, :]
    offsets = heads * width + columns[None, :]
    first = tl.load(source + offsets, mask=rotated, other=0.0).to(tl.float32)
    second = tl.load(source + offsets + HALF, mask=rotated, other=0.0).to(tl.float32)
    first, second = rotate_halves(first, second, cos, sin, dtype)

    cache_row = (sample.to(tl.int64) * slots + slot) * (KV_HEADS * width)
    q_row = token.to(tl.int64) * (Q_HEADS * width)
    is_q = (heads < Q_HEADS) & inside[None, :]
    is_k = (heads >= Q_HEADS) & rotated
    tl.store(q_ptr + q_row + offsets, first, mask=is_q)
    tl.store(q_ptr + q_row + offsets + HALF, second, mask=is_q)
    tl.store(k_ptr + cache_row + offsets - Q_HEADS * width, first, mask=is_k)
    tl.store(k_ptr + cache_row + offsets - Q_HEADS * width + HALF, second, mask=is_k)

    elements = tl.arange(0, V_BLOCK)
    v = tl.load(source + (Q_HEADS + KV_HEADS) * width + elements, mask=elements < KV_HEADS * width, other=0.0)
    tl.store(v_ptr + cache_row + elements, v, mask=elements < KV_HEADS * width)


def rope_cache(
    qkv: Tensor, cos: Tensor, sin: Tensor, starts: Tensor | None, k_cache: Tensor, v_cache: Tensor, num_q_heads: int
) -> Tensor:
    """See :func:`rlinf_phyai.kernels.torch_ops.rope_cache`. Caches must be contiguous."""
    batch, length, _ = qkv.shape
    _, slots, kv_heads, head_dim = k_cache.shape
    q = qkv.new_empty((batch, length, num_q_heads, head_dim))
    half = head_dim // 2
    _rope_cache_kernel[(batch * length,)](
        qkv, cos, sin, starts if starts is not None else qkv, q if num_q_heads else qkv, k_cache, v_cache, length, slots,
        Q_HEADS=num_q_heads, KV_HEADS=kv_heads, HALF=half,
        HEAD_BLOCK=triton.next_power_of_2(num_q_heads + kv_heads), V_BLOCK=triton.next_power_of_2(kv_heads * head_dim),
        HALF_BLOCK=triton.next_power_of_2(half), STARTS=starts is not None, num_warps=4 if num_q_heads > 2 else 1,
        enable_fp_fusion=False,  # a fused multiply-add would skip the rounding of the products
    )  # fmt: skip
    return q
