# SPDX-License-Identifier: Apache-2.0
"""The corrected losses through RLinf's own ``policy_loss`` entry, preprocessing included."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from rlinf.algorithms.registry import LOSS_REGISTRY, policy_loss

from rlinf_phyai.actor.correction import CorrectionConfig, advantage_weights
from rlinf_phyai.actor.losses import (
    CORRECTED_LOSSES,
    LOSS_PREFIX,
    FirstUpdate,
    MicroBatchCorrection,
    correcting,
    register_corrected_losses,
)

BASE = CorrectionConfig(recompute=True, fix=True, clip=1.5)
ALLOWED = [
    ("chunk_level", "token_level"),
    ("chunk_level", "action_level"),
    ("chunk_level", "chunk_level"),
    ("action_level", "token_level"),
    ("action_level", "action_level"),
]


@pytest.fixture(autouse=True)
def _registered():
    register_corrected_losses()


def arguments(reward_type: str, logprob_type: str, *, batch: int = 6, c: int = 5, d: int = 7, seed: int = 0) -> dict:
    """What ``train_micro_batch`` passes on, with the shapes of real batches."""
    g = torch.Generator().manual_seed(seed)
    width = 1 if reward_type == "chunk_level" else c

    def normal(*shape):
        return torch.randn(*shape, generator=g)

    old = normal(batch, c, d)
    return {
        "loss_type": "actor_critic",
        "logprob_type": logprob_type,
        "reward_type": reward_type,
        "single_action_dim": d,
        "task_type": "embodied",
        "logprobs": (old + 0.05 * normal(batch, c, d)).requires_grad_(),
        "old_logprobs": old,
        "values": normal(batch).requires_grad_() if width == 1 else normal(batch, c).requires_grad_(),
        "prev_values": normal(batch, width),
        "returns": normal(batch, width),
        "advantages": normal(batch, width),
        "loss_mask": torch.rand(batch, width, generator=g) > 0.3,
        "loss_mask_sum": None,
        "clip_ratio_high": 0.2,
        "clip_ratio_low": 0.2,
        "value_clip": 0.2,
        "huber_delta": 10.0,
        "max_episode_steps": 240,
        "critic_warmup": False,
    }


def run(kwargs: dict, weights=None, first=None, loss_type: str = "phyai_actor_critic"):
    with correcting(MicroBatchCorrection(weights, first)):
        return policy_loss(**{**kwargs, "loss_type": loss_type})


@pytest.mark.parametrize("level", ["token_level", "action_level", "chunk_level"])
@pytest.mark.parametrize("name", CORRECTED_LOSSES)
def test_the_vector_of_ln_2(level, name):
    # Two elements per unit are summed at action and chunk level, so each carries ln(2) / 2.
    per_element = math.log(2) if level == "token_level" else math.log(2) / 2
    cfg = replace(BASE, logprob_type=level, action_dim=2)
    p = torch.zeros(3, 1, 2)
    q = p - per_element
    kwargs = arguments("chunk_level", level, batch=3, c=1, d=2) | {
        "logprobs": p.clone().requires_grad_(),
        "old_logprobs": p,
        "advantages": torch.ones(3, 1),
        "loss_mask": None,
        "values": torch.zeros(3),
        "prev_values": torch.zeros(3, 1),
        "returns": torch.zeros(3, 1),
    }
    first = FirstUpdate()
    loss, metrics = run(kwargs, advantage_weights(p, q, cfg), first, LOSS_PREFIX + name)
    assert loss.item() == pytest.approx(-1.5, rel=1e-6)
    assert metrics["actor/ratio"] == 1.0
    assert metrics["actor/clip_fraction"] == 0.0
    assert (first.max_deviation, first.clipped) == (0.0, 0)


@pytest.mark.parametrize("name", CORRECTED_LOSSES)
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("reward_type, logprob_type", ALLOWED)
def test_equals_rlinfs_loss_on_weighted_advantages(reward_type, logprob_type, masked, name):
    kwargs = arguments(reward_type, logprob_type)
    if not masked:
        kwargs["loss_mask"] = None
    cfg = replace(BASE, logprob_type=logprob_type)
    q = kwargs["old_logprobs"] + 0.1 * torch.randn(6, 5, 7, generator=torch.Generator().manual_seed(1))
    weights = advantage_weights(kwargs["old_logprobs"], q, cfg)

    loss, metrics = run(kwargs, weights, loss_type=LOSS_PREFIX + name)
    loss.backward()
    gradients = [kwargs["logprobs"].grad.clone(), kwargs["values"].grad]

    # By hand: the same loss, its preprocessed advantages multiplied by the weight.
    reference = arguments(reward_type, logprob_type)
    if not masked:
        reference["loss_mask"] = None
    unweighted = LOSS_REGISTRY[name]
    LOSS_REGISTRY["by_hand"] = lambda **kw: unweighted(**{**kw, "advantages": kw["advantages"] * weights})
    try:
        expected, expected_metrics = policy_loss(**{**reference, "loss_type": "by_hand"})
    finally:
        del LOSS_REGISTRY["by_hand"]
    expected.backward()
    assert torch.equal(loss, expected)
    assert metrics == expected_metrics
    assert torch.equal(gradients[0], reference["logprobs"].grad)
    if name == "actor_critic":
        assert torch.equal(gradients[1], reference["values"].grad)


@pytest.mark.parametrize("reward_type, logprob_type", ALLOWED)
def test_weighting_the_advantage_weights_each_clipped_loss(reward_type, logprob_type):
    """Independent of how RLinf aggregates: with one unit kept by the mask, the loss scales by that unit's weight."""
    cfg = replace(BASE, logprob_type=logprob_type)
    kwargs = arguments(reward_type, logprob_type, batch=1, c=5 if logprob_type == "chunk_level" else 1, d=7)
    if logprob_type == "token_level":
        kwargs = arguments(reward_type, logprob_type, batch=1, c=1, d=1)
        cfg = replace(cfg, action_dim=1)
    kwargs["loss_mask"] = None
    q = kwargs["old_logprobs"] + 0.02
    weights = advantage_weights(kwargs["old_logprobs"], q, cfg)
    weighted, _ = run(kwargs, weights, loss_type="phyai_actor")
    plain, _ = run(kwargs, None, loss_type="phyai_actor")
    torch.testing.assert_close(weighted, plain * weights.flatten()[0], rtol=1e-6, atol=0)


def test_without_weights_it_is_rlinfs_loss():
    kwargs = arguments("chunk_level", "chunk_level")
    loss, metrics = run(kwargs)
    expected, expected_metrics = policy_loss(**kwargs)
    assert torch.equal(loss, expected)
    assert metrics == expected_metrics


def test_the_critic_is_untouched():
    kwargs = arguments("chunk_level", "chunk_level")
    loss, _ = run(kwargs, torch.zeros(6))
    loss.backward()
    critic = arguments("chunk_level", "chunk_level")
    expected, _ = policy_loss(**critic)
    expected.backward()
    assert torch.equal(kwargs["values"].grad, critic["values"].grad)
    assert torch.count_nonzero(kwargs["logprobs"].grad) == 0


def test_a_masked_sample_has_no_gradient_whatever_its_weight():
    kwargs = arguments("chunk_level", "action_level")
    kwargs["loss_mask"] = torch.tensor([[True], [False], [True], [True], [False], [True]])
    loss, _ = run(kwargs, torch.full((6, 5), 1e8))
    loss.backward()
    masked = ~kwargs["loss_mask"].flatten()
    assert torch.count_nonzero(kwargs["logprobs"].grad[masked]) == 0


def test_weights_of_the_wrong_granularity_name_both_shapes():
    with pytest.raises(ValueError, match=r"\(6, 5\).*\(6,\)"):
        run(arguments("chunk_level", "chunk_level"), torch.ones(6, 5))


def test_outside_of_the_worker_it_says_which_loss_to_use():
    with pytest.raises(RuntimeError, match="'actor_critic'"):
        policy_loss(**(arguments("chunk_level", "chunk_level") | {"loss_type": "phyai_actor_critic"}))


def test_the_correction_ends_with_its_block():
    with pytest.raises(ZeroDivisionError), correcting(MicroBatchCorrection()):
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="outside of PhyaiActorWorker"):
        policy_loss(**(arguments("chunk_level", "chunk_level") | {"loss_type": "phyai_actor"}))


def test_registering_twice_keeps_the_first():
    before = {name: LOSS_REGISTRY[LOSS_PREFIX + name] for name in CORRECTED_LOSSES}
    register_corrected_losses()
    assert all(LOSS_REGISTRY[LOSS_PREFIX + name] is loss for name, loss in before.items())
