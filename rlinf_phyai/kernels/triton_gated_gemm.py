# SPDX-License-Identifier: Apache-2.0
"""``gated_gelu(x @ w.T)`` of the prefix MLP in one persistent kernel, so the [M, 2F] intermediate never reaches memory.

A program computes the gate and the up columns of the same output tile. Operands arrive through the bulk tensor copy engine,
so rows must be a multiple of 16 bytes. Both products are rounded to x's type before the activation, as the unfused operations
leave them. Needs compute capability 9.0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rlinf_phyai.kernels.triton_activations import gated_gelu
from rlinf_phyai.kernels.triton_common import gelu_tanh, missing_device, multiprocessors, rounded

__all__ = ["fused_linear_gated_gelu", "linear_gated_gelu", "unsupported_reason"]

FUSED_ROWS = 2048
"""Below this many rows the library's GEMM and a separate activation are as fast or faster."""


def unsupported_reason(device: torch.device) -> str | None:
    """Why this kernel cannot run on ``device``, or None."""
    return missing_device(device, "tensor copies need", 9)


@triton.jit
def _gated_gemm_kernel(
    x_desc, w_desc, out_desc, rows, columns,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    FLATTEN: tl.constexpr, SPECIALIZE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = x_desc.dtype
    blocks_m, blocks_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    for tile in tl.range(
        tl.program_id(0), blocks_m * blocks_n, tl.num_programs(0), flatten=FLATTEN, warp_specialize=SPECIALIZE
    ):
        # GROUP row blocks share the columns they load, which keeps the weights' tiles in the L2 cache.
        group = tile // (GROUP * blocks_n)
        height = tl.minimum(blocks_m - group * GROUP, GROUP)
        m = (group * GROUP + (tile % (GROUP * blocks_n)) % height) * BLOCK_M
        n = (tile % (GROUP * blocks_n)) // height * BLOCK_N
        if WIDE:
            both = tl.zeros([BLOCK_M, 2 * BLOCK_N], tl.float32)
            for k in range(0, K, BLOCK_K):
                x = x_desc.load([m, k])
                w = w_desc.load([0, n, k]).reshape(2 * BLOCK_N, BLOCK_K)
                both = tl.dot(x, w.T, both)
            gate, up = tl.split(tl.permute(tl.reshape(both, BLOCK_M, 2, BLOCK_N), 0, 2, 1))
        else:
            gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for k in range(0, K, BLOCK_K):
                x = x_desc.load([m, k])
                gate = tl.dot(x, w_desc.load([0, n, k]).reshape(BLOCK_N, BLOCK_K).T, gate)
                up = tl.dot(x, w_desc.load([1, n, k]).reshape(BLOCK_N, BLOCK_K).T, up)
        product = rounded(gelu_tanh(rounded(gate, dtype)), dtype) * rounded(up, dtype)
        out_desc.store([m, n], product.to(dtype))


def fused_linear_gated_gelu(
    x: Tensor, gate_up: Tensor, block_m: int = 128, block_n: int = 128, block_k: int = 64, group: int = 16, warps: int = 8,
    stages: int = 4, flatten: bool = False, specialize: bool = False, wide: bool = True,
) -> Tensor:  # fmt: skip
    """``gated_gelu(linear(x, gate_up))``: x [M, K], gate_up [2F, K] -> [M, F]. The options are tile sizes."""
    rows, inner = x.shape
    columns = gate_up.shape[0] // 2
    out = x.new_empty((rows, columns))
    x_desc = TensorDescriptor.from_tensor(x, [block_m, block_k])
    w_block = [2 if wide else 1, block_n, block_k]
    w_desc = TensorDescriptor.from_tensor(gate_up.view(2, columns, inner), w_block)
    out_desc = TensorDescriptor.from_tensor(out, [block_m, block_n])
    tiles = triton.cdiv(rows, block_m) * triton.cdiv(columns, block_n)
    _gated_gemm_kernel[(min(tiles, multiprocessors(x.device)),)](
        x_desc, w_desc, out_desc, rows, columns,
        K=inner, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP=group, FLATTEN=flatten, SPECIALIZE=specialize,
        WIDE=wide, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def linear_gated_gelu(x: Tensor, gate_up: Tensor) -> Tensor:
    """See :func:`rlinf_phyai.kernels.torch_ops.linear_gated_gelu`; one kernel for many rows, two for few."""
    if x.shape[0] < FUSED_ROWS:
        return gated_gelu(F.linear(x, gate_up))
    return fused_linear_gated_gelu(x, gate_up)
