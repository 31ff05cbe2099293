# SPDX-License-Identifier: Apache-2.0
"""Real runs that differ from the main one in several ways at once, each way independent of the others."""

from __future__ import annotations

import pytest

from tests.integration.conftest import StartProgram
from tests.wandb_files import wandb_history

pytestmark = [pytest.mark.integration, pytest.mark.long]


def test_grpo_in_two_stages_with_wandb(start: StartProgram) -> None:
    """Groups of two; each stage steps one group while the other one waits for its actions."""
    program = start(
        "launcher",
        "+size=tiny",
        "algorithm.group_size=2",
        "env.train.total_num_envs=4",
        "rollout.pipeline_stage_num=2",
        "runner.max_epochs=1",
        "runner.logger.logger_backends=[tensorboard,wandb]",
        config="libero_goal_grpo_openpi_pi05_phyai",
        environment={"WANDB_MODE": "offline"},
    )
    run = program.finish()
    run.assert_success()
    scalars = run.scalars()
    assert scalars["train/actor/first_update/ratio_max_dev"] == [0.0]
    assert scalars["train/actor/importance_sampling_weight"] == pytest.approx([1.0], abs=1e-3)
    assert scalars["train/actor/rollout_train_logprob_gap"][0] < 1e-4
    assert not any(tag.startswith("train/critic/") for tag in scalars)
    # WandB got what TensorBoard got, with nothing lost between the four calls of a step.
    history = wandb_history(run.log_dir)
    for tag in ("env/success_once", "train/actor/importance_sampling_weight", "time/step"):
        assert history[tag] == pytest.approx(scalars[tag], rel=1e-6)
    assert set(scalars) <= set(history)
    assert program.left_over() == []


def test_lora_on_two_rollout_ranks_that_offload(start: StartProgram) -> None:
    """Actor and engines take turns with their memory; both engines hold what the actor learnt on its adapters."""
    program = start(
        "launcher",
        "~cluster.component_placement",
        "+cluster.component_placement={actor:'0',env:'0',rollout:'0:0-1'}",
        "actor.enable_offload=True",
        "rollout.enable_offload=True",
        "actor.model.is_lora=True",
        "actor.model.lora_rank=4",
        "actor.fsdp_config.reshard_after_forward=False",
        "actor.optim.lr=1e-3",
    )
    run = program.finish()
    run.assert_success()
    scalars = run.scalars()
    assert scalars["train/actor/grad_norm"][0] > 0
    for step in range(2):  # the second one samples with what the first one learnt
        assert scalars["train/actor/first_update/ratio_max_dev"][step] == 0.0
        assert scalars["train/actor/rollout_train_logprob_gap"][step] < 1e-4
    for timer in ("time/rollout/offload", "time/rollout/reload"):
        assert len(scalars[timer]) == 2
    assert program.left_over() == []
