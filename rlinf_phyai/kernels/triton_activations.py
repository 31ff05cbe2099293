# SPDX-License-Identifier: Apache-2.0
"""Gated GELU at the memory floor, and the vision MLP's first GEMM with its activation.

Reference and rounding rules: :mod:`rlinf_phyai.kernels.torch_ops`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from rlinf_phyai.kernels.triton_common import gelu_tanh, rounded, unsupported_reason

__all__ = ["gated_gelu", "linear_gelu", "unsupported_reason"]

_BLOCK = 2048


@triton.jit
def _gated_gelu_kernel(gate_up_ptr, out_ptr, width, blocks, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    columns = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    dtype = out_ptr.dtype.element_ty
    start = gate_up_ptr + row * (2 * width)
    gate = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + width + columns, mask=inside, other=0.0).to(tl.float32)
    product = rounded(gelu_tanh(gate), dtype) * up
    tl.store(out_ptr + row * width + columns, product.to(dtype), mask=inside)


@triton.jit
def _gelu_kernel(x_ptr, elements, BLOCK: tl.constexpr):
    here = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = here < elements
    x = tl.load(x_ptr + here, mask=inside, other=0.0).to(tl.float32)
    tl.store(x_ptr + here, gelu_tanh(x).to(x_ptr.dtype.element_ty), mask=inside)


def gated_gelu(gate_up: Tensor) -> Tensor:
    """See :func:`rlinf_phyai.kernels.torch_ops.gated_gelu`."""
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], width))
    block = min(_BLOCK, triton.next_power_of_2(width))
    blocks = triton.cdiv(width, block)
    rows = out.numel() // width
    _gated_gelu_kernel[(rows * blocks,)](
        gate_up, out, width, blocks, BLOCK=block, num_warps=min(max(block // 256, 1), 8)
    )
    return out


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """See :func:`rlinf_phyai.kernels.torch_ops.linear_gelu`; the GEMM's result is rounded, then activated in place."""
    out = F.linear(x, weight, bias)
    elements = out.numel()
    _gelu_kernel[(triton.cdiv(elements, _BLOCK),)](out, elements, BLOCK=_BLOCK, num_warps=4)
    return out


def linear_gelu_epilogue(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The same with the activation inside the GEMM (cuBLASLt): saves a pass, and the rounding between GEMM and GELU."""
    return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
