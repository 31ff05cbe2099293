# SPDX-License-Identifier: Apache-2.0
"""One kernel for a denoise transition and its log-probability, instead of a dozen small ones per step."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlinf_phyai.kernels.triton_common import missing_device

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
_BLOCK = 256


def unsupported_reason(device: torch.device) -> str | None:
    """Triton needs a CUDA device (or its interpreter, on the CPU)."""
    return missing_device(device)


@triton.jit
def _denoise_kernel(
    x_ptr, v_ptr, noise_ptr, sigma_ptr, new_ptr, logp_ptr,
    noise_stride, sigma_stride, elements, time, delta, half_log_2pi, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < elements
    here = row.to(tl.int64) * elements + offsets
    x = tl.load(x_ptr + here, mask=inside, other=0.0)
    v = tl.load(v_ptr + here, mask=inside, other=0.0)
    noise = tl.load(noise_ptr + row.to(tl.int64) * noise_stride + offsets, mask=inside, other=0.0)
    sigma = tl.load(sigma_ptr + row * sigma_stride)
    std = tl.sqrt(delta) * sigma
    remaining = time - delta
    mean = (x - v * time) * (1.0 - remaining)
    mean += (x + v * (1.0 - time)) * (remaining - sigma * sigma * delta / (2.0 * time))
    new = mean + noise * std
    safe = tl.where(std > 0, std, 1.0)
    scaled = (new - mean) / safe
    logp = -tl.log(safe) - half_log_2pi - 0.5 * scaled * scaled
    tl.store(new_ptr + here, new, mask=inside)
    tl.store(logp_ptr + here, tl.where(std > 0, logp, 0.0), mask=inside)


def denoise_update(
    x: Tensor, velocity: Tensor, noise: Tensor, sigma: Tensor, time: float, delta: float
) -> tuple[Tensor, Tensor]:
    """See :func:`rlinf_phyai.kernels.torch_ops.denoise_update`; noise and sigma may be strided in their first dimension."""
    batch = x.shape[0]
    x, velocity = x.contiguous(), velocity.contiguous()
    elements = x.numel() // batch
    new, log_prob = torch.empty_like(x), torch.empty_like(x)
    _denoise_kernel[(batch, triton.cdiv(elements, _BLOCK))](
        x, velocity, noise, sigma, new, log_prob,
        noise.stride(0), sigma.stride(0), elements, time, delta, _HALF_LOG_2PI, BLOCK=_BLOCK,
    )  # fmt: skip
    return new, log_prob
