# SPDX-License-Identifier: Apache-2.0
"""Metrics of the mismatch between rollout and actor, reduced over a whole step and over ranks.

RLinf averages what a rank reports; an average of maxima, of effective sample sizes or of correlations is none of
these. So each rank sums its own units, the sums and maxima are combined, and the figures are formed once from the
totals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch

from rlinf_phyai.actor.correction import CorrectionConfig, bound_weights, expand_mask, log_weights
from rlinf_phyai.actor.losses import FirstUpdate


@dataclass
class CorrectionSums:
    """Additive statistics of unmasked units (``weight*``, ``log_*``) and elements (the rest). All Python floats.

    ``weight_max`` combines by maximum, every other field by addition.
    """

    units: float = 0.0
    weight: float = 0.0
    weight_squared: float = 0.0
    weight_bounded: float = 0.0
    above: float = 0.0
    below: float = 0.0
    log_weight: float = 0.0
    elements: float = 0.0
    gap: float = 0.0
    p: float = 0.0
    q: float = 0.0
    pp: float = 0.0
    qq: float = 0.0
    pq: float = 0.0
    weight_max: float = 0.0

    @classmethod
    def of(
        cls, p: torch.Tensor, q: torch.Tensor, mask: torch.Tensor | None, config: CorrectionConfig, batch_dims: int = 1
    ) -> CorrectionSums:
        """Statistics of one rank's samples.

        Args:
            p, q: ``[*batch, c, d]`` log-probabilities of actor and rollout.
            mask: bool ``[*batch, 1]``, ``[*batch, c]`` or ``None``.
        """
        log_w = log_weights(p, q, config, batch_dims)
        unit_mask = expand_mask(mask, log_w.shape, log_w.device)
        weights = torch.exp(log_w)
        bounded = bound_weights(weights, config)[unit_mask].double()
        weights = weights[unit_mask]
        # The weight is compared in float32, as the loss does; sums are float64.
        above = float((weights > config.clip).sum()) if config.clip is not None else 0.0
        below = float((weights < config.clip_low).sum())
        weights = weights.double()

        elements = p.shape[batch_dims:].numel()
        shape = (*p.shape[:batch_dims], elements // config.action_dim, config.action_dim)
        p_elements, q_elements = p.reshape(shape), q.reshape(shape)
        element_mask = expand_mask(mask, p_elements.shape, p.device)
        pe, qe = p_elements[element_mask].double(), q_elements[element_mask].double()
        return cls(
            units=float(weights.numel()),
            weight=float(weights.sum()),
            weight_squared=float(weights.square().sum()),
            weight_bounded=float(bounded.sum()),
            above=above,
            below=below,
            log_weight=float(log_w[unit_mask].double().sum()),
            elements=float(pe.numel()),
            gap=float((pe - qe).abs().sum()),
            p=float(pe.sum()),
            q=float(qe.sum()),
            pp=float(pe.square().sum()),
            qq=float(qe.square().sum()),
            pq=float((pe * qe).sum()),
            weight_max=float(weights.max()) if weights.numel() else 0.0,
        )

    def all_reduce(self, device: torch.device | str | int = "cpu") -> CorrectionSums:
        """Combine over all ranks of the default process group (a collective call; itself without a group)."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return self
        names = [f.name for f in fields(self) if f.name != "weight_max"]
        sums = torch.tensor([getattr(self, n) for n in names], dtype=torch.float64, device=device)
        maximum = torch.tensor([self.weight_max], dtype=torch.float64, device=device)
        torch.distributed.all_reduce(sums, op=torch.distributed.ReduceOp.SUM)
        torch.distributed.all_reduce(maximum, op=torch.distributed.ReduceOp.MAX)
        return CorrectionSums(**dict(zip(names, sums.tolist(), strict=True)), weight_max=float(maximum))

    @property
    def bounded_mean(self) -> float:
        """Mean bounded weight; 1 where there is nothing to average (or everything was dropped)."""
        return self.weight_bounded / self.units if self.units and self.weight_bounded else 1.0

    def metrics(self) -> dict[str, float]:
        """The figures, NaN where every unit is masked. Keys do not depend on the data.

        ``effective_sample_size`` is ``(sum w)^2 / (n sum w^2)`` in (0, 1]; ``chi2`` is ``mean(w^2) - 1``, the
        chi-squared divergence of p from q under samples of q; ``behav_approx_kl`` is ``-mean(log w)``, the k1
        estimate of KL(q || p) per unit. All weights here are unbounded.
        """
        n, m = self.units or math.nan, self.elements or math.nan
        ess = self.weight**2 / (n * self.weight_squared) if self.weight_squared else math.nan
        return {
            "actor/importance_sampling_weight": self.weight / n,
            "actor/importance_sampling_weight_max": self.weight_max if self.units else math.nan,
            "actor/importance_sampling_clip_fraction": self.above / n,
            "actor/importance_sampling_clip_low_fraction": self.below / n,
            "actor/importance_sampling_effective_sample_size": ess,
            "actor/importance_sampling_chi2": self.weight_squared / n - 1.0,
            "actor/rollout_train_logprob_gap": self.gap / m,
            "actor/rollout_train_logprob_pearson": self._pearson(m),
            "actor/behav_approx_kl": -self.log_weight / n,
        }

    def _pearson(self, m: float) -> float:
        var_p = self.pp / m - (self.p / m) ** 2
        var_q = self.qq / m - (self.q / m) ** 2
        if not (var_p > 0 and var_q > 0):
            return math.nan
        return (self.pq / m - self.p * self.q / m**2) / math.sqrt(var_p * var_q)


def first_update_metrics(first: FirstUpdate, device: torch.device | str | int = "cpu") -> dict[str, float]:
    """``actor/first_update/ratio_max_dev`` and ``/clip_fraction`` over all ranks (a collective call).

    Both are NaN where every unit was masked.
    """
    maximum = torch.tensor([first.max_deviation], dtype=torch.float64, device=device)
    counts = torch.tensor([first.clipped, first.units], dtype=torch.float64, device=device)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(maximum, op=torch.distributed.ReduceOp.MAX)
        torch.distributed.all_reduce(counts, op=torch.distributed.ReduceOp.SUM)
    clipped, units = counts.tolist()
    return {
        "actor/first_update/ratio_max_dev": float(maximum) if units else math.nan,
        "actor/first_update/clip_fraction": clipped / units if units else math.nan,
    }
