# SPDX-License-Identifier: Apache-2.0
"""How far apart the two policies are as distributions, not only on the sampled actions.

Rollout and actor draw the stochastic denoise step k from Gaussians of the same standard deviation ``s_k`` and
slightly different means. From a log-prob follows the distance of the sample from the mean in units of ``s_k``::

    |z| = sqrt(-2 (logp + ln s_k + ln(2 pi) / 2))

so both scores give ``|mean_p - mean_q| / s_k = | |z_p| - |z_q| |`` per element and the divergence per sample,
``KL = sum over elements of ((mean_p - mean_q) / s_k)^2 / 2``. No further tensor has to travel from the rollout. Computed in
float64, from float32 scores. An element that lies between the two means is taken for nearer than it is; with shifts around
0.01 that is one element in a hundred.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from rlinf_phyai.actor.correction import expand_mask


def step_deviations(num_steps: int, noise_level: float) -> torch.Tensor:
    """``s_k = sigma_k sqrt(1 / N)`` of flow-SDE, float32 ``[N]``.

    ``sigma_k = noise_level * sqrt(t_k / (1 - t~_k))`` with ``t_k = 1 - k / N`` and ``t~_k = t_k``, except ``t~_0 =
    t_1`` (1 for a single step, where ``t_1`` is 0 and ``sigma_0 = noise_level``).
    """
    times = 1.0 - torch.arange(num_steps, dtype=torch.float64) / num_steps
    guarded = times.clone()
    guarded[0] = times[1] if num_steps > 1 else 0.0
    return (noise_level * torch.sqrt(times / (1.0 - guarded)) * math.sqrt(1.0 / num_steps)).float()


def mean_shift(p: torch.Tensor, q: torch.Tensor, deviation: torch.Tensor) -> torch.Tensor:
    """``|mean_p - mean_q| / s`` per element, float64.

    Args:
        p, q: log-probs ``[..., c, d]``.
        deviation: ``s`` of each sample, ``[...]``.
    """
    p, q = p.double(), q.double()
    constant = (torch.log(deviation.double()) + 0.5 * math.log(2 * math.pi))[..., None, None]
    # Above the density's peak (rounding, or a debugging offset) there is no z: take the mean itself.
    z_p = torch.sqrt((-2.0 * (p + constant)).clamp_min(0.0))
    z_q = torch.sqrt((-2.0 * (q + constant)).clamp_min(0.0))
    return (z_p - z_q).abs()


@dataclass(frozen=True)
class GaussianSettings:
    """What is needed to turn log-probs into distances: ``num_steps``, ``noise_level`` (where annealing does not move it) and
    ``action_dim`` (d)."""

    num_steps: int
    noise_level: float
    action_dim: int

    @classmethod
    def from_config(cls, cfg: Any) -> GaussianSettings | None:
        """From RLinf's resolved config; ``None`` where a log-prob is not that of one Gaussian of known width."""
        openpi = cfg.actor.model.get("openpi") or {}
        if openpi.get("noise_method", "flow_sde") != "flow_sde":
            return None
        if any(openpi.get(key, False) for key in ("joint_logprob", "safe_get_logprob")):
            return None
        steps = openpi.get("num_steps", cfg.actor.model.get("num_steps", None))
        if steps is None:
            return None
        return cls(int(steps), float(openpi.get("noise_level", 0.5)), int(cfg.actor.model.get("action_dim", 7)))


def gaussian_metrics(
    p: torch.Tensor,
    q: torch.Tensor,
    steps: torch.Tensor,
    mask: torch.Tensor | None,
    settings: GaussianSettings,
    device: torch.device | str | int = "cpu",
) -> dict[str, float]:
    """Mean KL per sample, overall and per denoise step, and the mean shift per action dimension, over all ranks.

    Args:
        p, q: ``[T, B, c, d]``.
        steps: int64 ``[T, B]``, the stochastic step of each sample.
        mask: bool ``[T, B, 1]``, ``[T, B, c]`` or ``None``.

    A collective call. Figures without samples are NaN; the keys depend on the settings only.
    """
    shape = (*p.shape[:2], -1, settings.action_dim)
    p, q = p.reshape(shape), q.reshape(shape)
    shift = mean_shift(p, q, step_deviations(settings.num_steps, settings.noise_level)[steps])
    kept = expand_mask(mask, shift.shape).double()
    shift = torch.where(kept > 0, shift, 0.0)
    divergence = 0.5 * shift.square().sum(dim=(-2, -1))
    counted = kept.amax(dim=(-2, -1))
    chosen = torch.nn.functional.one_hot(steps, settings.num_steps).double() * counted[..., None]
    totals = torch.cat(
        [
            (chosen * divergence[..., None]).sum(dim=(0, 1)),
            chosen.sum(dim=(0, 1)),
            shift.sum(dim=(0, 1, 2)),
            kept.sum(dim=(0, 1, 2)),
        ]
    ).to(device)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(totals, op=torch.distributed.ReduceOp.SUM)
    n, d = settings.num_steps, settings.action_dim
    kl, samples, shifts, elements = (part.tolist() for part in totals.cpu().split([n, n, d, d]))
    metrics = {"actor/rollout_train_kl": _ratio(sum(kl), sum(samples))}
    metrics |= {f"actor/rollout_train_kl/step_{k}": _ratio(kl[k], samples[k]) for k in range(n)}
    metrics |= {f"actor/rollout_train_mean_shift/dim_{j}": _ratio(shifts[j], elements[j]) for j in range(d)}
    return metrics


def _ratio(total: float, count: float) -> float:
    return total / count if count else math.nan
