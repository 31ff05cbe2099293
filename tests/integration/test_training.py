# SPDX-License-Identifier: Apache-2.0
"""The main job: two steps of PPO on real LIBERO, actions from the engine, corrected by the actor."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.integration.conftest import (
    BuildModel,
    Run,
    StartProgram,
    assert_every_rank_equals_the_actor,
    assert_scores_are_rlinfs,
    load,
    prompts,
    tasks_of,
)

pytestmark = pytest.mark.integration

LONG_PPO = "libero_10_ppo_openpi_pi05_phyai"
TINY_SIZE = ["+size=tiny"]


def test_metrics_of_an_exact_rollout(recorded_run: Run) -> None:
    """In float32 on one machine the engine and the actor agree: the correction has nothing to correct."""
    scalars = recorded_run.scalars()
    assert len(scalars["env/success_once"]) == 2
    for step in range(2):
        assert scalars["train/actor/importance_sampling_weight"][step] == pytest.approx(1.0, abs=1e-3)
        assert scalars["train/actor/rollout_train_logprob_gap"][step] < 1e-4
        assert scalars["train/actor/first_update/ratio_max_dev"][step] == 0.0
        assert 0.0 <= scalars["train/actor/importance_sampling_clip_fraction"][step] <= 1.0
    not_finite = {tag for tag, values in scalars.items() if not all(map(math.isfinite, values))}
    assert not_finite <= {"train/critic/explained_variance"}  # RLinf divides by the variance of the returns, all 0 here
    assert max(scalars["train/actor/rollout_train_kl"]) < 1e-8
    assert max(scalars["train/actor/rollout_train_value_gap_max"]) < 1e-5


def test_engine_equals_actor_after_every_sync(recorded_run: Run) -> None:
    """Every parameter that is computed with, bit for bit; and the second sync brought something new."""
    syncs = [load(recorded_run.record_dir / f"sync_{n}.pt") for n in range(2)]
    for sync in syncs:
        assert_every_rank_equals_the_actor(sync)
    first, second = (sync["actor"] for sync in syncs)
    moved = {name for name in first if not torch.equal(first[name], second[name])}
    assert "value_head.mlp.0.weight" in moved
    assert "paligemma_with_expert.gemma_expert.model.layers.0.self_attn.q_proj.weight" in moved
    assert not any(".vision_tower." in name or ".language_model." in name for name in moved)  # frozen


@pytest.mark.parametrize("step", [0, 1])
def test_recorded_trajectories_replay_in_rlinfs_model(
    recorded_run: Run, build_actor_model: BuildModel, step: int
) -> None:
    """What the engine reported about real observations is what RLinf's own model computes from the replay data."""
    batch = load(recorded_run.record_dir / f"batch_{step}.pt")
    model = build_actor_model(load(recorded_run.record_dir / f"sync_{step}.pt")["actor"])
    steps, environments = batch["prev_logprobs"].shape[:2]
    assert batch["prev_logprobs"].shape == (2, 2, 5, 7)
    assert batch["prev_values"].shape == (3, 2, 1)
    assert (batch["versions"] == step).all()

    inputs = {key: value.flatten(0, 1) for key, value in batch["forward_inputs"].items()}
    with torch.no_grad():
        output = model(forward_inputs=inputs, compute_values=True)
    logprobs = output["logprobs"].reshape(steps, environments, 5, 7)
    torch.testing.assert_close(batch["prev_logprobs"], logprobs, atol=1e-5, rtol=0)
    values = output["values"].reshape(steps, environments, 1)
    torch.testing.assert_close(batch["prev_values"][:-1], values, atol=1e-5, rtol=0)
    assert batch["forward_inputs"]["action"].dtype == torch.float64


def test_prompts_of_real_tasks_are_in_the_batch(recorded_run: Run) -> None:
    """The tokens name LIBERO-Spatial's tasks, right-padded."""
    inputs = load(recorded_run.record_dir / "batch_0.pt")["forward_inputs"]
    tokens, mask = inputs["tokenized_prompt"].flatten(0, 1), inputs["tokenized_prompt_mask"].flatten(0, 1)
    lengths = mask.sum(-1)
    assert ((lengths > 5) & (lengths < 40)).all()
    assert (tokens[~mask] == 0).all()
    assert (mask == (torch.arange(mask.shape[1]) < lengths[:, None])).all()


@pytest.fixture(scope="module")
def bootstrapped_run(start: StartProgram) -> Run:
    """One step of LIBERO-Long with ``auto_reset``: an episode ends after every chunk, which has ten actions there."""
    run = start(
        "driver",
        *TINY_SIZE,
        "env.train.auto_reset=True",
        "env.train.max_steps_per_rollout_epoch=20",
        "runner.max_epochs=1",
        config=LONG_PPO,
    ).finish()
    run.assert_success()
    return run


def test_bootstrapped_rewards(bootstrapped_run: Run, build_actor_model: BuildModel) -> None:
    """A truncated episode's last reward gains gamma times V(last observation), with V from RLinf's own model."""
    seen = load(bootstrapped_run.record_dir / "bootstrap.pt")
    batch = load(bootstrapped_run.record_dir / "batch_0.pt")
    model = build_actor_model(load(bootstrapped_run.record_dir / "sync_0.pt")["actor"], LONG_PPO, TINY_SIZE).eval()
    assert len(seen) == 2  # one per chunk
    assert batch["truncations"][1:, :, -1].all()  # row 0 precedes the first action
    assert batch["prev_values"][:-1].isnan().all()  # value_source: auto, the actor supplies these
    assert batch["prev_values"][-1].isfinite().all()
    assert "loss_mask" not in batch

    for chunk, (observation, values) in enumerate(seen):
        with torch.no_grad():
            _, result = model.predict_action_batch({"extra_view_images": None, **observation}, mode="eval")
        torch.testing.assert_close(values, result["prev_values"].cpu(), atol=1e-5, rtol=0)
        # A random policy solves nothing in ten steps: the environment's own reward is 0.
        expected = torch.zeros_like(batch["rewards"][chunk])
        expected[:, -1] = 0.99 * result["prev_values"][:, 0]
        torch.testing.assert_close(batch["rewards"][chunk], expected, atol=1e-5, rtol=0)
    assert batch["rewards"].abs().max() > 1e-4  # it did something


def test_long_tasks_are_scored_as_by_rlinfs_model(
    bootstrapped_run: Run, build_actor_model: BuildModel, tiny_checkpoint: Path
) -> None:
    """The same run: chunks of ten actions and five denoise steps, on tasks of LIBERO-Long."""
    batch = load(bootstrapped_run.record_dir / "batch_0.pt")
    assert batch["prev_logprobs"].shape == (2, 2, 10, 7)
    assert batch["forward_inputs"]["chains"].shape[2] == 5 + 1
    assert set(prompts(batch, tiny_checkpoint)) <= tasks_of("libero_10")
    weights = load(bootstrapped_run.record_dir / "sync_0.pt")["actor"]
    assert_scores_are_rlinfs(build_actor_model(weights, LONG_PPO, TINY_SIZE), batch)
    scalars = bootstrapped_run.scalars()
    assert scalars["train/actor/first_update/ratio_max_dev"] == [0.0]
    assert scalars["train/actor/importance_sampling_weight"] == pytest.approx([1.0], abs=1e-3)
