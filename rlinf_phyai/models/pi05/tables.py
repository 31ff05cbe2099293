# SPDX-License-Identifier: Apache-2.0
"""Everything that is computed from the weights once per weight version, and the rotary tables.

:meth:`DerivedTables.refresh` is the only function that fills them, at setup and after every weight update, in place: captured
graphs keep reading the same memory.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from rlinf_phyai.kernels import Kernels
from rlinf_phyai.models.pi05.configuration import GemmaConfig
from rlinf_phyai.models.pi05.fp8 import Fp8Prefix
from rlinf_phyai.models.pi05.vision import embed_images
from rlinf_phyai.models.pi05.weights import PI05Weights

MASKED_PIXEL = -1.0
"""A masked camera's image is black; pixels are scaled to [-1, 1]."""

_MIN_PERIOD, _MAX_PERIOD = 4e-3, 4.0
_MAX_SCHEDULES = 8


class DenoiseSchedule:
    """Times and AdaRMS modulations of N denoise steps. PI0's plain norms are AdaRMS with the same modulation at every step.

    Attributes:
        times: N + 1 float32 values from 1 to 0, as Python floats.
        modulation: float32 [N, norms, 3, width]: scale, shift, gate of each AdaRMS layer.
        gates: [N, norms, width], the gates in the parameters' type.
        time_term: float32 [N, width], PI0's share of the time in the first layer of its action-time MLP, with the bias.
    """

    def __init__(self, weights: PI05Weights, num_steps: int) -> None:
        # On the CPU and in float32 whatever the process's default device and type are; a rounded time is another model.
        steps = torch.linspace(1, 1 / num_steps, num_steps, dtype=torch.float32, device="cpu")
        times = torch.cat((steps, steps.new_zeros(1)))
        self.times: list[float] = times.tolist()
        self._times = times[:-1].to(weights.device)
        norms, width = 2 * weights.config.expert.depth + 1, weights.config.expert.width
        self.time_term = torch.zeros(num_steps, width, dtype=torch.float32, device=weights.device)
        self.modulation = torch.zeros(num_steps, norms, 3, width, dtype=torch.float32, device=weights.device)
        self.gates = torch.zeros(num_steps, norms, width, dtype=weights.params_dtype, device=weights.device)

    def refresh(self, weights: PI05Weights) -> None:
        """Recomputes the modulations: sinusoid of t -> time MLP -> every AdaRMS layer's dense."""
        width = weights.config.expert.width
        fraction = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=weights.device)
        period = _MIN_PERIOD * (_MAX_PERIOD / _MIN_PERIOD) ** fraction
        angle = (1.0 / period * 2 * math.pi)[None] * self._times[:, None]
        embedding = torch.cat((angle.sin(), angle.cos()), dim=1).float()
        if not weights.config.pi05:
            weight, bias = weights.action_time_in
            self.time_term.copy_(F.linear(embedding, weight[:, width:], bias))
            self.modulation[:, :, 0] = weights.expert_norms
            self.modulation[:, :, 2] = self.gates[:] = 1.0
            return
        condition = F.silu(F.linear(F.silu(F.linear(embedding, *weights.time_in)), *weights.time_out))
        dense = weights.ada_weight.flatten(0, 1)
        modulation = F.linear(condition, dense, weights.ada_bias.flatten()).view_as(self.modulation)
        self.modulation.copy_(modulation)
        self.gates.copy_(modulation[:, :, 2])


class RotaryTable:
    """cos and sin [positions, head_dim / 2] in the parameters' type, as the actor rounds them."""

    def __init__(self, config: GemmaConfig, positions: int, device: torch.device, dtype: torch.dtype) -> None:
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.int64, device=device).float() / config.head_dim
        # The actor's frequencies are a module buffer, which its cast to bfloat16 rounds too; they are used as float32 then.
        frequency = (1.0 / (config.rope_theta**exponent)).to(dtype).float()
        angle = torch.arange(positions, device=device).float()[:, None] * frequency[None]
        self.cos, self.sin = angle.cos().to(dtype), angle.sin().to(dtype)


class DerivedTables:
    """Denoise schedules by number of steps (bounded), the masked camera's tokens, the rotary table, and with ``fp8_prefix`` the
    prefix MLPs in FP8."""

    def __init__(
        self, kernels: Kernels, weights: PI05Weights, max_positions: int, masked_cameras: bool, fp8_prefix: bool = False
    ) -> None:
        self._kernels, self._weights = kernels, weights
        self.fp8_prefix = Fp8Prefix(kernels, weights) if fp8_prefix else None
        self._schedules: OrderedDict[int, DenoiseSchedule] = OrderedDict()
        self.rotary = RotaryTable(weights.config.prefix, max_positions, weights.device, weights.params_dtype)
        c = weights.config.vision
        self.masked_tokens: Tensor | None = None
        self._masked_source: tuple[int, ...] | None = None
        if masked_cameras:
            self.masked_tokens = torch.zeros(
                c.num_tokens, weights.config.prefix.width, dtype=weights.params_dtype, device=weights.device
            )
            self._masked_pixels = torch.full(
                (1, 3, c.image_size, c.image_size), MASKED_PIXEL, dtype=torch.float32, device=weights.device
            )

    def schedule(self, num_steps: int) -> DenoiseSchedule:
        """The schedule of ``num_steps``, made on first use; at most 8 are kept."""
        found = self._schedules.get(num_steps)
        if found is None:
            found = DenoiseSchedule(self._weights, num_steps)
            found.refresh(self._weights)
            self._schedules[num_steps] = found
            while len(self._schedules) > _MAX_SCHEDULES:
                self._schedules.popitem(last=False)
        self._schedules.move_to_end(num_steps)
        return found

    def refresh(self) -> None:
        """Brings every table up to date with the current weights, in place."""
        for schedule in self._schedules.values():
            schedule.refresh(self._weights)
        if self.masked_tokens is not None:
            self._refresh_masked(self.masked_tokens)
        if self.fp8_prefix is not None:
            self.fp8_prefix.refresh()

    def release(self) -> None:
        """Gives large tables' memory back until the next :meth:`refresh`."""
        if self.fp8_prefix is not None:
            self.fp8_prefix.release()

    def _refresh_masked(self, tokens: Tensor) -> None:
        """A whole vision tower, most of a commit's time; RL rarely trains it, so it runs only after a write to it."""
        source = self._weights.vision_counters()
        if source != self._masked_source:
            tokens.copy_(embed_images(self._kernels, self._weights, self._masked_pixels)[0])
            self._masked_source = source
