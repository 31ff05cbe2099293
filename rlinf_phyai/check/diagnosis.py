# SPDX-License-Identifier: Apache-2.0
"""The likely cause of a failed check, where the figures tell it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rlinf_phyai.actor.limits import Verdict

GAP, VALUE_GAP = "actor/rollout_train_logprob_gap", "actor/rollout_train_value_gap"
_SAME = 0.01  # of the mean difference: a spread below it is rounding on top of a constant


def likely_cause(verdicts: Mapping[str, Verdict], p: torch.Tensor, q: torch.Tensor) -> str | None:
    """A sentence, or ``None`` where nothing failed or the figures fit several causes.

    A cause explains all that follows from it, so the first that applies is named: weights, inputs, the critic, a constant, the
    prefix (which alone the critic after the VLM reads).

    Args:
        verdicts: by name.
        p, q: log-probs of actor and engine, of one shape.
    """
    failed = {name for name, verdict in verdicts.items() if not verdict.ok}
    for start, cause in (
        ("parameters that differ", "the engine does not hold the actor's weights; what else differs follows from that"),
        ("input pixels", "the two models do not see the same observation; what else differs follows from that"),
    ):
        if any(name.startswith(start) for name in failed):
            return cause
    if GAP not in failed:
        return "the critic alone: its head, or the pooling of the prefix" if VALUE_GAP in failed else None
    difference = (p - q).double().flatten()
    mean = float(difference.mean())
    if float(difference.std()) < _SAME * abs(mean):
        return f"every log-prob is off by {mean:.4g}: a constant is added on one side, such as rollout.phyai.debug_logprob_offset"
    if VALUE_GAP in failed:
        return (
            "the prefix (vision, prompt or language layers): values and scores differ, weights and inputs are the same"
        )
    return None  # a value within its limit does not clear the prefix: the critic may hardly depend on it
