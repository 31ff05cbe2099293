# SPDX-License-Identifier: Apache-2.0
"""Limits of the mismatch between rollout and actor, and verdicts against them.

Judged are figures that stay small for two correct implementations of one policy: the gap per log-prob element, the
Gaussian divergence, the mean weight and the effective sample size. The clip fraction is not: with a bound of 1.0 and
symmetric rounding noise about half of all weights exceed it, and nothing is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch


@dataclass(frozen=True)
class Limits:
    """Every field is a limit that a user may set.

    Attributes:
        weight_low, weight_high: range of the mean importance weight.
        effective_sample_size: smallest share of effective samples, in (0, 1].
        logprob_gap: largest mean ``|p - q|``, nats per element.
        kl: largest mean divergence per sample, nats.
        value_gap: largest mean ``|V_actor - V_rollout|``; of values larger than 1, as a share of their root mean square.
    """

    weight_low: float = 0.5
    weight_high: float = 2.0
    effective_sample_size: float = 0.3
    logprob_gap: float = 0.01
    kl: float = 2e-3
    value_gap: float = 0.05

    @classmethod
    def for_dtype(cls, dtype: torch.dtype, prefix_precision: str | None = None) -> Limits:
        """Limits of an engine whose matrices have this type and whose prefix MLPs run in ``prefix_precision``.

        The defaults are bfloat16's: about twice the worst that was measured between two correct sides at full size, in real runs and over
        batch sizes and denoise steps (gap 0.005, KL 9.9e-4; docs/performance.md). In float32 only
        the order of summation differs (without TF32): two correct sides of the tiny model lie at 2e-7, the smallest planted fault
        in tests/unit/check, the other GELU, far above these limits. An FP8 prefix is measured at a gap of 0.016, a KL of 9.7e-3
        and a largest single value gap of 0.2; its limits are about three times that.
        """
        if prefix_precision == "fp8":
            return cls(logprob_gap=0.05, kl=0.03, value_gap=0.3)
        return cls(logprob_gap=5e-6, kl=1e-8, value_gap=5e-6) if dtype == torch.float32 else cls()

    def replaced(self, pairs: Mapping[str, float]) -> Limits:
        """These limits with some of them replaced.

        Raises:
            ValueError: an unknown name or a value that is not a positive number.
        """
        known = [f.name for f in fields(self)]
        for name, value in pairs.items():
            if name not in known:
                raise ValueError(f"unknown limit {name!r}; allowed: {', '.join(known)}.")
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"limit {name} is {value}; it must be a positive number.")
        return replace(self, **pairs)


@dataclass(frozen=True)
class Verdict:
    """One figure against its limit.

    Attributes:
        name: the metric.
        value: its value; NaN counts as failed (nothing was measured).
        limit: the limit in words.
        ok: within it.
        meaning: what a failure means, in a sentence.
    """

    name: str
    value: float
    limit: str
    ok: bool
    meaning: str

    def __str__(self) -> str:
        return f"{self.name} is {self.value:.4g}, allowed: {self.limit}" + ("" if self.ok else f" -- {self.meaning}")


def judge(metrics: Mapping[str, float], limits: Limits) -> list[Verdict]:
    """Verdicts on a step's metrics; a metric that was not reported is left out."""
    verdicts: list[Verdict] = []

    def add(name: str, low: float | None, high: float | None, meaning: str) -> None:
        if name not in metrics:
            return
        value = metrics[name]
        ok = not math.isnan(value) and (low is None or value >= low) and (high is None or value <= high)
        if low is not None and high is not None:
            limit = f"{low:g} to {high:g}"
        else:
            limit = f"at least {low:g}" if low is not None else f"at most {high:g}"
        verdicts.append(Verdict(name, value, limit, ok, meaning))

    add(
        "actor/rollout_train_logprob_gap",
        None,
        limits.logprob_gap,
        "engine and actor score the same actions differently: different weights, inputs, kernels or precision",
    )
    add("actor/rollout_train_kl", None, limits.kl, "the two policies are different distributions, beyond rounding")
    add(
        "actor/importance_sampling_weight",
        limits.weight_low,
        limits.weight_high,
        "on average the actor finds the sampled actions much more or much less likely than the engine reported",
    )
    add(
        "actor/importance_sampling_effective_sample_size",
        limits.effective_sample_size,
        None,
        "few samples carry most of the weight",
    )
    add(
        "actor/rollout_train_value_gap",
        None,
        limits.value_gap * max(1.0, metrics.get("actor/rollout_train_value_rms", 1.0)),  # rounding is relative
        "engine and actor disagree about the critic: other value weights, or another pooling of the prefix",
    )
    return verdicts
