# SPDX-License-Identifier: Apache-2.0
"""Weight syncs between real workers: several ranks, resumed runs, and faults at each point of a sync."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.conftest import (
    Program,
    Run,
    StartProgram,
    assert_every_rank_equals_the_actor,
    checkpoint_of,
    load,
)

pytestmark = pytest.mark.integration

SEVERAL_BUCKETS = "weight_syncer.bucket.bucket_size=200000"


def placed(actor: str, rollout: str, env: str = "0") -> list[str]:
    """Overrides that give each component its processes; all of them share the one node."""
    return [
        "~cluster.component_placement",
        f"+cluster.component_placement={{actor:'{actor}',rollout:'{rollout}',env:'{env}'}}",
    ]


def assert_stopped(program: Program, run: Run, cause: str, worker: str = "") -> None:
    """The run ended by itself, said why, and left nothing behind."""
    assert run.exit_code == 1, run.output[-6000:]
    assert "[rlinf-phyai] stopped: " in run.output
    assert cause in run.output, run.output[-6000:]
    assert f"Exception occurred while running {worker}" in run.output or not worker
    assert program.left_over() == []


# -- several ranks -----------------------------------------------------------------------------------------------------------


def test_two_ranks_each(start: StartProgram) -> None:
    """Every rollout rank equals the actor after each of two syncs; then one of them loses a bucket in a third.

    The other rollout rank and the actor are in the middle of a collective call then, and must not wait for ever.
    """
    program = start(
        "driver",
        *placed("0:0-1", "0:0-1"),
        SEVERAL_BUCKETS,
        environment={"SYNCS": "3", "FAULT": "lose_a_bucket@2"},
    )
    run = program.finish()
    assert_stopped(program, run, "injected: the second bucket is lost", "PhyaiRolloutWorker's function sync_model")
    first, second = (load(run.record_dir / f"sync_{n}.pt") for n in range(2))
    for sync in (first, second):
        assert_every_rank_equals_the_actor(sync, ranks=2)
    assert not torch.equal(first["actor"]["action_out_proj.bias"], second["actor"]["action_out_proj.bias"])
    assert not (run.record_dir / "sync_2.pt").exists()


@pytest.mark.long
@pytest.mark.parametrize("actor, rollout", [("0:0-1", "0"), ("0", "0:0-1")], ids=["2 to 1", "1 to 2"])
def test_other_ratios(actor: str, rollout: str, start: StartProgram) -> None:
    """More actors than engines, and more engines than actors, through training steps and all."""
    program = start("driver", *placed(actor, rollout), SEVERAL_BUCKETS)
    run = program.finish()
    run.assert_success()
    for n in range(2):
        assert_every_rank_equals_the_actor(load(run.record_dir / f"sync_{n}.pt"), ranks=2 if "-" in rollout else 1)
        assert (load(run.record_dir / f"batch_{n}.pt")["versions"] == n).all()
    assert run.scalars()["train/actor/first_update/ratio_max_dev"] == [0.0, 0.0]
    assert program.left_over() == []


# -- resumed runs and other weights ------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_resumed_run_goes_on_and_a_lost_bucket_ends_it(start: StartProgram, recorded_run: Run) -> None:
    """Step number, weights and optimizer are those of the checkpoint; the second sync then fails half-way.

    Most of a real run exists at that point: simulators, prefetched observations, a trained actor.
    """
    program = start(
        "driver",
        f"runner.resume_dir={checkpoint_of(recorded_run, 1)}",
        "runner.max_epochs=3",
        SEVERAL_BUCKETS,
        environment={"FAULT": "lose_a_bucket@1"},
    )
    run = program.finish()
    assert_stopped(program, run, "injected: the second bucket is lost", "PhyaiRolloutWorker's function sync_model")
    resumed, uninterrupted = load(run.record_dir / "sync_0.pt"), load(recorded_run.record_dir / "sync_1.pt")
    assert_every_rank_equals_the_actor(resumed)
    for part in ("actor", "optimizer"):
        assert resumed[part].keys() == uninterrupted[part].keys()
        different = [k for k, value in resumed[part].items() if not torch.equal(value, uninterrupted[part][k])]
        assert different == []
    assert sorted(path.name for path in run.record_dir.glob("batch_*.pt")) == ["batch_1.pt"]
    assert (load(run.record_dir / "batch_1.pt")["versions"] == 1).all()


@pytest.fixture(scope="module")
def other_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same sizes with other weights everywhere."""
    from rlinf_phyai.models.pi05.tiny import make_tiny_checkpoint

    return make_tiny_checkpoint(tmp_path_factory.mktemp("other_tiny_pi05"), seed=1)


@pytest.mark.long
def test_resuming_on_other_frozen_weights_is_noticed(
    start: StartProgram, recorded_run: Run, other_checkpoint: Path
) -> None:
    """``resume_dir`` reloads the actor alone, frozen weights included; the engine has them from ``model_path``."""
    program = start(
        "driver",
        f"actor.model.model_path={other_checkpoint}",
        f"runner.resume_dir={checkpoint_of(recorded_run, 1)}",
    )
    run = program.finish()
    assert_stopped(program, run, "stopped: after the first weight sync")
    assert "parameters differ between actor and rollout, first ['paligemma_with_expert.paligemma." in run.output
    assert "runner.ckpt_path" in run.output


@pytest.mark.long
def test_ckpt_path_replaces_frozen_weights_too(start: StartProgram, recorded_run: Run, other_checkpoint: Path) -> None:
    """Both sides load the whole file on top of the checkpoint, so the comparison after the first sync passes."""
    weights = checkpoint_of(recorded_run, 2) / "actor" / "model_state_dict" / "full_weights.pt"
    program = start(
        "driver",
        f"actor.model.model_path={other_checkpoint}",
        f"runner.ckpt_path={weights}",
        environment={"SYNCS": "1"},
    )
    run = program.finish()
    run.assert_success()
    sync, given = load(run.record_dir / "sync_0.pt"), load(weights)
    assert_every_rank_equals_the_actor(sync)
    frozen = [name for name in given if ".language_model." in name or ".vision_tower." in name]
    assert len(frozen) > 20
    assert all(torch.equal(sync["rollout"][0][name], given[name]) for name in frozen)


# -- faults ------------------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    "fault, cause, worker",
    [
        ("spoil_the_engine@1", "the weights were written outside of a weight update", "PhyaiRolloutWorker's function"),
        ("diverge@1", "1 parameters hold NaN or infinity, first ['action_out_proj.bias']", "PhyaiRolloutWorker's"),
        ("stop_sending@1", "injected: the second bucket was not sent", "PhyaiActorWorker's function sync_model"),
        ("change_a_frozen_weight@0", "1 parameters differ between actor and rollout, first ['paligemma", ""),
    ],
)
def test_a_fault_stops_the_run(fault: str, cause: str, worker: str, start: StartProgram) -> None:
    """Before the first bucket, at the commit, on the sender's side, and at the comparison after the first sync."""
    program = start("driver", SEVERAL_BUCKETS, environment={"SYNCS": "2", "FAULT": fault})
    run = program.finish()
    assert_stopped(program, run, cause, worker)
    completed = int(fault[-1])
    assert len(list(run.record_dir.glob("sync_*.pt"))) == completed
