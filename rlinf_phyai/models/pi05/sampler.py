# SPDX-License-Identifier: Apache-2.0
"""Sampling of an action chunk and the log-probability of every transition, by one of three noise methods.

With t_i = 1 - i/N, delta = t_i - t_(i+1) and velocity v at (x, t)::

    x0 = x - v t          (predicted actions)     w0 = 1 - (t - delta)
    x1 = x + v (1 - t)    (predicted noise)       x' = x0 w0 + x1 w1 + std eps

    flow_sde     w1 = (t - delta) - sigma^2 delta / (2 t)     std = sigma sqrt(delta)
    flow_cps     w1 = (t - delta) sqrt(1 - sigma^2)           std = (t - delta) sigma
    flow_noise   w1 = t - delta                               std = noise head(expert output), per element

A step without noise is the Euler step of the flow ODE in all of them. flow_sde and flow_noise are the samplers of the pi-RL paper,
flow_cps is coefficient-preserving sampling (w1^2 + std^2 stays (t - delta)^2); all as RLinf's actor scores them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from rlinf_phyai.kernels import Kernels
from rlinf_phyai.kernels.torch_ops import gaussian_step
from rlinf_phyai.models.pi05.noise_head import noise_std
from rlinf_phyai.models.pi05.weights import PI05Weights

VelocityField = Callable[[int, Tensor], tuple[Tensor, Tensor]]
"""(step, x [B, H, D]) -> velocity [B, H, D], expert output [B, H, width]."""

Transition = Callable[[int, Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor]]
"""(step, x, velocity, expert output, time, delta) -> x', its log-probability, both [B, H, D] and exactly 0 without noise."""


@dataclass(frozen=True)
class Trajectory:
    """chains [B, N + 1, H, D], log_probs [B, N, H, D], expert outputs of the N steps; all float32."""

    chains: Tensor
    log_probs: Tensor
    expert_outputs: list[Tensor]


def transition_of(
    method: str, kernels: Kernels, weights: PI05Weights, step_noise: Tensor, sigmas: Tensor
) -> Transition:
    """The transition of a noise method (one of ``configuration.NOISE_METHODS``).

    Args:
        step_noise: [B, N, H, D]; sigmas: [B, N], 0 = ODE step; for ``flow_noise`` 1 where the noise head acts. All float32.
    """
    if method == "flow_sde":
        return lambda i, x, v, output, time, delta: kernels.denoise_update(
            x, v, step_noise[:, i], sigmas[:, i], time, delta
        )

    def transition(i: int, x: Tensor, v: Tensor, output: Tensor, time: float, delta: float) -> tuple[Tensor, Tensor]:
        sigma, remaining = sigmas[:, i, None, None], _difference(time, delta)
        kept: Tensor | float = remaining
        if method == "flow_noise":
            std = noise_std(weights, output) * sigma
        else:
            std, kept = remaining * sigma, remaining * torch.sqrt(1.0 - sigma.square())
        mean = (x - v * time) * (1.0 - remaining) + (x + v * (1.0 - time)) * kept
        return gaussian_step(mean, std, step_noise[:, i])

    return transition


def sample(field: VelocityField, transition: Transition, times: list[float], noise: Tensor) -> Trajectory:
    """Runs N transitions from ``noise`` float32 [B, H, D]; ``times`` are N + 1 values from 1 to 0."""
    x = noise
    chain, log_probs, outputs = [x], [], []
    for i, (time, following) in enumerate(pairwise(times)):
        v, output = field(i, x)
        x, log_prob = transition(i, x, v, output, time, _difference(time, following))
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
