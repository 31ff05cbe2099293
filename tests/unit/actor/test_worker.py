# SPDX-License-Identifier: Apache-2.0
"""The real actor (FSDP2, gloo, one rank) on trajectories with the shapes of a real run."""

from __future__ import annotations

import math

import pytest
import torch

CORRECTION = (
    "algorithm.recompute_logprobs=true",
    "algorithm.importance_sampling_fix=true",
    "algorithm.importance_sampling_clip=10.0",
)
NO_LEARNING = ("actor.optim.lr=0.0", "actor.optim.value_lr=0.0")


def step(actor) -> dict[str, float]:
    """One training step as the runner drives it."""
    actor.compute_advantages_and_returns()
    return actor.run_training()


def parameters(actor) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor().clone() for name, p in actor.model.named_parameters()}


@pytest.mark.parametrize(
    "arithmetic",
    [
        (),
        ("algorithm.update_epoch=2",),
        ("actor.global_batch_size=12", "actor.micro_batch_size=4"),
        ("actor.global_batch_size=12", "actor.micro_batch_size=3", "algorithm.update_epoch=2"),
        ("actor.global_batch_size=1", "actor.micro_batch_size=1"),
        ("algorithm.logprob_type=token_level",),
        ("algorithm.logprob_type=action_level",),
        (
            "algorithm.adv_type=grpo",
            "algorithm.loss_type=actor",
            "algorithm.group_size=2",
            "actor.model.add_value_head=true",
        ),
        ("actor.model.openpi.value_after_vlm=false",),
    ],
    ids=lambda a: ",".join(x.split(".")[-1] for x in a) or "base",
)
def test_the_first_update_starts_exactly_on_policy(make_actor, make_config, give_batch, arithmetic):
    actor = make_actor(make_config(*CORRECTION, *arithmetic))
    give_batch(actor)
    metrics = step(actor)
    assert metrics["actor/first_update/ratio_max_dev"] == 0.0
    assert metrics["actor/first_update/clip_fraction"] == 0.0
    assert metrics["actor/importance_sampling_weight"] == pytest.approx(1.0, abs=1e-3)
