# SPDX-License-Identifier: Apache-2.0
"""One layer of the action expert in five launches, for the few rows of one to three observations.

With so few rows, launches and weight reads are what time goes to: AdaRMSNorm runs inside the GEMMs that need it, gated
GELU and gated residuals in their epilogues. More rows go through the chain of single operations, whose products cuBLAS
does faster. Rotary embedding happens inside the attention kernel, which reads the prefix's keys from the cache and the
suffix's own from the projection, so nothing of the suffix is written to the cache.
Reference: :func:`rlinf_phyai.kernels.expert_layer.expert_layer`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlinf_phyai.kernels import expert_layer as chained
from rlinf_phyai.kernels.triton_attention import online_softmax, suffix_geometry
from rlinf_phyai.kernels.triton_common import dot_precision, unsupported_reason
from rlinf_phyai.kernels.triton_rope import rotate_halves
from rlinf_phyai.kernels.triton_suffix_linear import launch, suffix_gemm_config

__all__ = ["expert_layer", "new_counters", "suffix_rope_attention", "unsupported_reason"]

FUSED_ROWS = 32
"""Above this many rows the chain of single operations is faster."""
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rotated_rows(ptr, offsets, inside, cos, sin, HALF: tl.constexpr, dtype: tl.constexpr):
    first = tl.load(ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(ptr + offsets + HALF, mask=inside, other=0.0).to(tl.float32)
    return rotate_halves(first, second, cos, sin, dtype)


@triton.jit
def _rope_attention_kernel(
    qkv_ptr, cos_ptr, sin_ptr, starts_ptr, k_ptr, v_ptr, out_ptr, part_ptr, top_ptr, total_ptr, counter_ptr, slots, scale,
    LENGTH: tl.constexpr, KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SUFFIX_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    HEAD_DIM: tl.constexpr = 2 * HALF
    TOKEN: tl.constexpr = (KV_HEADS * GROUPS + 2 * KV_HEADS) * HEAD_DIM
    ROWS: tl.constexpr = LENGTH * GROUPS
    split = tl.program_id(1)
    sample = (tl.program_id(2) // KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(2) % KV_HEADS
    dtype = out_ptr.dtype.element_ty
    prefix = tl.load(starts_ptr + sample)

    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    half = tl.arange(0, HALF_BLOCK)
    column = tl.arange(0, HEAD_BLOCK)
    in_half, in_head, in_rows = half < HALF, column < HEAD_DIM, row < ROWS
    token, head = row // GROUPS, kv_head * GROUPS + row % GROUPS
    source = qkv_ptr + sample * (LENGTH * TOKEN)
    valid = in_rows[:, None] & in_half[None, :]
    angle = (prefix + token)[:, None] * HALF + half[None, :]
    cos = tl.load(cos_ptr + angle, mask=valid, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=valid, other=0.0).to(tl.float32)
    offsets = (token * TOKEN + head * HEAD_DIM)[:, None] + half[None, :]
    q1, q2 = _rotated_rows(source, offsets, valid, cos, sin, HALF, dtype)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_BLOCK], tl.float32)
    part = tl.cdiv(tl.cdiv(prefix, SPLITS), BLOCK_N) * BLOCK_N
    begin = split * part
    end = tl.minimum(begin + part, prefix)
    cache = (sample * slots * KV_HEADS + kv_head) * HEAD_DIM
    for start in range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        k_here = cache + key[:, None] * (KV_HEADS * HEAD_DIM) + half[None, :]
        k_loaded = (key < end)[:, None] & in_half[None, :]
        k1 = tl.load(k_ptr + k_here, mask=k_loaded, other=0.0)
        k2 = tl.load(k_ptr + k_here + HALF, mask=k_loaded, other=0.0)
        scores = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
        scores = tl.dot(q2, tl.trans(k2), scores, input_precision=PRECISION) * (scale * _LOG2_E)
        scores = tl.where((key < end)[None, :], scores, float("-inf"))
        probabilities, factor, top, total = online_softmax(scores, top, total)
        v_here = cache + key[:, None] * (KV_HEADS * HEAD_DIM) + column[None, :]
        v = tl.load(v_ptr + v_here, mask=(key < end)[:, None] & in_head[None, :], other=0.0)
        acc = tl.dot(probabilities.to(dtype), v, acc * factor[:, None], input_precision=PRECISION)

    if split == SPLITS - 1:  # the suffix's own keys and values
        key = tl.arange(0, SUFFIX_BLOCK)
        k_loaded = (key < LENGTH)[:, None] & in_half[None, :]
        k_angle = (prefix + key)[:, None] * HALF + half[None, :]
        k_cos = tl.load(cos_ptr + k_angle, mask=k_loaded, other=0.0).to(tl.float32)
        k_sin = tl.load(sin_ptr + k_angle, mask=k_loaded, other=0.0).to(tl.float32)
        k_offsets = (key * TOKEN + (KV_HEADS * GROUPS + kv_head) * HEAD_DIM)[:, None] + half[None, :]
        k1, k2 = _rotated_rows(source, k_offsets, k_loaded, k_cos, k_sin, HALF, dtype)
        scores = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
        scores = tl.dot(q2, tl.trans(k2), scores, input_precision=PRECISION) * (scale * _LOG2_E)
        scores = tl.where((key < LENGTH)[None, :], scores, float("-inf"))
        probabilities, factor, top, total = online_softmax(scores, top, total)
        v_offsets = (key * TOKEN + (KV_HEADS * GROUPS + KV_HEADS + kv_head) * HEAD_DIM)[:, None] + column[None, :]
        v = tl.load(source + v_offsets, mask=(key < LENGTH)[:, None] & in_head[None, :], other=0.0)
        acc = tl.dot(probabilities.to(dtype), v, acc * factor[:, None], input_precision=PRECISION)

    out_rows = out_ptr + ((sample * LENGTH + token) * (KV_HEADS * GROUPS) + head)[:, None] * HEAD_DIM + column[None, :]
    inside = in_rows[:, None] & in_head[None, :]
    finish = True
    if SPLITS > 1:
        part_row = (tl.program_id(2).to(tl.int64) * ROWS + row) * SPLITS
        tl.store(top_ptr + part_row + split, top, mask=in_rows)
        tl.store(total_ptr + part_row + split, total, mask=in_rows)
        tl.store(part_ptr + (part_row + split)[:, None] * HEAD_DIM + column[None, :], acc, mask=inside)
        tl.debug_barrier()  # every thread's part is written before the count is raised
        counter = counter_ptr + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        finish = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
        if finish:
            tl.store(counter, 0)  # ready for the next launch
            top = tl.full([BLOCK_M], float("-inf"), tl.float32)
            for other in tl.static_range(SPLITS):
                top = tl.maximum(
                    top, tl.load(top_ptr + part_row + other, mask=in_rows, other=0.0, cache_modifier=".cg")
                )
            total = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, HEAD_BLOCK], tl.float32)
            for other in tl.static_range(SPLITS):
                their_top = tl.load(top_ptr + part_row + other, mask=in_rows, other=0.0, cache_modifier=".cg")
                weight = tl.exp2(their_top - top)  # 0 for a part without keys
                their_total = tl.load(total_ptr + part_row + other, mask=in_rows, other=1.0, cache_modifier=".cg")
                total += weight * their_total
                theirs = part_ptr + (part_row + other)[:, None] * HEAD_DIM + column[None, :]
                acc += weight[:, None] * tl.load(theirs, mask=inside, other=0.0, cache_modifier=".cg")
    if finish:
        tl.store(out_rows, (acc / total[:, None]).to(dtype), mask=inside)


def new_counters(device: torch.device) -> Tensor:
    """Scratch that the split kernels of one stream share: zeros before and after every launch."""
    return torch.zeros(8192, dtype=torch.int32, device=device)


def suffix_rope_attention(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    starts: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_q_heads: int,
    scale: float,
    counters: Tensor,
) -> Tensor:
    """``rope_cache`` and ``suffix_attention`` in one launch, without writing the cache.

    Args:
        qkv: [B, L, (num_q_heads + 2 * kv_heads) * hd]; starts: int32 [B], prefix keys of each sample.
        counters: see :func:`new_counters`.

    Returns:
        [B * L, num_q_heads * hd].
    """
    batch, length, _ = qkv.shape
    _, slots, kv_heads, head_dim = k_cache.shape
    groups = num_q_heads // kv_heads
    rows, planes = length * groups, batch * kv_heads
    block_m, block_n, splits, warps = suffix_geometry(rows, planes, slots, qkv.element_size(), qkv.device)
    blocks = triton.cdiv(rows, block_m)
    splits = splits if planes * blocks <= counters.numel() else 1
    out = qkv.new_empty((batch * length, num_q_heads * head_dim))
    parts, top, total = out, out, out
    if splits > 1:
        parts = qkv.new_empty((planes * rows * splits, head_dim), dtype=torch.float32)
        top, total = qkv.new_empty((2, planes * rows * splits), dtype=torch.float32)
    half = head_dim // 2
    _rope_attention_kernel[(blocks, splits, planes)](
        qkv, cos, sin, starts, k_cache, v_cache, out, parts, top, total, counters, slots, scale,
        LENGTH=length, KV_HEADS=kv_heads, GROUPS=groups, HALF=half, HALF_BLOCK=max(16, triton.next_power_of_2(half)),
        HEAD_BLOCK=max(16, triton.next_power_of_2(head_dim)), BLOCK_M=block_m, BLOCK_N=block_n,
        SUFFIX_BLOCK=max(16, triton.next_power_of_2(length)), SPLITS=splits, PRECISION=dot_precision(qkv),
        num_warps=warps, num_stages=2,
        enable_fp_fusion=False,  # a fused multiply-add would skip the rounding of the rotation's products
    )  # fmt: skip
    return out


def expert_layer(
    x: Tensor,
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    before_attention: tuple[Tensor, Tensor, Tensor],
    before_mlp: tuple[Tensor, Tensor, Tensor],
    rotary: tuple[Tensor, Tensor],
    starts: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_q_heads: int,
    scale: float,
    eps: float,
    counters: Tensor,
    kernels: Any = None,
) -> None:
    """See :func:`rlinf_phyai.kernels.expert_layer.expert_layer`; ``kernels`` serve batches of more rows.

    Args:
        counters: int32 zeros, see :func:`new_counters`.
    """
    rows, width = x.shape
    if rows > FUSED_ROWS:
        args = (rotary, starts, k_cache, v_cache, num_q_heads, scale, eps, counters)
        return chained.expert_layer(x, weights, before_attention, before_mlp, *args, kernels=kernels)
    qkv_weight, o_weight, gate_up_weight, down_weight = weights
    batch = starts.shape[0]
    device, element_size = x.device, x.element_size()

    def residual(a: Tensor, weight: Tensor, gate: Tensor) -> None:
        config = suffix_gemm_config(rows, width, weight.shape[1], device, element_size, gated=False, may_split=True)
        launch(a, weight, x, config, gate=gate, counters=counters)

    def normed(weight: Tensor, parts: tuple[Tensor, Tensor, Tensor], gated: bool) -> Tensor:
        out = x.new_empty((rows, weight.shape[0] // 2 if gated else weight.shape[0]))
        config = suffix_gemm_config(rows, out.shape[1], width, device, element_size, gated=gated, may_split=False)
        launch(x, weight, out, config, norm=(parts[0], parts[1], eps), gated=gated)
        return out

    qkv = normed(qkv_weight, before_attention, gated=False).view(batch, rows // batch, -1)
    attended = suffix_rope_attention(qkv, *rotary, starts, k_cache, v_cache, num_q_heads, scale, counters)
    residual(attended, o_weight, before_attention[2])
    residual(normed(gate_up_weight, before_mlp, gated=True), down_weight, before_mlp[2])
