# SPDX-License-Identifier: Apache-2.0
"""Trajectories of a real run, replayed into the real actor in this process: it must compute what it did in the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.conftest import TINY, Run, load

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
def actor(tiny_checkpoint: Path, recorded_run: Run, repository: Path) -> Any:
    """The actor of the recorded run, with the weights that it had before its first update."""
    from hydra import compose, initialize_config_dir

    from rlinf_phyai import plugin
    from rlinf_phyai.actor.in_process import in_process_actor, start_process_group

    plugin.register()
    start_process_group()
    with initialize_config_dir(str(repository / "examples" / "embodiment" / "config"), version_base="1.3"):
        cfg = compose(TINY, [f"actor.model.model_path={tiny_checkpoint}"])
    worker = in_process_actor(cfg)
    weights = load(recorded_run.record_dir / "sync_0.pt")["actor"]
    with torch.no_grad():
        for name, parameter in worker.model.named_parameters():
            parameter.to_local().copy_(weights[name])
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
