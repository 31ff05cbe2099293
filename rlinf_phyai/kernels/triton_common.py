# SPDX-License-Identifier: Apache-2.0
"""What the Triton kernels share: where they run, and the arithmetic of the actor's activation functions."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from rlinf_phyai.kernels import torch_ops
from rlinf_phyai.kernels.devices import missing_cuda


def missing_device(
    device: torch.device, needs: str = "Triton kernels need", capability: int = 0, note: str = ""
) -> str | None:
    """:func:`rlinf_phyai.kernels.devices.missing_cuda`, and None in Triton's interpreter, which runs anywhere."""
    return None if triton.knobs.runtime.interpret else missing_cuda(device, needs, capability, note)


def unsupported_reason(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on ``device``, or None. They need a CUDA device of capability 8.0, or the interpreter."""
    return missing_device(device, capability=8, note=" (bfloat16)")


def new_quantized(rows: int, columns: int, device: torch.device) -> torch_ops.Quantized:
    """Uninitialised memory for a quantised matrix."""
    return torch_ops.Quantized(
        torch.empty(rows, columns, dtype=torch_ops.FP8, device=device),
        torch.empty(rows, 1, dtype=torch.float32, device=device),
    )


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; 4 for the interpreter, which only needs some number."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def dot_precision(x: torch.Tensor) -> str:
    """float32 operands are multiplied in full precision; 16-bit products are exact either way."""
    return "ieee" if x.element_size() == 4 else "tf32"


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 value after a round trip through the parameters' type, as eager operations leave it."""
    return x.to(dtype).to(tl.float32)


@triton.jit
def gelu_tanh(x):
    """tanh-GELU in float32: ``x * sigmoid(2u)`` equals ``x/2 * (1 + tanh u)`` and does not cancel for negative x."""
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-2.0 * u))


@triton.jit
def fp8_scaling(row):
    """Factor that brings the largest magnitude of a row to FP8's 448, and the scale that undoes it."""
    top = tl.maximum(tl.max(tl.abs(row), 0).to(tl.float32), 1e-12)
    return tl.div_rn(448.0, top), top * (1.0 / 448.0)
