# SPDX-License-Identifier: Apache-2.0
"""Flow-SDE sampling of an action chunk and the log-probability of every transition.

With t_i = 1 - i/N, delta = t_i - t_(i+1) and velocity v at (x, t)::

    x0 = x - v t          (predicted actions)     w0 = 1 - (t - delta)
    x1 = x + v (1 - t)    (predicted noise)       w1 = (t - delta) - sigma^2 delta / (2 t)
    x' = x0 w0 + x1 w1 + sigma sqrt(delta) eps

sigma = 0 makes the step the Euler step of the flow ODE. This is the sampler of the pi-RL paper (flow-SDE) as RLinf's actor scores it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from rlinf_phyai.kernels import Kernels

VelocityField = Callable[[int, Tensor], tuple[Tensor, Tensor]]
"""(step, x [B, H, D]) -> velocity [B, H, D], expert output [B, H, width]."""


@dataclass(frozen=True)
class Trajectory:
    """chains [B, N + 1, H, D], log_probs [B, N, H, D], expert outputs of the N steps; all float32."""

    chains: Tensor
    log_probs: Tensor
    expert_outputs: list[Tensor]


def sample_sde(
    kernels: Kernels, field: VelocityField, times: list[float], noise: Tensor, step_noise: Tensor, sigmas: Tensor
) -> Trajectory:
    """Runs N transitions from ``noise``.

    Args:
        times: N + 1 values from 1 to 0.
        noise: [B, H, D]; step_noise: [B, N, H, D]; sigmas: [B, N], 0 = ODE step. All float32.
    """
    x = noise
    chain, log_probs, outputs = [x], [], []
    for i, (time, following) in enumerate(pairwise(times)):
        v, output = field(i, x)
        x, log_prob = kernels.denoise_update(x, v, step_noise[:, i], sigmas[:, i], time, _difference(time, following))
        chain.append(x)
        log_probs.append(log_prob)
        outputs.append(output)
    return Trajectory(torch.stack(chain, dim=1), torch.stack(log_probs, dim=1), outputs)


def sample_ode(field: VelocityField, times: list[float], noise: Tensor) -> Tensor:
    """Deterministic Euler integration from ``noise`` [B, H, D] to actions [B, H, D]."""
    x = noise
    for i, (time, following) in enumerate(pairwise(times)):
        v, _ = field(i, x)
        remaining = _difference(time, _difference(time, following))
        x = (x - v * time) * (1.0 - remaining) + (x + v * (1.0 - time)) * remaining
    return x


def _difference(a: float, b: float) -> float:
    """a - b in float32, as the actor computes step lengths."""
    minuend, subtrahend = torch.tensor((a, b), dtype=torch.float32, device="cpu")
    return float(minuend - subtrahend)
