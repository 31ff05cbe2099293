# SPDX-License-Identifier: Apache-2.0
"""Importance-sampling correction between the rollout engine and the actor: pure functions.

``q`` is the log-probability the rollout reported for an action, ``p`` the actor's own score of the same action before
any update. Both are given per element, ``[..., c, d]`` (``c`` actions of a chunk, ``d`` action dimensions). The
importance weight of one *unit* is ``exp(clamp(sum(p - q), -20, 20))``; a unit is what ``algorithm.logprob_type``
makes of a chunk:

=============  ===========================  ================
logprob_type   elements summed into a unit  shape of a unit
=============  ===========================  ================
token_level    1                            ``[..., c, d]``
action_level   d                            ``[..., c]``
chunk_level    c * d                        ``[...]``
=============  ===========================  ================

The estimator is the usual truncated importance weight ``min(p / q, clip)`` applied to the advantage (Ionides, 2008),
with the actor's score as PPO's old policy. Everything is computed in float32. Differences are taken per element
*before* summing: the sums of p and q are tens of nats large and would lose four digits of a small difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

LogprobType = Literal["token_level", "action_level", "chunk_level"]
CorrectionMode = Literal["truncate", "mask", "off"]

LOG_WEIGHT_LIMIT = 20.0
"""Bound of a unit's log weight: exp(20) = 4.9e8 and its square still fit float32."""


@dataclass(frozen=True)
class CorrectionConfig:
    """What the ``algorithm`` section asks for. All fields are plain values, so that the pure functions need no config
    object.

    Attributes:
        recompute: the actor rescores every sampled action (``algorithm.recompute_logprobs``).
        fix: the weight multiplies the advantage (``algorithm.importance_sampling_fix``).
        clip: upper bound of the weight, > 0 (``algorithm.importance_sampling_clip``); ``None`` only without ``fix``.
        clip_low: lower bound of the weight, >= 0 (``algorithm.importance_sampling_clip_low``); 0 is no bound.
        mode: ``truncate`` moves weights outside the bounds to the bound, ``mask`` drops those units (weight 0), ``off``
            leaves the advantage alone and only reports metrics (``algorithm.importance_sampling_mode``).
        normalize: divide the bounded weights by their mean over the step (``algorithm.importance_sampling_normalize``).
        logprob_type: granularity of a unit (``algorithm.logprob_type``).
        action_dim: ``d``, the elements per action (``actor.model.action_dim``, RLinf's default 7).
    """

    recompute: bool
    fix: bool
    clip: float | None = None
    clip_low: float = 0.0
    mode: CorrectionMode = "truncate"
    normalize: bool = False
    logprob_type: LogprobType = "chunk_level"
    action_dim: int = 7

    def __post_init__(self) -> None:
        if self.fix and not self.recompute:
            raise ValueError(
                "algorithm.importance_sampling_fix is on but algorithm.recompute_logprobs is off: the weight needs "
                "the actor's own score. Set algorithm.recompute_logprobs: True, or turn the fix off."
            )
        if self.logprob_type not in get_args(LogprobType):
            raise ValueError(
                f"algorithm.logprob_type is {self.logprob_type!r}; allowed: {', '.join(get_args(LogprobType))}."
            )
        if self.mode not in get_args(CorrectionMode):
            raise ValueError(
                f"algorithm.importance_sampling_mode is {self.mode!r}; allowed: {', '.join(get_args(CorrectionMode))}."
            )
        if self.fix and self.clip is None:
            raise ValueError(
                "algorithm.importance_sampling_clip is missing: give the upper bound of the weight, for example 1.0."
            )
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"algorithm.importance_sampling_clip is {self.clip}; it must be greater than 0.")
        if not self.clip_low >= 0 or (self.clip is not None and self.clip_low > self.clip):
            raise ValueError(
                f"algorithm.importance_sampling_clip_low is {self.clip_low}; it must lie between 0 and "
                f"algorithm.importance_sampling_clip ({self.clip})."
            )
        if self.action_dim < 1:
            raise ValueError(f"actor.model.action_dim is {self.action_dim}; it must be at least 1.")

    @property
    def weights_advantage(self) -> bool:
        """True where the advantage is multiplied (``fix`` on and ``mode`` not ``off``)."""
        return self.fix and self.mode != "off"

    @classmethod
    def from_config(cls, cfg: Any) -> CorrectionConfig:
        """Read the resolved RLinf config (an OmegaConf ``DictConfig``). Raises ``ValueError`` that names the key."""
        algorithm = cfg.algorithm
        clip = algorithm.get("importance_sampling_clip", None)
        clip_low = algorithm.get("importance_sampling_clip_low", None)
        return cls(
            recompute=bool(algorithm.get("recompute_logprobs", False)),
            fix=bool(algorithm.get("importance_sampling_fix", False)),
            clip=None if clip is None else float(clip),
            clip_low=0.0 if clip_low is None else float(clip_low),
            mode=_mode(algorithm.get("importance_sampling_mode", None)),
            normalize=bool(algorithm.get("importance_sampling_normalize", False)),
            logprob_type=algorithm.logprob_type,
            action_dim=int(cfg.actor.model.get("action_dim", 7)),
        )


def _mode(value: Any) -> Any:
    # YAML 1.1 reads a bare `off` as False.
    if value is None:
        return "truncate"
    return "off" if value is False else value


def sum_units(values: torch.Tensor, logprob_type: LogprobType, action_dim: int, batch_dims: int = 1) -> torch.Tensor:
    """Sum per-element values into units.

    Args:
        values: ``[*batch, ...]`` whose dimensions after the first ``batch_dims`` hold ``c * action_dim`` elements,
            any dtype.
        logprob_type: see the module's table.
        action_dim: ``d``.
        batch_dims: how many leading dimensions are kept.

    Returns:
        float32 ``[*batch, c, d]``, ``[*batch, c]`` or ``[*batch]``.

    Raises:
        ValueError: the elements of a sample are not a multiple of ``action_dim``.
    """
    batch = values.shape[:batch_dims]
    elements = values.shape[batch_dims:].numel()
    if elements % action_dim:
        raise ValueError(
            f"log-probs of shape {tuple(values.shape)} hold {elements} elements per sample, which "
            f"actor.model.action_dim = {action_dim} does not divide."
        )
    values = values.float().reshape(*batch, elements // action_dim, action_dim)
    if logprob_type == "token_level":
        return values
    if logprob_type == "action_level":
        return values.sum(dim=-1)
    if logprob_type == "chunk_level":
        return values.sum(dim=(-2, -1))
    raise ValueError(f"algorithm.logprob_type is {logprob_type!r}; allowed: {', '.join(get_args(LogprobType))}.")


def log_weights(p: torch.Tensor, q: torch.Tensor, config: CorrectionConfig, batch_dims: int = 1) -> torch.Tensor:
    """``clamp(sum(p - q), -20, 20)`` per unit, float32.

    Args:
        p, q: ``[*batch, c, d]`` log-probabilities of the actor and of the rollout.

    Raises:
        ValueError: the shapes differ (both are named), or a value is not finite (which tensor and how many).
    """
    if p.shape != q.shape:
        raise ValueError(
            f"the actor's log-probs have shape {tuple(p.shape)} but the rollout reported shape {tuple(q.shape)}: "
            "both must score the same elements."
        )
    for name, values in (("prev_logprobs (actor)", p), ("rollout_logprobs (rollout)", q)):
        bad = int((~torch.isfinite(values)).sum())
        if bad:
            raise ValueError(
                f"{name}: {bad} of {values.numel()} values are not finite; a weight cannot be formed from them."
            )
    difference = p.float() - q.float()
    total = sum_units(difference, config.logprob_type, config.action_dim, batch_dims)
    return total.clamp(-LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT)


def bound_weights(weights: torch.Tensor, config: CorrectionConfig) -> torch.Tensor:
    """Apply the bounds of ``config`` to raw weights; same shape and dtype. A bound itself is inside."""
    if config.mode == "off":
        return torch.ones_like(weights)
    high = float("inf") if config.clip is None else config.clip
    if config.mode == "mask":
        inside = (weights >= config.clip_low) & (weights <= high)
        return torch.where(inside, weights, torch.zeros_like(weights))
    return weights.clamp(min=config.clip_low, max=high)


def advantage_weights(
    p: torch.Tensor, q: torch.Tensor, config: CorrectionConfig, *, normalizer: float = 1.0, batch_dims: int = 1
) -> torch.Tensor:
    """The detached factor of the advantage, float32, one per unit.

    Args:
        p, q: ``[*batch, c, d]``.
        normalizer: mean bounded weight of the whole step (used with ``config.normalize``).
    """
    with torch.no_grad():
        weights = bound_weights(torch.exp(log_weights(p, q, config, batch_dims)), config)
        return weights / normalizer if config.normalize else weights


def expand_mask(
    mask: torch.Tensor | None, shape: torch.Size | tuple[int, ...], device: torch.device | None = None
) -> torch.Tensor:
    """Broadcast a loss mask to the units it covers.

    Args:
        mask: bool ``[*batch, 1]`` or ``[*batch, c]`` (what RLinf keeps), already ``shape``, or ``None`` (nothing is
            masked).
        shape: shape of the units: ``[*batch]``, ``[*batch, c]`` or ``[*batch, c, d]``.

    Returns:
        bool tensor of ``shape``.

    Raises:
        ValueError: the mask does not broadcast (both shapes are named).
    """
    shape = torch.Size(shape)
    if mask is None:
        return torch.ones(shape, dtype=torch.bool, device=device)
    result = mask.bool()
    # A trailing 1 of a chunk-level mask has no counterpart in chunk-level units; finer units gain trailing dimensions.
    while result.dim() > len(shape) and result.shape[-1] == 1:
        result = result.squeeze(-1)
    while result.dim() < len(shape):
        result = result.unsqueeze(-1)
    try:
        return result.expand(shape).to(device or mask.device)
    except RuntimeError as error:
        raise ValueError(
            f"loss_mask of shape {tuple(mask.shape)} does not broadcast to units of shape {tuple(shape)}."
        ) from error
