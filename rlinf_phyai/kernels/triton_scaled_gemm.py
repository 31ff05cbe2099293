# SPDX-License-Identifier: Apache-2.0
"""FP8 product with a scale per row in one persistent kernel (compute capability 9.0).

Reference: :func:`rlinf_phyai.kernels.torch_ops.linear_fp8`. Operands arrive through the bulk tensor copy engine.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rlinf_phyai.kernels.torch_ops import Quantized
from rlinf_phyai.kernels.triton_common import multiprocessors
from rlinf_phyai.kernels.triton_fp8 import unsupported_reason

__all__ = ["linear_fp8", "unsupported_reason"]


@triton.jit
def _scaled_gemm_kernel(
    x_desc, w_desc, out_desc, x_scale_ptr, w_scale_ptr, rows, columns,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
):  # fmt: skip
    blocks_m, blocks_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    for tile in tl.range(tl.program_id(0), blocks_m * blocks_n, tl.num_programs(0), flatten=FLATTEN):
        # GROUP row blocks share the columns they load, which keeps the weights' tiles in the L2 cache.
        group = tile // (GROUP * blocks_n)
        height = tl.minimum(blocks_m - group * GROUP, GROUP)
        m = (group * GROUP + (tile % (GROUP * blocks_n)) % height) * BLOCK_M
        n = (tile % (GROUP * blocks_n)) // height * BLOCK_N
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, K, BLOCK_K):
            total = tl.dot(x_desc.load([m, k]), w_desc.load([n, k]).T, total)
        row, column = m + tl.arange(0, BLOCK_M), n + tl.arange(0, BLOCK_N)
        total *= tl.load(x_scale_ptr + row, mask=row < rows, other=0.0)[:, None]
        total *= tl.load(w_scale_ptr + column, mask=column < columns, other=0.0)[None, :]
        out_desc.store([m, n], total.to(out_desc.dtype))


def linear_fp8(
    x: Quantized, weight: Quantized, dtype: torch.dtype, block_m: int = 128, block_n: int = 256, block_k: int = 128,
    group: int = 8, warps: int = 8, stages: int = 3, flatten: bool = False,
) -> Tensor:  # fmt: skip
    """See :func:`rlinf_phyai.kernels.torch_ops.linear_fp8`. The options are tile sizes."""
    (rows, inner), columns = x.values.shape, weight.values.shape[0]
    out = torch.empty(rows, columns, dtype=dtype, device=x.values.device)
    tiles = triton.cdiv(rows, block_m) * triton.cdiv(columns, block_n)
    _scaled_gemm_kernel[(min(tiles, multiprocessors(out.device)),)](
        TensorDescriptor.from_tensor(x.values, [block_m, block_k]),
        TensorDescriptor.from_tensor(weight.values, [block_n, block_k]),
        TensorDescriptor.from_tensor(out, [block_m, block_n]),
        x.scale, weight.scale, rows, columns,
        K=inner, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP=group, FLATTEN=flatten, num_warps=warps,
        num_stages=stages,
    )  # fmt: skip
    return out
