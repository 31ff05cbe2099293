# SPDX-License-Identifier: Apache-2.0
"""Prefixes kept from the rescoring for training: the same results, and no trouble when memory runs out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rlinf_phyai.actor.prefix import PrefixKeys
from rlinf_phyai.actor.prefix_store import PrefixStore

MICRO_BATCHES = 6
SOME = 2e-5  # GiB: about half of the step's prefixes
CORRECTION = (
    "algorithm.recompute_logprobs=true",
    "algorithm.importance_sampling_fix=true",
    "algorithm.importance_sampling_clip=10.0",
)
GRPO = ("algorithm.adv_type=grpo", "algorithm.loss_type=actor", "algorithm.group_size=2")
NO_CRITIC = ("actor.model.add_value_head=false", "actor.model.openpi.add_value_head=false")
FUSED, OWN_MODULES = "rollout.phyai.actor_prefix=fused", "rollout.phyai.actor_prefix=real_tokens"


def limit(gib: object) -> str:
    return f"rollout.phyai.actor_prefix_cache_gib={gib}"


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor().clone() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor.clone()


def record_gradients(actor: Any) -> list[dict[str, torch.Tensor]]:
    """Gradients at each optimizer step of the actor, filled while it trains."""
    found: list[dict[str, torch.Tensor]] = []
    original = actor.optimizer_step

    def optimizer_step() -> Any:
        found.append({n: whole(p.grad) for n, p in actor.model.named_parameters() if p.grad is not None})
        return original()

    actor.optimizer_step = optimizer_step
    return found


def train(actor: Any) -> dict[str, Any]:
    """The rest of a step: metrics, gradients at each optimizer step, parameters afterwards."""
    gradients = record_gradients(actor)
    metrics = actor.run_training()
    return {
        "metrics": metrics,
        "gradients": gradients,
        "parameters": {name: whole(p) for name, p in actor.model.named_parameters()},
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Bit for bit."""
    np.testing.assert_equal(found["metrics"], expected["metrics"])
    assert len(found["gradients"]) == len(expected["gradients"])
    for ours, theirs in zip(
        [*found["gradients"], found["parameters"]], [*expected["gradients"], expected["parameters"]], strict=True
    ):
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize(
    "options",
    [(FUSED,), (OWN_MODULES,), (FUSED, *GRPO), (FUSED, *GRPO, *NO_CRITIC)],
    ids=["ppo", "ppo_by_its_own_modules", "grpo_of_a_critics_model", "grpo_without_critic"],
)
def test_keeping_the_prefix_changes_no_bit(make_actor, make_config, give_batch, options):
    results = []
    for gib in (0, 1, SOME):
        actor = make_actor(make_config(*CORRECTION, *options, "algorithm.update_epoch=2", limit(gib)))
        give_batch(actor)
        actor.compute_advantages_and_returns()
        kept = [actor._kept_prefixes.get(i) is not None for i in range(MICRO_BATCHES)]
        assert sum(kept) == {0: 0, 1: MICRO_BATCHES}.get(gib, sum(kept))
        assert gib != SOME or 0 < sum(kept) < MICRO_BATCHES
        result = train(actor)
        assert result["metrics"].pop("actor/prefixes_kept") == pytest.approx(sum(kept) / MICRO_BATCHES)
        assert result["metrics"]["actor/first_update/ratio_max_dev"] == 0.0
        assert actor._kept_prefixes.store.nbytes == 0  # the engine may need the memory from here on
        results.append(result)
    assert len(results[0]["gradients"]) == 4
    assert any(gradient.any() for gradient in results[0]["gradients"][0].values())
    for result in results[1:]:
        assert_same(result, results[0])


def test_auto_keeps_nothing_on_a_cpu(make_actor, make_config, give_batch, caplog):
    actor = make_actor(make_config(*CORRECTION, limit("auto")))
    for _ in range(2):
        give_batch(actor)
        actor.compute_advantages_and_returns()
        assert actor.run_training()["actor/prefixes_kept"] == 0.0
    assert "prefixes kept" not in caplog.text


class GivenMeter:
    """Four GiB, of which the actor and the others take what a test says."""

    total = 4 * 2**30

    def __init__(self) -> None:
        self.others = 2**30

    def begin(self) -> int:
        return self.outside()

    def outside(self) -> int:
        return self.others

    def peaks(self) -> tuple[int, int]:
        return 2**30, 2**30


def test_auto_measures_first_and_gives_way(make_actor, make_config, give_batch, caplog):
    """The actor of a GPU, but for the numbers of its memory."""
    from rlinf_phyai.actor.prefix_budget import MeasuredBudget

    actor = make_actor(make_config(*CORRECTION))
    meter = GivenMeter()
    actor._kept_prefixes.budget = MeasuredBudget(meter)
    fractions, lines = [], []
    for others in (1, 1, 1, 3, 1):
        meter.others = others * 2**30
        give_batch(actor)
        actor.compute_advantages_and_returns()
        metrics = actor.run_training()
        assert metrics["actor/first_update/ratio_max_dev"] == 0.0
        fractions.append(metrics["actor/prefixes_kept"])
        lines.append([r.message for r in caplog.records if "prefixes kept" in r.message])
        caplog.clear()
    assert fractions == [0, 1, 1, 0, 0]  # in the fifth step the fourth's growth is still remembered
    assert [len(found) for found in lines] == [1, 1, 0, 1, 0]  # one for each change
    assert "0 of 6 micro-batches" in lines[0][0]
    assert "the first step measures" in lines[0][0]
    assert "6 of 6 micro-batches" in lines[1][0]
    assert (
        "of 1.5 GiB allowed (auto: of the device's 4 GiB the actor itself needs 1, others hold 1, 0.4 stay free)"
        in lines[1][0]
    )


def test_auto_waits_for_the_end_of_the_critics_warm_up(make_actor, make_config, give_batch):
    """Until then training needs far less memory than later: only the critic's head has gradients."""
    from rlinf_phyai.actor.prefix_budget import MeasuredBudget

    actor = make_actor(
        make_config(*CORRECTION, "actor.optim.critic_warmup_steps=3")
    )  # two optimizer steps in a training step
    actor._kept_prefixes.budget = MeasuredBudget(GivenMeter())
    kept, learning = [], []
    for _ in range(4):
        give_batch(actor)
        actor.compute_advantages_and_returns()
        learning.append(any(p.requires_grad for p in middle_layer(actor).parameters()))
        kept.append(actor.run_training()["actor/prefixes_kept"])
    assert learning == [False, False, True, True]
    assert kept == [0, 0, 0, 1]


def run_out_of_memory(layer: torch.nn.Module, calls: set[int]) -> list[int]:
    """A layer's given calls (counted from 1) find no memory; the list grows with each call."""
    seen: list[int] = []

    def hook(module: Any, arguments: Any) -> None:
        seen.append(len(seen) + 1)
        if seen[-1] in calls:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    layer.register_forward_pre_hook(hook)
    return seen


def middle_layer(actor: Any) -> torch.nn.Module:
    return actor.model.paligemma_with_expert.gemma_expert.model.layers[1]


def test_memory_that_runs_out_while_rescoring_costs_the_prefixes_only(make_actor, make_config, give_batch, caplog):
    actor = make_actor(make_config(*CORRECTION, limit(0)))
    give_batch(actor)
    actor.compute_advantages_and_returns()
    expected = train(actor)

    actor = make_actor(make_config(*CORRECTION, limit(1)))
    seen = run_out_of_memory(middle_layer(actor), {4})
    give_batch(actor)
    actor.compute_advantages_and_returns()
    assert len(seen) == MICRO_BATCHES + 1  # the fourth micro-batch was scored twice
    assert [actor._kept_prefixes.get(i) for i in range(MICRO_BATCHES)] == [None] * MICRO_BATCHES
    assert actor._kept_prefixes.store.nbytes == 0
    assert_same(train(actor), expected)
    messages = [r.message for r in caplog.records if "memory ran out" in r.message]
    assert len(messages) == 1
    assert "rollout.phyai.actor_prefix_cache_gib: 1" in messages[0]

    give_batch(actor)  # and it is not tried again
    actor.compute_advantages_and_returns()
    assert actor.run_training()["actor/prefixes_kept"] == 0.0
    assert len([r for r in caplog.records if "memory ran out" in r.message]) == 1


def test_memory_for_the_prefixes_that_is_not_there(make_actor, make_config, give_batch, monkeypatch, caplog):
    def allocate(store: PrefixStore, first: PrefixKeys) -> None:
        store._blocks.append(torch.empty(4))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")

    monkeypatch.setattr(PrefixStore, "_allocate", allocate)
    actor = make_actor(make_config(*CORRECTION, limit(1)))
    give_batch(actor)
    actor.compute_advantages_and_returns()
    assert actor._kept_prefixes.store.nbytes == 0
    metrics = actor.run_training()
    assert metrics["actor/prefixes_kept"] == 0.0
    assert metrics["actor/first_update/ratio_max_dev"] == 0.0
    assert "memory ran out in taking the memory for them" in caplog.text


@pytest.mark.parametrize("kept", [True, False])
def test_memory_that_runs_out_while_training_names_the_option(make_actor, make_config, give_batch, kept):
    actor = make_actor(make_config(*CORRECTION, limit(int(kept))))
    give_batch(actor)
    actor.compute_advantages_and_returns()
    run_out_of_memory(middle_layer(actor), {2})
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 2.00 GiB") as error:
        actor.run_training()
    assert ("Set rollout.phyai.actor_prefix_cache_gib: 0" in str(error.value)) == kept
    assert actor._kept_prefixes.store.nbytes == 0


def test_a_rank_whose_layers_others_share_repeats_nothing(make_actor, make_config, give_batch):
    actor = make_actor(make_config(*CORRECTION, limit(1)))
    actor._kept_prefixes._repeatable = False
    run_out_of_memory(middle_layer(actor), {4})
    give_batch(actor)
    with pytest.raises(torch.OutOfMemoryError, match=r"Set rollout.phyai.actor_prefix_cache_gib: 0"):
        actor.compute_advantages_and_returns()


@pytest.mark.parametrize(
    "strategy, sharding, whole_model",
    [("fsdp", "no_shard", True), ("fsdp", "full_shard", False), ("fsdp2", "no_shard", False)],
)
def test_where_a_forward_needs_no_other_rank(make_config, strategy, sharding, whole_model):
    from rlinf_phyai.actor.worker import whole_on_every_rank

    fsdp = f"actor.fsdp_config.strategy={strategy}", f"actor.fsdp_config.sharding_strategy={sharding}"
    assert whole_on_every_rank(make_config(*fsdp).actor.fsdp_config) == whole_model


def keys(tokens: int, *, transposed: bool = False) -> PrefixKeys:
    """Two layers of two samples, one head of four numbers: 128 bytes a token. As the kernels leave them: heads last."""
    shape = (2, tokens, 1, 4) if transposed else (2, 1, tokens, 4)
    layers = [torch.rand(shape).transpose(1, 2) if transposed else torch.rand(shape) for _ in range(4)]
    return PrefixKeys(layers[:2], layers[2:], torch.ones(2, tokens, dtype=torch.bool))


@pytest.mark.parametrize("transposed", [False, True])
def test_the_store_keeps_what_fits(transposed):
    """Five image tokens and prompts of these lengths; the memory is counted by the first micro-batch."""
    store = PrefixStore()
    lengths = [3, 20, 4, 2]
    entries = [keys(5 + length, transposed=transposed) for length in lengths]
    store.begin(128 * (8 + 9 + 7), lengths)
    assert store.get(0) is None
    for entry in entries:
        store.add(entry)
    store.agree("cpu")
    assert store.kept == [True, False, True, True]
    assert store.nbytes == 128 * (8 + 9 + 7)
    for index in (0, 2, 3, 4):
        found, entry = store.get(index), entries[index % 4]
        for ours, theirs in zip((*found.keys, *found.values), (*entry.keys, *entry.values), strict=True):
            assert torch.equal(ours, theirs)
            assert ours.stride() == theirs.stride()
            assert ours.data_ptr() != theirs.data_ptr()
        assert torch.equal(found.valid, entry.valid)
    assert store.get(1) is store.get(5) is None
    store.clear()
    assert store.get(0) is None
    assert store.nbytes == 0


def test_a_slice_is_kept_without_what_lies_between():
    wide = torch.rand(2, 6, 1, 12)
    part = PrefixKeys(
        [wide[..., :4].transpose(1, 2)], [wide[..., 4:8].transpose(1, 2)], torch.ones(2, 6, dtype=torch.bool)
    )
    store = PrefixStore()
    store.begin(2**20, [3])
    store.add(part)
    assert store.nbytes == 2 * 2 * 6 * 4 * 4
    found = store.get(0)
    assert torch.equal(found.keys[0], part.keys[0])
    assert torch.equal(found.values[0], part.values[0])


def test_a_store_without_budget_and_a_model_without_keys():
    store = PrefixStore()
    store.begin(0, [3])
    store.add(keys(8))
    assert store.kept == [False]
    store.begin(2**20, [3, 3])
    store.add(None)
    store.add(keys(8))
    assert store.kept == [False, False]
    assert store.nbytes == 0
