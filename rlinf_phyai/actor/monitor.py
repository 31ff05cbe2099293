# SPDX-License-Identifier: Apache-2.0
"""Warnings in the training log when the correction has more to correct than rounding."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from rlinf_phyai.actor.limits import Limits

ADVICE = (
    "Run `rlinf-phyai check` on this config: it scores the same observations with engine and actor. Usual causes: the "
    "engine holds other weights than the actor (weight_syncer, runner.ckpt_path), another kernel policy "
    "(rollout.phyai.kernel_policy), another precision, or options that differ between actor.model and rollout.model."
)


@dataclass
class CorrectionMonitor:
    """Remembers the last gaps; one instance per run.

    Attributes:
        limits: of the mean weight and the effective sample size.
        gap_growth: how much larger the log-prob gap may become than the mean of the last ``window`` steps.
        window: number of steps compared with.
        gap_floor: nats per element below which growth is rounding and is not reported.
    """

    limits: Limits = field(default_factory=Limits)
    gap_growth: float = 3.0
    window: int = 10
    gap_floor: float = 1e-3
    _gaps: deque[float] = field(default_factory=deque)

    def check(self, metrics: dict[str, float]) -> list[str]:
        """Messages for the metrics of one step, each with the figure and its limit; NaN figures are skipped."""
        limits, messages = self.limits, []
        weight = metrics.get("actor/importance_sampling_weight", math.nan)
        if weight < limits.weight_low or weight > limits.weight_high:
            messages.append(
                f"mean importance weight {weight:.3g} is outside [{limits.weight_low:g}, {limits.weight_high:g}]: the "
                f"rollout's and the actor's scores have drifted apart. {ADVICE}"
            )
        size = metrics.get("actor/importance_sampling_effective_sample_size", math.nan)
        if size < limits.effective_sample_size:
            messages.append(
                f"effective sample size {size:.3g} is below {limits.effective_sample_size:g}: few samples carry the "
                f"update. {ADVICE}"
            )
        gap = metrics.get("actor/rollout_train_logprob_gap", math.nan)
        if not math.isnan(gap):
            usual = sum(self._gaps) / len(self._gaps) if self._gaps else math.nan
            if len(self._gaps) == self.window and gap > max(self.gap_growth * usual, self.gap_floor):
                messages.append(
                    f"log-prob gap {gap:.3g} nats per element is more than {self.gap_growth:g} times the mean of the "
                    f"last {self.window} steps ({usual:.3g}). {ADVICE}"
                )
            self._gaps.append(gap)
            if len(self._gaps) > self.window:
                self._gaps.popleft()
        return messages
