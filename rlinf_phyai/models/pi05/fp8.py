# SPDX-License-Identifier: Apache-2.0
"""FP8 copies of the prefix MLPs: the weights that hold 85 % of a step's arithmetic, multiplied at twice the rate.

The parameters stay what they are; the copies are derived from them like every other table, so a weight update writes the
parameters and the next refresh quantises them again. Rounding: each output row of a matrix and each token has a scale of its own
(:func:`rlinf_phyai.kernels.torch_ops.quantize_rows`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf_phyai.kernels import Kernels
from rlinf_phyai.kernels.devices import missing_cuda
from rlinf_phyai.kernels.torch_ops import FP8, Quantized
from rlinf_phyai.models.pi05.configuration import PI05Config
from rlinf_phyai.models.pi05.weights import PI05Weights

SIZE_STEP = 16
"""FP8 products need row lengths that are multiples of 16."""


@dataclass(frozen=True)
class Fp8Mlp:
    """One layer: gate_up [2 * mlp, width] and down [width, mlp]."""

    gate_up: Quantized
    down: Quantized


class Fp8Prefix:
    """The copies of all layers, one stack per matrix."""

    def __init__(self, kernels: Kernels, weights: PI05Weights) -> None:
        self._kernels = kernels
        self._sources = [weights.storages["prefix.gate_up"], weights.storages["prefix.down"]]
        self._copies = [
            Quantized(
                torch.empty(source.shape, dtype=FP8, device=weights.device),
                torch.empty(*source.shape[:2], 1, dtype=torch.float32, device=weights.device),
            )
            for source in self._sources
        ]
        self._sizes = [tensor.untyped_storage().nbytes() for tensor in self._tensors()]
        self._quantized: list[int] | None = None
        gate_up, down = ([Quantized(*parts) for parts in zip(*copy, strict=True)] for copy in self._copies)
        self.layers: list[Fp8Mlp] = [Fp8Mlp(*pair) for pair in zip(gate_up, down, strict=True)]

    def refresh(self) -> None:
        """Quantises the present weights, in place; nothing when nobody has written to them since the last time."""
        counters = [source._version for source in self._sources]
        if counters == self._quantized:
            return
        for tensor, size in zip(self._tensors(), self._sizes, strict=True):
            storage = tensor.untyped_storage()
            if storage.nbytes() != size:  # released; CUDA would move one of the same size, under the captured graphs
                storage.resize_(size)
        for source, copy in zip(self._sources, self._copies, strict=True):
            for weight, values, scale in zip(source, *copy, strict=True):
                quantized = self._kernels.quantize_rows(weight)
                values.copy_(quantized.values)
                scale.copy_(quantized.scale)
        self._quantized = counters

    def release(self) -> None:
        """Gives the memory back; the next refresh takes it again and quantises anew."""
        for tensor in self._tensors():
            tensor.untyped_storage().resize_(0)
        self._quantized = None

    def _tensors(self) -> list[Tensor]:
        return [tensor for copy in self._copies for tensor in copy]


def num_bytes(config: PI05Config) -> int:
    """Bytes of the copies."""
    c = config.prefix
    return c.depth * (3 * c.mlp_dim * c.width + 4 * (2 * c.mlp_dim + c.width))


def unsupported_reason(config: PI05Config, device: torch.device, params_dtype: torch.dtype) -> str | None:
    """Why the prefix cannot run in FP8, or None. On a CPU the products are emulated, slowly."""
    c = config.prefix
    if c.width % SIZE_STEP or c.mlp_dim % SIZE_STEP:
        return f"it needs a prefix width and MLP width that are multiples of {SIZE_STEP}; the model has {c.width} and {c.mlp_dim}"
    if device.type != "cuda":
        return None
    if params_dtype != torch.bfloat16:
        return f"its results are bfloat16, but params_dtype is {params_dtype}; set params_dtype bfloat16"
    return missing_cuda(device, "it needs", 9, " (Hopper)")


def mlp(kernels: Kernels, layer: Fp8Mlp, x: Tensor, y: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """Adds y to the residual x [M, width] in place; returns the MLP of its norm [M, width] in x's type."""
    h = kernels.add_rms_norm_fp8(x, y, norm_weight, eps)
    return kernels.linear_fp8(kernels.linear_gated_gelu_fp8(h, layer.gate_up, x.dtype), layer.down, x.dtype)
