# SPDX-License-Identifier: Apache-2.0
"""FP8 products with a scale per row, by the library that torch ships. Results are bfloat16.

Reference: :mod:`rlinf_phyai.kernels.torch_ops`. Sums use the tensor cores' fast accumulation: a few bits less than float32, far
below the rounding of the operands.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf_phyai.kernels.torch_ops import Quantized
from rlinf_phyai.kernels.triton_fp8 import gated_gelu_fp8, unsupported_reason

__all__ = ["linear_fp8", "linear_gated_gelu_fp8", "unsupported_reason"]


def linear_fp8(x: Quantized, weight: Quantized, dtype: torch.dtype, fast: bool = True) -> Tensor:
    """See :func:`rlinf_phyai.kernels.torch_ops.linear_fp8`. K and N must be multiples of 16, ``dtype`` bfloat16."""
    return torch._scaled_mm(
        x.values, weight.values.t(), x.scale, weight.scale.t(), out_dtype=dtype, use_fast_accum=fast
    )


def linear_gated_gelu_fp8(x: Quantized, weight: Quantized, dtype: torch.dtype) -> Quantized:
    """See :func:`rlinf_phyai.kernels.torch_ops.linear_gated_gelu_fp8`; the product reaches memory before the activation."""
    return gated_gelu_fp8(linear_fp8(x, weight, dtype))
