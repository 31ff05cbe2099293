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
def make_actor(tiny_checkpoint: Path, repository: Path) -> Callable[[], Any]:
    """Builds the actor of the recorded run in this process."""
    from hydra import compose, initialize_config_dir

    from rlinf_phyai import plugin
    from rlinf_phyai.actor.in_process import in_process_actor, start_process_group

    plugin.register()
    start_process_group()
    with initialize_config_dir(str(repository / "examples" / "embodiment" / "config"), version_base="1.3"):
        cfg = compose(TINY, [f"actor.model.model_path={tiny_checkpoint}"])
    return lambda: in_process_actor(cfg)


@pytest.fixture
def actor(make_actor: Callable[[], Any], recorded_run: Run) -> Any:
    """With the weights that it had before its first update."""
    worker = make_actor()
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
    actor: Any, make_actor: Callable[[], Any], recorded_run: Run, tmp_path: Path
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


def test_a_checkpoint_of_the_run_holds_what_its_actor_held(make_actor: Callable[[], Any], recorded_run: Run) -> None:
    """RLinf's runner saved it after the first update; the second sync then sent the same weights."""
    resumed = make_actor()
    resumed.load_checkpoint(str(checkpoint_of(recorded_run, 1) / "actor"))
    sync = load(recorded_run.record_dir / "sync_1.pt")
    for found, wanted in ((actor_weights(resumed), sync["actor"]), (optimizer_state(resumed), sync["optimizer"])):
        assert found.keys() == wanted.keys()
        assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
