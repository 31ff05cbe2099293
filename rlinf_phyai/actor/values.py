# SPDX-License-Identifier: Apache-2.0
"""Where GAE's values come from.

The rescoring evaluates the critic on every ordinary step anyway, in the batches that train, so its values are the
actor's own. With ``rollout.phyai.value_source: actor`` they replace the rollout's, which then skips the critic (it sends NaN)
except where only it sees the observation: the last step of an epoch, and bootstraps, which are inside the rewards.
``auto`` chooses this wherever it is right.
"""

from __future__ import annotations

import math

import torch

from rlinf_phyai.actor.correction import expand_mask

VALUE_SOURCES = ("auto", "rollout", "actor")


def choose_value_source(source: str, recompute: bool, comparable: bool) -> str:
    """``source`` itself, or what ``auto`` stands for; arguments as for :func:`check_value_source`."""
    if source != "auto":
        return source
    return "actor" if recompute and comparable else "rollout"


def check_value_source(source: str, recompute: bool, comparable: bool) -> None:
    """Refuse a source that would give wrong values.

    Args:
        source: ``rollout.phyai.value_source``.
        recompute: ``algorithm.recompute_logprobs``.
        comparable: GAE with the critic after the VLM.

    Raises:
        ValueError: names the key, the value and what to change.
    """
    if source not in VALUE_SOURCES:
        raise ValueError(f"rollout.phyai.value_source is {source!r}; allowed: {', '.join(VALUE_SOURCES)}.")
    if source == "actor" and not recompute:
        raise ValueError(
            "rollout.phyai.value_source is 'actor' but algorithm.recompute_logprobs is off: the values come from the "
            "rescoring. Set algorithm.recompute_logprobs: True, or rollout.phyai.value_source: rollout."
        )
    if source == "actor" and not comparable:
        raise ValueError(
            "rollout.phyai.value_source is 'actor', which needs algorithm.adv_type: gae and "
            "actor.model.openpi.value_after_vlm: True. After the expert the rollout averages the value over all "
            "denoise steps and the rescoring sees one of them. Set rollout.phyai.value_source: rollout."
        )


def actor_values(values: torch.Tensor | None, rollout_values: torch.Tensor) -> torch.Tensor:
    """Values for GAE: the actor's where it has them, the rollout's for the last step.

    Args:
        values: float32 ``[T, B]`` from the rescoring.
        rollout_values: ``[T + 1, B, 1]``; only its last step is used.

    Returns:
        a new tensor like ``rollout_values``.

    Raises:
        ValueError: there are no values, or the shapes do not fit (both are named).
    """
    if values is None:
        raise ValueError("rollout.phyai.value_source is 'actor' but the actor's model returned no values.")
    steps, envs = values.shape
    if tuple(rollout_values.shape) != (steps + 1, envs, 1):
        raise ValueError(
            f"prev_values has shape {tuple(rollout_values.shape)}, the rescoring's values {tuple(values.shape)}: "
            f"expected {(steps + 1, envs, 1)} from the rollout, one value per chunk step and a last one."
        )
    return torch.cat([values.unsqueeze(-1).to(rollout_values), rollout_values[-1:]])


def refuse_missing_values(values: torch.Tensor) -> None:
    """Raise ``ValueError`` where a value is NaN: one NaN poisons the advantages of its whole trajectory.

    Args:
        values: ``[T + 1, B, ...]``. (Values that nobody asked the rollout for travel as NaN.)
    """
    missing = torch.isnan(values).flatten(1).any(dim=1)
    if bool(missing.any()):
        raise ValueError(
            f"prev_values of shape {tuple(values.shape)} is NaN at chunk steps {missing.nonzero().flatten().tolist()}, "
            "but GAE needs every value. Set rollout.phyai.value_source: rollout, or let the actor supply them "
            "(algorithm.recompute_logprobs: True with rollout.phyai.value_source: actor)."
        )


def value_gap_metrics(
    values: torch.Tensor,
    rollout_values: torch.Tensor,
    mask: torch.Tensor | None,
    device: torch.device | str | int = "cpu",
) -> dict[str, float]:
    """Mean and largest ``|V_actor - V_rollout|``, and the root mean square of ``V_actor`` to judge them by, over unmasked
    steps whose rollout value is known; NaN if there is none.

    Args:
        values: ``[T, B]``.
        rollout_values: ``[T + 1, B, 1]``.
        mask: bool ``[T, B, 1]``, ``[T, B, c]`` or ``None``; a chunk counts if any of its actions does.

    A collective call: reduced over all ranks.
    """
    gap = (values - rollout_values[:-1, :, 0].float()).abs()
    known = ~torch.isnan(gap)
    if mask is not None:
        known &= expand_mask(mask.any(dim=-1, keepdim=True), gap.shape)
    gap, size = gap[known].double(), values[known].double().square().sum()
    sums = torch.tensor([float(gap.sum()), float(size), float(gap.numel())], dtype=torch.float64, device=device)
    maximum = torch.tensor([float(gap.max()) if gap.numel() else 0.0], dtype=torch.float64, device=device)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(sums, op=torch.distributed.ReduceOp.SUM)
        torch.distributed.all_reduce(maximum, op=torch.distributed.ReduceOp.MAX)
    total, squares, count = sums.tolist()
    return {
        "actor/rollout_train_value_gap": total / count if count else math.nan,
        "actor/rollout_train_value_gap_max": float(maximum) if count else math.nan,
        "actor/rollout_train_value_rms": math.sqrt(squares / count) if count else math.nan,
    }
