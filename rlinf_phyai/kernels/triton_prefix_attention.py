# SPDX-License-Identifier: Apache-2.0
"""Attention of the prefix with keys and values through the bulk tensor copy engine (compute capability 9.0).

Whole key blocks need no masks; only the last, partial one pays for them. Reference:
:func:`rlinf_phyai.kernels.torch_ops.attention`; softmax and sums are float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rlinf_phyai.kernels import triton_attention
from rlinf_phyai.kernels.triton_attention import online_softmax
from rlinf_phyai.kernels.triton_common import dot_precision, missing_device

__all__ = ["attention", "unsupported_reason"]

_LOG2_E = tl.constexpr(1.4426950408889634)


def unsupported_reason(device: torch.device) -> str | None:
    """Why this kernel cannot run on ``device``, or None."""
    return missing_device(device, 9, "tensor copies need compute capability 9.0")


@triton.jit
def _prefix_attention_kernel(
    q_ptr, k_desc, v_desc, lengths_ptr, out_ptr, rows, length, scale,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    sample, kv_head = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS
    dtype = q_ptr.dtype.element_ty
    keys = tl.load(lengths_ptr + sample)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = kv_head * GROUPS + row % GROUPS
    q_row = (sample.to(tl.int64) * length + row // GROUPS) * (KV_HEADS * GROUPS) + head
    place = q_row[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    present = (row < rows)[:, None]
    q = tl.load(q_ptr + place, mask=present, other=0.0)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    whole = keys // BLOCK_N * BLOCK_N
    for start in range(0, whole, BLOCK_N):
        k = k_desc.load([sample, start, kv_head, 0]).reshape(BLOCK_N, HEAD_DIM)
        scores = tl.dot(q, k.T, input_precision=PRECISION) * (scale * _LOG2_E)
        probabilities, factor, top, total = online_softmax(scores, top, total)
        v = v_desc.load([sample, start, kv_head, 0]).reshape(BLOCK_N, HEAD_DIM)
        acc = tl.dot(probabilities.to(dtype), v, acc * factor[:, None], input_precision=PRECISION)
    if whole < keys:
        valid = whole + tl.arange(0, BLOCK_N) < keys
        k = k_desc.load([sample, whole, kv_head, 0]).reshape(BLOCK_N, HEAD_DIM)
        scores = tl.dot(q, k.T, input_precision=PRECISION) * (scale * _LOG2_E)
        scores = tl.where(valid[None, :], scores, float("-inf"))
        probabilities, factor, top, total = online_softmax(scores, top, total)
        v = v_desc.load([sample, whole, kv_head, 0]).reshape(BLOCK_N, HEAD_DIM)
        v = tl.where(valid[:, None], v, 0.0).to(dtype)  # a masked slot may hold anything
        acc = tl.dot(probabilities.to(dtype), v, acc * factor[:, None], input_precision=PRECISION)
    tl.store(out_ptr + place, (acc / total[:, None]).to(dtype), mask=present)


def attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, block_m: int = 128, block_n: int = 64, warps: int = 8,
    stages: int = 2,
) -> Tensor:  # fmt: skip
    """See :func:`rlinf_phyai.kernels.torch_ops.attention`. The options are tile sizes; odd head widths take the general kernel."""
    batch, length, q_heads, head_dim = q.shape
    kv_heads = k.shape[2]
    if head_dim < 16 or head_dim & (head_dim - 1) or q.element_size() == 4:
        return triton_attention.attention(q, k, v, lengths, scale)
    rows = length * (q_heads // kv_heads)
    out = q.new_empty(q.shape)
    block = [1, block_n, 1, head_dim]
    _prefix_attention_kernel[(triton.cdiv(rows, block_m), batch * kv_heads)](
        q, TensorDescriptor.from_tensor(k, block), TensorDescriptor.from_tensor(v, block), lengths, out, rows, length, scale,
        KV_HEADS=kv_heads, GROUPS=q_heads // kv_heads, HEAD_DIM=head_dim, BLOCK_M=block_m, BLOCK_N=block_n,
        PRECISION=dot_precision(q), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
