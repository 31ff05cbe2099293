# SPDX-License-Identifier: Apache-2.0
"""Bidirectional attention over the first ``lengths[b]`` keys, with grouped query heads folded into the query rows.

All query heads of one KV head read the same keys, so ``L x groups`` rows share one pass over them. With few rows (the action
suffix) the keys are split over programs and a second kernel joins the parts in fixed order, which keeps results repeatable.
Reference: :func:`rlinf_phyai.kernels.torch_ops.attention`; softmax and sums are float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlinf_phyai.kernels.triton_common import dot_precision, multiprocessors, unsupported_reason

__all__ = ["attention", "suffix_attention", "unsupported_reason"]

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def online_softmax(scores, top, total):
    """One step of the running softmax in base 2: probabilities, factor for old sums, new maximum and new total."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    probabilities = tl.exp2(scores - new_top[:, None])
    factor = tl.exp2(top - new_top)
    return probabilities, factor, new_top, total * factor + tl.sum(probabilities, 1)


@triton.jit
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, lengths_ptr, out_ptr, top_ptr, total_ptr, rows, length, slots, scale,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(1)
    sample = tl.program_id(2) // KV_HEADS
    kv_head = tl.program_id(2) % KV_HEADS
    dtype = q_ptr.dtype.element_ty
    keys = tl.load(lengths_ptr + sample)
    part = tl.cdiv(tl.cdiv(keys, SPLITS), BLOCK_N) * BLOCK_N
    begin = split * part
    end = tl.minimum(begin + part, keys)

    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, HEAD_BLOCK)
    valid = (row < rows)[:, None] & (column < HEAD_DIM)[None, :]
    head = kv_head * GROUPS + row % GROUPS
    q_row = (sample.to(tl.int64) * length + row // GROUPS) * (KV_HEADS * GROUPS) + head
    q = tl.load(q_ptr + q_row[:, None] * HEAD_DIM + column[None, :], mask=valid, other=0.0)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_BLOCK], tl.float32)
    cache = (sample.to(tl.int64) * slots * KV_HEADS + kv_head) * HEAD_DIM
    for start in range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        here = cache + key[:, None] * (KV_HEADS * HEAD_DIM) + column[None, :]
        loaded = (key < end)[:, None] & (column < HEAD_DIM)[None, :]
        k = tl.load(k_ptr + here, mask=loaded, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * _LOG2_E)
        scores = tl.where((key < end)[None, :], scores, float("-inf"))
        probabilities, factor, top, total = online_softmax(scores, top, total)
        v = tl.load(v_ptr + here, mask=loaded, other=0.0)
        acc = tl.dot(probabilities.to(dtype), v, acc * factor[:, None], input_precision=PRECISION)

    if SPLITS == 1:
        out = (acc / total[:, None]).to(dtype)
        tl.store(out_ptr + q_row[:, None] * HEAD_DIM + column[None, :], out, mask=valid)
    else:
        part_row = (tl.program_id(2).to(tl.int64) * rows + row) * SPLITS + split
        tl.store(top_ptr + part_row, top, mask=row < rows)
        tl.store(total_ptr + part_row, total, mask=row < rows)
        tl.store(out_ptr + part_row[:, None] * HEAD_DIM + column[None, :], acc, mask=valid)


@triton.jit
def _join_kernel(
    part_ptr, top_ptr, total_ptr, out_ptr, rows, length,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    sample = tl.program_id(1) // KV_HEADS
    kv_head = tl.program_id(1) % KV_HEADS
    first = (tl.program_id(1).to(tl.int64) * rows + row) * SPLITS
    column = tl.arange(0, HEAD_BLOCK)
    inside = column < HEAD_DIM
    top = tl.load(top_ptr + first)
    for split in tl.static_range(1, SPLITS):
        top = tl.maximum(top, tl.load(top_ptr + first + split))
    total = 0.0
    acc = tl.zeros([HEAD_BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        weight = tl.exp2(tl.load(top_ptr + first + split) - top)  # 0 for a part without keys
        total += weight * tl.load(total_ptr + first + split)
        acc += weight * tl.load(part_ptr + (first + split) * HEAD_DIM + column, mask=inside, other=0.0)
    q_row = (sample.to(tl.int64) * length + row // GROUPS) * (KV_HEADS * GROUPS) + kv_head * GROUPS + row % GROUPS
    out = (acc / total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + q_row * HEAD_DIM + column, out, mask=inside)


def _run(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, block_m: int, block_n: int, splits: int, warps: int
) -> Tensor:
    batch, length, q_heads, head_dim = q.shape
    slots, kv_heads = k.shape[1], k.shape[2]
    groups = q_heads // kv_heads
    rows, planes = length * groups, batch * kv_heads
    head_block = max(16, triton.next_power_of_2(head_dim))
    out = q.new_empty(q.shape)
    parts, top, total = out, out, out
    if splits > 1:
        parts = q.new_empty((planes * rows * splits, head_dim), dtype=torch.float32)
        top, total = q.new_empty((2, planes * rows * splits), dtype=torch.float32)
    _attention_kernel[(triton.cdiv(rows, block_m), splits, planes)](
        q, k, v, lengths, parts, top, total, rows, length, slots, scale,
        KV_HEADS=kv_heads, GROUPS=groups, HEAD_DIM=head_dim, HEAD_BLOCK=head_block, BLOCK_M=block_m, BLOCK_N=block_n,
        SPLITS=splits, PRECISION=dot_precision(q), num_warps=warps, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        _join_kernel[(rows, planes)](
            parts, top, total, out, rows, length,
            KV_HEADS=kv_heads, GROUPS=groups, HEAD_DIM=head_dim, HEAD_BLOCK=head_block, SPLITS=splits, num_warps=2,
        )  # fmt: skip
    return out


def attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """See :func:`rlinf_phyai.kernels.torch_ops.attention`. Any lengths, no host synchronisation."""
    if q.element_size() == 4:  # float32 tiles are twice as large
        return _run(q, k, v, lengths, scale, block_m=32, block_n=32, splits=1, warps=4)
    return _run(q, k, v, lengths, scale, block_m=128, block_n=64, splits=1, warps=8)


def suffix_geometry(
    rows: int, planes: int, keys: int, element_size: int, device: torch.device
) -> tuple[int, int, int, int]:
    """BLOCK_M, BLOCK_N, splits, warps for few query rows.

    One or two samples: small row blocks and many splits, so that the work spreads over the GPU. More samples: all rows of a
    sample in one program, because every further row block reads the keys again.
    """
    if element_size == 4 or planes <= 2:
        block_m, block_n, warps = 16, 64, 4
    else:
        block_m, block_n, warps = min(128, max(16, triton.next_power_of_2(rows))), 64, 8
    programs = planes * triton.cdiv(rows, block_m)
    splits = min(triton.cdiv(keys, block_n), max(1, multiprocessors(device) // programs), 16)
    return block_m, block_n, splits, warps


def suffix_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """The same for the action suffix: few queries over many keys."""
    batch, length, q_heads, _ = q.shape
    kv_heads = k.shape[2]
    block_m, block_n, splits, warps = suffix_geometry(
        length * q_heads // kv_heads, batch * kv_heads, k.shape[1], q.element_size(), q.device
    )
    return _run(q, k, v, lengths, scale, block_m, block_n, splits, warps)
