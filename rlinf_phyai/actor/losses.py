# SPDX-License-Identifier: Apache-2.0
"""RLinf's policy losses with an importance weight on the advantage.

RLinf builds the arguments of its policy loss inside ``train_micro_batch`` and looks the loss up by name, so the way
in is a
registered loss: ``phyai_<name>`` multiplies the *preprocessed* advantages (broadcast to the log-probs' granularity)
    by the
weight and calls RLinf's own ``<name>``. What belongs to the micro-batch at hand travels in a context variable.
Multiplying by a weight >= 0 before the clip equals weighting the clipped loss of each unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from rlinf_phyai.actor.correction import expand_mask

LOSS_PREFIX = "phyai_"
CORRECTED_LOSSES = ("actor_critic", "actor")
"""RLinf losses that have a corrected twin: PPO with a critic, and GRPO."""

Loss = Callable[..., tuple[torch.Tensor, dict[str, Any]]]


@dataclass
class FirstUpdate:
    """Largest ``|ratio - 1|`` and the clipped share over the unmasked units before the first optimizer step.

    RLinf averages its own ``actor/ratio`` and ``actor/clip_fraction`` over all optimizer steps and counts fully masked
    micro-batches as 0, so neither tells whether the first update starts on policy.
    """

    max_deviation: float = 0.0
    clipped: int = 0
    units: int = 0

    def observe(self, kwargs: dict[str, Any]) -> None:
        """Add one micro-batch, given the preprocessed arguments of RLinf's loss (tensors share the units' shape)."""
        logprobs, old = kwargs["logprobs"].detach(), kwargs["old_logprobs"]
        mask = expand_mask(kwargs.get("loss_mask"), logprobs.shape, logprobs.device)
        ratio = torch.exp(logprobs - old)
        advantages = kwargs["advantages"]
        low, high = 1.0 - kwargs["clip_ratio_low"], 1.0 + kwargs["clip_ratio_high"]
        # RLinf's definition: the clip acts where it makes the loss larger.
        clipped = (-advantages * ratio < -advantages * ratio.clamp(low, high)) & mask
        self.units += int(mask.sum())
        self.clipped += int(clipped.sum())
        if bool(mask.any()):
            self.max_deviation = max(self.max_deviation, float((ratio - 1.0).abs()[mask].max()))


@dataclass(frozen=True)
class MicroBatchCorrection:
    """What a corrected loss needs beside RLinf's arguments.

    Attributes:
        weights: float32, one per unit of the micro-batch; ``None`` leaves the advantages alone.
        first_update: collects the ratio while no optimizer step has been taken; ``None`` afterwards.
    """

    weights: torch.Tensor | None = None
    first_update: FirstUpdate | None = field(default=None)


_current: ContextVar[MicroBatchCorrection | None] = ContextVar("rlinf_phyai_micro_batch_correction", default=None)


@contextmanager
def correcting(correction: MicroBatchCorrection) -> Iterator[None]:
    """Make ``correction`` the one that corrected losses see inside the block."""
    token = _current.set(correction)
    try:
        yield
    finally:
        _current.reset(token)


def corrected_loss(name: str, loss: Loss) -> Loss:
    """Wrap RLinf's loss ``name``; the result takes the same keyword arguments.

    Raises:
        RuntimeError: called outside :func:`correcting`.
        ValueError: the weights do not match the preprocessed log-probs (both shapes are named).
    """

    def weighted(**kwargs: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        correction = _current.get()
        if correction is None:
            raise RuntimeError(
                f"policy loss {LOSS_PREFIX}{name} ran outside of PhyaiActorWorker.train_micro_batch; use {name!r}."
            )
        if correction.first_update is not None:
            correction.first_update.observe(kwargs)
        if correction.weights is not None:
            logprobs = kwargs["logprobs"]
            if correction.weights.shape != logprobs.shape:
                raise ValueError(
                    f"importance weights have shape {tuple(correction.weights.shape)} but the loss compares "
                    f"log-probs of shape {tuple(logprobs.shape)}; check algorithm.logprob_type and "
                    "actor.model.action_dim."
                )
            kwargs["advantages"] = kwargs["advantages"] * correction.weights
        return loss(**kwargs)

    weighted.__name__ = f"{LOSS_PREFIX}{name}"
    return weighted


def register_corrected_losses() -> None:
    """Register ``phyai_<name>`` for every loss in :data:`CORRECTED_LOSSES`. Calling it again changes nothing."""
    import rlinf.algorithms  # noqa: F401  (fills RLinf's registry)
    from rlinf.algorithms.registry import LOSS_REGISTRY, get_policy_loss, register_policy_loss

    for name in CORRECTED_LOSSES:
        if LOSS_PREFIX + name not in LOSS_REGISTRY:
            register_policy_loss(LOSS_PREFIX + name)(corrected_loss(name, get_policy_loss(name)))
