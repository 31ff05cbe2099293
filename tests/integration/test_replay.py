# SPDX-License-Identifier: Apache-2.0
"""Trajectories of a real run, replayed into the real actor in this process: it must compute what it did in the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.conftest import TINY, Run, checkpoint_of, load
from tests.integration.driver import actor_weights, optimizer_state

pytestmark = pytest.mark.integration

# Everything that the actor reports about its update, except what depends on time.
COMPARED = (
    "train/actor/policy_loss",
    "train/actor/grad_norm",
    "train/actor/ratio",
    "train/actor/importance_sampling_weight",
    "train/actor/importance_sampling_weight_max",
    "train/actor/importance_sampling_clip_fraction",
    "train/actor/rollout_train_logprob_gap",
    "train/actor/first_update/ratio_max_dev",
    "train/critic/value_loss",
    "rollout/returns_mean",
    "rollout/advantages_mean",
)


@pytest.fixture
def make_actor(tiny_checkpoint: Path, repository: Path) -> Callable[..., Any]:
    """``make_actor(*overrides)`` builds the actor of the recorded run in this process."""
    from hydra import compose, initialize_config_dir

    from rlinf_phyai import plugin
    from rlinf_phyai.actor.in_process import in_process_actor, start_process_group

    plugin.register()
    start_process_group()

    def make(*overrides: str) -> Any:
        own = [f"actor.model.model_path={tiny_checkpoint}", "rollout.phyai.value_source=rollout"]
        with initialize_config_dir(str(repository / "examples" / "embodiment" / "config"), version_base="1.3"):
            return in_process_actor(compose(TINY, [*own, *overrides]))

    return make


def set_first_weights(worker: Any, run: Run) -> None:
    """Those that the actor had before its first update."""
    weights = load(run.record_dir / "sync_0.pt")["actor"]
    with torch.no_grad():
        for name, parameter in worker.model.named_parameters():
            parameter.to_local().copy_(weights[name])


@pytest.fixture
def actor(make_actor: Callable[..., Any], recorded_run: Run) -> Any:
    """With the weights that it had before its first update."""
    worker = make_actor()
    set_first_weights(worker, recorded_run)
    return worker


def test_one_step_again(actor: Any, recorded_run: Run) -> None:
    """Rescoring, correction, GAE and one PPO update of step 0."""
    actor.rollout_batch = load(recorded_run.record_dir / "batch_0.pt")
    replayed = {f"rollout/{name}": value for name, value in actor.compute_advantages_and_returns().items()}
    replayed.update({f"train/{name}": value for name, value in actor.run_training().items()})
    scalars = recorded_run.scalars()
    assert {tag for tag in COMPARED if tag not in scalars} == set()
    for tag in COMPARED:
        assert float(replayed[tag]) == pytest.approx(scalars[tag][0], rel=1e-4, abs=1e-6), tag

    after = load(recorded_run.record_dir / "sync_1.pt")["actor"]
    for name, parameter in actor.model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.to_local(), after[name], atol=1e-6, rtol=0, msg=name)


def learn(worker: Any, run: Run, step: int) -> None:
    """The update of a recorded step."""
    worker.set_global_step(step)
    worker.rollout_batch = load(run.record_dir / f"batch_{step}.pt")
    worker.compute_advantages_and_returns()
    worker.run_training()


def differences(found: Any, wanted: Any) -> list[str]:
    """Names of parameters and optimizer states that are not equal bit for bit."""
    names = []
    for part in (actor_weights, optimizer_state):
        ours, theirs = part(found), part(wanted)
        assert ours.keys() == theirs.keys()
        names += [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    return names


def test_a_resumed_actor_makes_the_same_update(
    actor: Any, make_actor: Callable[..., Any], recorded_run: Run, tmp_path: Path
) -> None:
    """One actor takes both recorded steps; another one is loaded from what the first saved in between and takes the second."""
    learn(actor, recorded_run, 0)
    actor.save_checkpoint(str(tmp_path), 1)
    resumed = make_actor()
    assert len(differences(resumed, actor)) > 100
    resumed.load_checkpoint(str(tmp_path))
    assert differences(resumed, actor) == []
    for worker in (actor, resumed):
        learn(worker, recorded_run, 1)
    assert differences(resumed, actor) == []
    assert resumed.version == actor.version == 1
    assert resumed.lr_scheduler.state_dict()["last_epoch"] == actor.lr_scheduler.state_dict()["last_epoch"]


def test_a_checkpoint_of_the_run_holds_what_its_actor_held(make_actor: Callable[..., Any], recorded_run: Run) -> None:
    """RLinf's runner saved it after the first update; the second sync then sent the same weights."""
    resumed = make_actor()
    resumed.load_checkpoint(str(checkpoint_of(recorded_run, 1) / "actor"))
    sync = load(recorded_run.record_dir / "sync_1.pt")
    for found, wanted in ((actor_weights(resumed), sync["actor"]), (optimizer_state(resumed), sync["optimizer"])):
        assert found.keys() == wanted.keys()
        assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def generalised_advantages(rewards: torch.Tensor, values: torch.Tensor, dones: torch.Tensor) -> torch.Tensor:
    """GAE with gamma 0.99 and lambda 0.95: rewards [T, B], values [T + 1, B], dones [T + 1, B] -> [T, B]."""
    advantages = torch.zeros_like(rewards)
    following = torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        alive = 1.0 - dones[t + 1].float()
        following = rewards[t] + 0.99 * alive * values[t + 1] - values[t] + 0.99 * 0.95 * alive * following
        advantages[t] = following
    return advantages


@pytest.mark.parametrize("level, summed", [("token_level", ()), ("action_level", (-1,)), ("chunk_level", (-2, -1))])
def test_injected_rewards_and_offsets(
    make_actor: Callable[..., Any], recorded_run: Run, level: str, summed: tuple[int, ...]
) -> None:
    """Weights, clip fraction, gap and the weighted loss, from the formulas of docs/correction.md written out here."""
    actor = make_actor(
        f"algorithm.logprob_type={level}",
        "algorithm.importance_sampling_clip=1.05",
        "actor.optim.lr=0.0",
        "actor.optim.value_lr=0.0",
    )
    set_first_weights(actor, recorded_run)
    g = torch.Generator().manual_seed(0)
    recorded = load(recorded_run.record_dir / "batch_0.pt")
    rewards = torch.rand(recorded["rewards"].shape, generator=g)
    losses, expected_losses = [], []
    for scale in (0.02, 0.05):
        offset = scale * torch.randn(recorded["prev_logprobs"].shape, generator=g)
        batch = load(recorded_run.record_dir / "batch_0.pt")
        batch["rewards"] = rewards
        batch["prev_logprobs"] -= offset  # the rollout claims that its actions were less likely
        actor.rollout_batch = batch
        actor.compute_advantages_and_returns()
        advantages = actor.rollout_batch["advantages"].clone()
        metrics = actor.run_training()
        log_weight = offset.double().sum(summed) if summed else offset.double()
        weight = log_weight.exp()
        units = advantages.double().reshape(*advantages.shape[:2], *[1] * (weight.dim() - 2)).expand_as(weight)
        losses.append(metrics["actor/policy_loss"])
        expected_losses.append(-float((weight.clamp(max=1.05) * units).mean()))

    dones = recorded["dones"].any(dim=-1)
    expected = generalised_advantages(rewards.sum(dim=-1), recorded["prev_values"][..., 0], dones)
    expected = (expected - expected.mean()) / (expected.std() + 1e-5)  # RLinf normalises in any case
    torch.testing.assert_close(advantages[..., 0], expected, atol=1e-4, rtol=1e-4)

    assert metrics["actor/rollout_train_logprob_gap"] == pytest.approx(float(offset.abs().mean()), rel=1e-3)
    assert metrics["actor/importance_sampling_weight"] == pytest.approx(float(weight.mean()), rel=1e-4)
    assert metrics["actor/importance_sampling_weight_max"] == pytest.approx(float(weight.max()), rel=1e-4)
    assert metrics["actor/behav_approx_kl"] == pytest.approx(-float(log_weight.mean()), abs=1e-4)
    share = float((weight > 1.05).double().mean())
    assert 0.0 < share < 1.0
    assert metrics["actor/importance_sampling_clip_fraction"] == pytest.approx(share)
    assert metrics["actor/first_update/ratio_max_dev"] == 0.0
    # RLinf scales the loss by its masks; between two losses of the same batch the scale cancels.
    assert losses[1] / losses[0] == pytest.approx(expected_losses[1] / expected_losses[0], rel=1e-3)
