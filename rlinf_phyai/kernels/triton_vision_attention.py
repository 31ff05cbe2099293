# SPDX-License-Identifier: Apache-2.0
"""Full attention inside each image, for heads whose width is no power of two.

SigLIP's heads are 72 wide. Kernels that pad them to 96 or 128 spend a quarter to half of their work on zeros; here a head is 64
columns and a small rest. Reference: :func:`rlinf_phyai.kernels.torch_ops.vision_attention`; softmax and sums are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rlinf_phyai.kernels.triton_attention import online_softmax
from rlinf_phyai.kernels.triton_common import dot_precision, unsupported_reason

__all__ = ["unsupported_reason", "vision_attention"]

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _vision_attention_kernel(
    qkv_ptr, out_ptr, length, scale,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    image, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    token: tl.constexpr = 3 * HEADS * HEAD_DIM
    part: tl.constexpr = HEADS * HEAD_DIM
    dtype = qkv_ptr.dtype.element_ty
    base = qkv_ptr + image.to(tl.int64) * length * token + head * HEAD_DIM
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    main, rest = tl.arange(0, MAIN), MAIN + tl.arange(0, REST)
    present = (row < length)[:, None]
    q = tl.load(base + row[:, None] * token + main[None, :], mask=present & (main < HEAD_DIM)[None, :], other=0.0)
    q_rest = tl.load(base + row[:, None] * token + rest[None, :], mask=present & (rest < HEAD_DIM)[None, :], other=0.0)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, MAIN], tl.float32)
    out_rest = tl.zeros([BLOCK_M, REST], tl.float32)
    for start in range(0, length, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        here, there = base + part + key[:, None] * token, (key < length)[:, None]
        in_main, in_rest = there & (main < HEAD_DIM)[None, :], there & (rest < HEAD_DIM)[None, :]
        k = tl.load(here + main[None, :], mask=in_main, other=0.0)
        k_rest = tl.load(here + rest[None, :], mask=in_rest, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision=PRECISION) * (scale * _LOG2_E)
        scores = tl.where((key < length)[None, :], scores, float("-inf"))
        probabilities, factor, top, total = online_softmax(scores, top, total)
        v = tl.load(here + part + main[None, :], mask=in_main, other=0.0)
        v_rest = tl.load(here + part + rest[None, :], mask=in_rest, other=0.0)
        rounded = probabilities.to(dtype)
        out = tl.dot(rounded, v, out * factor[:, None], input_precision=PRECISION)
        out_rest = tl.dot(rounded, v_rest, out_rest * factor[:, None], input_precision=PRECISION)

    target = out_ptr + (image.to(tl.int64) * length + row[:, None]) * part + head * HEAD_DIM
    share = 1.0 / total[:, None]
    tl.store(target + main[None, :], (out * share).to(dtype), mask=present & (main < HEAD_DIM)[None, :])
    tl.store(target + rest[None, :], (out_rest * share).to(dtype), mask=present & (rest < HEAD_DIM)[None, :])


def vision_attention(
    qkv: Tensor, scale: float, block_m: int = 64, block_n: int = 64, warps: int = 4, stages: int = 2
) -> Tensor:
    """See :func:`rlinf_phyai.kernels.torch_ops.vision_attention`. The options are tile sizes."""
    images, length, _, heads, head_dim = qkv.shape
    main = max(16, 1 << (head_dim.bit_length() - 1))
    rest = max(16, triton.next_power_of_2(max(head_dim - main, 1)))
    if qkv.element_size() == 4:  # float32 tiles are twice as large
        block_m, block_n = 32, 32
    out = qkv.new_empty(images, length, heads * head_dim)
    _vision_attention_kernel[(triton.cdiv(length, block_m), images * heads)](
        qkv, out, length, scale,
        HEADS=heads, HEAD_DIM=head_dim, MAIN=main, REST=rest, BLOCK_M=block_m, BLOCK_N=block_n,
        PRECISION=dot_precision(qkv), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
