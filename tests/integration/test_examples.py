# SPDX-License-Identifier: Apache-2.0
"""One training step of the shipped configs by their own names, with ``+size=tiny``.

The other two have longer runs: Spatial with PPO, which is the tiny example, in ``test_training``, and flow-noise in
``test_flow_noise``. Every second environment earns a reward, so that GRPO has something to learn from.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_phyai.models.pi05.stated_sizes import TINY_SIZES
from rlinf_phyai.models.pi05.tiny import make_tiny_checkpoint
from tests.integration.conftest import (
    BuildModel,
    Run,
    StartProgram,
    assert_scores_are_rlinfs,
    checkpoint_of,
    load,
    prompts,
    rlinfs_logprobs,
    tasks_of,
)

pytestmark = [pytest.mark.integration, pytest.mark.long]

CHUNKS = 2  # predictions in an episode
TAGS = {  # of every run
    "env/success_once",
    "rollout/advantages_mean",
    "time/rollout/predict",
    "time/step",
    "time/sync_weights",
    "train/actor/approx_kl",
    "train/actor/grad_norm",
    "train/actor/importance_sampling_clip_fraction",
    "train/actor/policy_loss",
}
CRITIC_TAGS = {"train/critic/value_loss", "train/critic/explained_variance", "rollout/returns_mean"}


@dataclass(frozen=True)
class Example:
    """A shipped config and what a tiny run of it looks like.

    Attributes:
        config: name of the file.
        suite: LIBERO's name of the tasks.
        grpo: learns without a critic, from groups of environments.
        chunk: actions executed per prediction.
        model: of the tiny checkpoint.
    """

    config: str
    suite: str
    grpo: bool = False
    chunk: int = 5
    model: str = "pi05"

    @property
    def overrides(self) -> list[str]:
        steps = CHUNKS * self.chunk
        return [
            "+size=tiny",
            f"env.train.max_episode_steps={steps}",
            f"env.train.max_steps_per_rollout_epoch={steps}",
            *(["algorithm.group_size=2"] if self.grpo else []),
        ]


EXAMPLES = [
    Example("libero_10_ppo_openpi_pi05_phyai", "libero_10", chunk=10),
    Example("libero_10_grpo_openpi_pi05_phyai", "libero_10", grpo=True, chunk=10),
    Example("libero_goal_ppo_openpi_pi05_phyai", "libero_goal"),
    Example("libero_goal_grpo_openpi_pi05_phyai", "libero_goal", grpo=True),
    Example("libero_object_ppo_openpi_pi05_phyai", "libero_object"),
    Example("libero_object_grpo_openpi_pi05_phyai", "libero_object", grpo=True),
    Example("libero_spatial_grpo_openpi_pi05_phyai", "libero_spatial", grpo=True),
    Example("libero_spatial_ppo_openpi_pi05_phyai_quickstart", "libero_spatial"),
    Example("libero_spatial_ppo_openpi_pi0_phyai", "libero_spatial", model="pi0"),
]


@pytest.fixture(scope="module")
def checkpoints(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny checkpoint of either model."""
    folder = tmp_path_factory.mktemp("tiny_pi0")
    return {"pi05": tiny_checkpoint, "pi0": make_tiny_checkpoint(folder, config=TINY_SIZES["pi0"])}


@pytest.mark.parametrize("example", [pytest.param(one, id=one.config) for one in EXAMPLES])
def test_one_training_step(
    example: Example, start: StartProgram, build_actor_model: BuildModel, checkpoints: dict[str, Path]
) -> None:
    overrides = [*example.overrides, f"actor.model.model_path={checkpoints[example.model]}"]
    program = start(
        "driver",
        *overrides,
        "runner.max_epochs=1",
        "runner.save_interval=1",
        "actor.optim.lr=1e-4",
        config=example.config,
        environment={"REWARD": "1"},
    )
    run = program.finish()
    run.assert_success()
    assert program.left_over() == []
    batch = load(run.record_dir / "batch_0.pt")
    build = functools.partial(build_actor_model, config=example.config, overrides=overrides)

    assert_metrics(run, critic=not example.grpo)
    sentences = prompts(batch, checkpoints[example.model])
    assert set(sentences) <= tasks_of(example.suite)
    assert batch["prev_logprobs"].shape == (CHUNKS, 2, example.chunk, 7)
    assert_scores_are_rlinfs(build(load(run.record_dir / "sync_0.pt")["actor"]), batch)
    assert_it_learnt(example, run, batch, build)
    if example.grpo:
        # One group. Its fixtures, such as a stove, may stand elsewhere: RLinf seeds every simulator differently.
        assert len(set(sentences)) == 1


def assert_metrics(run: Run, critic: bool) -> None:
    """Nothing to correct in float32; a critic's figures where there is one, and only there."""
    scalars = run.scalars()
    assert set(scalars) >= (TAGS | CRITIC_TAGS if critic else TAGS)
    assert critic or not any(tag.startswith("train/critic/") for tag in scalars)
    assert {len(values) for tag, values in scalars.items()} == {1}
    not_finite = {tag for tag, (value,) in scalars.items() if not math.isfinite(value)}
    assert not_finite <= {"train/critic/explained_variance"}
    assert scalars["train/actor/first_update/ratio_max_dev"] == [0.0]
    assert scalars["train/actor/importance_sampling_weight"] == pytest.approx([1.0], abs=1e-3)
    assert scalars["train/actor/rollout_train_logprob_gap"][0] < 1e-4
    assert scalars["train/actor/grad_norm"][0] > 0
    assert scalars["env/success_once"] == [0.0]  # the simulator's own, not the reward of this test


def assert_it_learnt(example: Example, run: Run, batch: dict[str, Any], build: Any) -> None:
    """Expert and critic moved, the frozen rest did not; GRPO made the rewarded episode likelier and the other one less so."""
    before = load(run.record_dir / "sync_0.pt")["actor"]
    after = load(checkpoint_of(run, 1) / "actor" / "model_state_dict" / "full_weights.pt")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert "paligemma_with_expert.gemma_expert.model.layers.0.self_attn.q_proj.weight" in moved
    assert any(name.startswith("value_head.") for name in moved) != example.grpo
    assert any(name.startswith("value_head.") for name in before) != example.grpo
    assert not any(".vision_tower." in name or ".language_model." in name for name in moved)

    rewards = batch["rewards"].sum(dim=(0, 2))
    assert rewards.tolist() == [1.0, 0.0]
    if example.grpo:  # with PPO the random critic has its say in the advantages too
        rewarded, other = (rlinfs_logprobs(build(after), batch) - batch["prev_logprobs"]).sum(dim=(0, 2, 3))
        assert rewarded > 0.01 > -0.01 > other, (rewarded, other)
