# SPDX-License-Identifier: Apache-2.0
"""The real actor (FSDP2, gloo, one rank) on trajectories with the shapes of a real run."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

CORRECTION = (
    "algorithm.recompute_logprobs=true",
    "algorithm.importance_sampling_fix=true",
    "algorithm.importance_sampling_clip=10.0",
)
EMBEDDING = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
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
        ("rollout.phyai.actor_prefix=dense", "algorithm.update_epoch=2"),
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


def test_masked_micro_batches_count_nowhere(make_actor, make_config, give_batch):
    actor = make_actor(make_config(*CORRECTION))
    batch = give_batch(actor)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(7))
    for sample in order[:2].tolist():  # the whole first micro-batch ...
        batch["loss_mask"][sample // 4, sample % 4] = False
    masked = order[2].item()  # ... and half of the second
    batch["loss_mask"][masked // 4, masked % 4] = False
    batch["prev_logprobs"][~batch["loss_mask"].squeeze(-1)] += 3.0  # what they report is nonsense
    metrics = step(actor)
    assert metrics["actor/first_update/ratio_max_dev"] == 0.0
    assert metrics["actor/importance_sampling_weight_max"] == pytest.approx(1.0, abs=1e-3)
    assert metrics["actor/rollout_train_logprob_gap"] < 1e-4
    # RLinf's explained variance divides by the variance of a micro-batch's returns.
    assert [k for k, v in metrics.items() if not math.isfinite(v) and k != "critic/explained_variance"] == []


def test_a_step_that_is_masked_as_a_whole_reports_no_nan(make_actor, make_config, give_batch):
    actor = make_actor(make_config(*CORRECTION, *NO_LEARNING, "rollout.phyai.value_source=auto"))
    batch = give_batch(actor)
    batch["loss_mask"][:] = False
    metrics = step(actor)
    ours = ("actor/importance", "actor/rollout_train", "actor/behav", "actor/first_update")
    assert [name for name in metrics if name.startswith(ours)] == []
    assert all(math.isnan(value) for value in actor.correction_metrics.values())


def test_a_denoise_step_that_was_not_drawn_is_left_out(make_actor, make_config, give_batch):
    actor = make_actor(make_config(*CORRECTION))
    drawn = give_batch(actor)["forward_inputs"]["denoise_inds"]
    drawn[:] = 1
    metrics = step(actor)
    steps = {name for name in metrics if name.startswith("actor/rollout_train_kl/")}
    assert steps == {"actor/rollout_train_kl/step_1"}
    assert metrics["actor/rollout_train_kl"] == metrics["actor/rollout_train_kl/step_1"]


@pytest.mark.parametrize("level, elements", [("token_level", 1), ("action_level", 7), ("chunk_level", 35)])
@pytest.mark.parametrize("offset", [0.01, -0.02])
def test_an_offset_acts_as_computed_by_hand(make_actor, make_config, give_batch, level, elements, offset):
    bound = "algorithm.importance_sampling_clip=1.01"
    overrides = (*CORRECTION, *NO_LEARNING, f"algorithm.logprob_type={level}", bound)
    plain_actor = make_actor(make_config(*overrides))
    give_batch(plain_actor)
    plain = step(plain_actor)

    batch = give_batch(plain_actor)
    batch["prev_logprobs"] += offset
    shifted = step(plain_actor)
    weight = math.exp(-offset * elements)
    assert shifted["actor/rollout_train_logprob_gap"] == pytest.approx(abs(offset), rel=1e-3)
    assert shifted["actor/importance_sampling_weight"] == pytest.approx(weight, rel=1e-4)
    assert shifted["actor/behav_approx_kl"] == pytest.approx(offset * elements, rel=1e-3)
    assert shifted["actor/importance_sampling_clip_fraction"] == float(weight > 1.01)
    assert shifted["actor/first_update/ratio_max_dev"] == 0.0
    # The policy loss of every update carries the bounded weight; the critic's loss does not.
    ratio = shifted["actor/policy_loss"] / plain["actor/policy_loss"]
    assert ratio == pytest.approx(min(weight, 1.01), rel=1e-3)
    assert shifted["critic/value_loss"] == plain["critic/value_loss"]


ALGORITHMS = {
    "ppo": (),
    "grpo": (
        "algorithm.adv_type=grpo",
        "algorithm.loss_type=actor",
        "algorithm.group_size=2",
        "actor.model.add_value_head=false",
        "actor.model.openpi.add_value_head=false",
    ),
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("joint", [False, True], ids=["one_step", "joint"])
def test_without_learning_rate_nothing_moves(make_actor, make_config, give_batch, algorithm, joint):
    overrides = (*CORRECTION, *NO_LEARNING, *ALGORITHMS[algorithm], f"actor.model.openpi.joint_logprob={joint}")
    actor = make_actor(make_config(*overrides, "algorithm.update_epoch=2"))
    assert hasattr(actor.model, "value_head") == (algorithm == "ppo")
    before = parameters(actor)
    for _ in range(3):
        batch = give_batch(actor)
        if joint:
            inds = batch["forward_inputs"]["denoise_inds"]
            inds[:] = torch.arange(inds.shape[-1])
        metrics = step(actor)
        assert metrics["actor/approx_kl"] == 0.0
        assert metrics["actor/clip_fraction"] == 0.0
        assert metrics["actor/first_update/ratio_max_dev"] == 0.0
    after = parameters(actor)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_with_both_flags_off_it_is_stock_rlinf(make_actor, make_config, give_batch, algorithm):
    cfg = make_config("algorithm.update_epoch=2", "rollout.phyai.actor_prefix=dense", *ALGORITHMS[algorithm])
    results = []
    for stock in (True, False):
        actor = make_actor(cfg, stock=stock)
        metrics = []
        for _ in range(2):
            give_batch(actor)
            metrics.append((actor.compute_advantages_and_returns(), actor.run_training()))
        results.append((metrics, parameters(actor)))
    (stock_metrics, stock_parameters), (metrics, ours) = results
    np.testing.assert_equal(metrics, stock_metrics)  # exact; NaN (a variance of one sample) equals NaN
    assert all(torch.equal(ours[name], stock_parameters[name]) for name in stock_parameters)
    moved = sum(not torch.equal(ours[n], p) for n, p in parameters(make_actor(cfg)).items())
    assert moved > 10


def test_the_timer_runs_once_per_step(make_actor, make_config, give_batch):
    actor = make_actor(make_config(*CORRECTION))
    give_batch(actor)
    step(actor)
    times = actor.pop_execution_times()
    assert 0 < times["actor/recompute_logprobs"] <= times["actor/recompute_logprobs"] + times["actor/compute_adv"]
    assert times["run_training"] > 0
    off = make_actor(make_config())
    off._timer_metrics = {}
    give_batch(off)
    off.compute_advantages_and_returns()
    assert "actor/recompute_logprobs" not in off.pop_execution_times()


def test_offloaded_weights_are_loaded_first(make_actor, make_config, give_batch, monkeypatch):
    actor = make_actor(make_config(*CORRECTION, "actor.enable_offload=true"))
    assert actor.is_weight_offloaded
    loads = []
    original = actor.load_param_and_grad
    monkeypatch.setattr(actor, "load_param_and_grad", lambda *a: (loads.append(a), original(*a)))
    give_batch(actor)
    metrics = step(actor)
    assert len(loads) == 1
    assert metrics["actor/first_update/ratio_max_dev"] == 0.0


@pytest.mark.parametrize("source", ["actor", "auto"])
@pytest.mark.parametrize("auto_reset", [False, True])
def test_the_actors_values_replace_the_rollouts(make_actor, make_config, give_batch, source, auto_reset):
    """Advantages and returns are those of stock RLinf with the actor's own values at every step."""
    episodes = f"env.train.auto_reset={auto_reset}"
    actor = make_actor(make_config(*CORRECTION, f"rollout.phyai.value_source={source}", episodes))
    stock = make_actor(make_config(episodes), stock=True)
    # The critic of both actors starts from the same seed as the model that recorded the batch.
    batch = give_batch(stock)
    stock.compute_advantages_and_returns()
    expected = stock.rollout_batch

    values = batch["prev_values"].clone()
    values[:-1] = torch.nan  # the rollout computed none but the last
    give_batch(actor, prev_values=values)
    actor.compute_advantages_and_returns()
    for name in ("advantages", "returns"):
        torch.testing.assert_close(actor.rollout_batch[name], expected[name], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(actor.rollout_batch["prev_values"], batch["prev_values"], rtol=1e-5, atol=1e-5)
    assert "actor/rollout_train_value_gap" not in actor.run_training()  # there is nothing to compare with


def test_the_gap_of_the_values_is_measured_where_both_sides_have_them(make_actor, make_config, give_batch):
    actor = make_actor(make_config(*CORRECTION, "rollout.phyai.value_source=rollout"))
    values = give_batch(actor)["prev_values"]
    values += 0.25
    metrics = step(actor)
    assert metrics["actor/rollout_train_value_gap"] == pytest.approx(0.25, rel=1e-4)
    assert metrics["actor/rollout_train_value_gap_max"] == pytest.approx(0.25, rel=1e-4)


def test_a_missing_value_stops_before_gae(make_actor, make_config, give_batch):
    actor = make_actor(make_config())
    batch = give_batch(actor)
    batch["prev_values"][1, 2] = torch.nan
    with pytest.raises(ValueError, match=r"NaN at chunk steps \[1\].*value_source"):
        actor.compute_advantages_and_returns()


def test_bucket_sync_leaves_out_the_experts_language_head(make_actor, make_config):
    stock, ours = make_actor(make_config(), stock=True), make_actor(make_config())
    left_out = set(stock.param_names_need_sync) - set(ours.param_names_need_sync)
    assert left_out == {"paligemma_with_expert.gemma_expert.lm_head.weight"}


def test_config_of_the_worker_names_the_corrected_loss(make_config):
    from rlinf_phyai.actor.correction import CorrectionConfig
    from rlinf_phyai.actor.worker import corrected_config

    cfg = make_config(*CORRECTION)
    corrected = corrected_config(cfg, CorrectionConfig.from_config(cfg))
    assert (corrected.algorithm.loss_type, cfg.algorithm.loss_type) == ("phyai_actor_critic", "actor_critic")
    off = make_config()
    assert corrected_config(off, CorrectionConfig.from_config(off)) is off
    unknown = make_config(*CORRECTION, "algorithm.loss_type=decoupled_actor_critic")
    with pytest.raises(ValueError, match=r"'decoupled_actor_critic'.*actor_critic, actor"):
        corrected_config(unknown, CorrectionConfig.from_config(unknown))


@pytest.mark.parametrize("choice", ["off", "warn", "stop"])
def test_self_check_before_the_first_update(make_actor, make_config, give_batch, caplog, choice):
    from rlinf_phyai.errors import PhyaiError

    actor = make_actor(make_config(*CORRECTION, f"rollout.phyai.self_check={choice}"))
    give_batch(actor)
    actor.compute_advantages_and_returns()  # nothing to complain about
    assert "disagree" not in caplog.text

    actor._self_check = choice  # as at the start of a run
    give_batch(actor)["prev_logprobs"] += 0.3
    if choice == "stop":
        with pytest.raises(PhyaiError, match=r"logprob_gap is 0.3, allowed: at most 0.01.*self_check: stop"):
            actor.compute_advantages_and_returns()
        return
    actor.compute_advantages_and_returns()
    assert ("self-check: rollout and actor disagree" in caplog.text) == (choice == "warn")
    caplog.clear()
    give_batch(actor)["prev_logprobs"] += 0.3
    actor.compute_advantages_and_returns()  # only once
    assert "self-check" not in caplog.text


def test_ckpt_path_replaces_every_weight_of_the_actor(make_actor, make_config, tmp_path):
    """Frozen parameters and the critic included, before anything is trained."""
    state = {name: value + 0.25 for name, value in parameters(make_actor(make_config())).items()}
    tied = {"paligemma_with_expert.paligemma.lm_head.weight": state[EMBEDDING]}
    torch.save(state | tied, tmp_path / "run.pt")
    actor = make_actor(make_config(f"runner.ckpt_path={tmp_path / 'run.pt'}"))
    found = parameters(actor)
    assert found.keys() == state.keys()
    assert [name for name in found if not torch.equal(found[name], state[name])] == []
    assert any(not p.requires_grad for p in actor.model.parameters())
