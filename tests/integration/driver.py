# SPDX-License-Identifier: Apache-2.0
"""The training program with eyes: records what crosses between the workers of a real run, for tests to judge.

Run like ``rlinf_phyai.train``, with ``RECORD_DIR`` in the environment. Files written there:

    sync_<n>.pt       after weight sync n: ``actor``, a dict name -> tensor, ``rollout``, the same of every rank, and
                      ``optimizer``, the state of rank 0
    batch_<n>.pt      the actor's batch of training step n, as it was received
    bootstrap.pt      (observation, values) of every call of the rollout worker's get_bootstrap_values

With ``REWARD=1`` every second environment earns a reward of 1 in its last chunk, before it is recorded: a random policy earns
none, and GRPO learns nothing from that. With ``FAULT=<name>@<n>`` that fault of :mod:`tests.integration.faults` strikes just
before weight sync n, in one rank. With ``SYNCS=<n>`` there are no environments and no training: the actor's weights are changed
at random and sent, n times. The functions below that take a worker run inside the worker's process; nothing in the package
knows of them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import hydra
import ray
import torch
from omegaconf import DictConfig

from rlinf_phyai.driver.launch import worker_groups
from rlinf_phyai.driver.program import absolute_config_path, run_as_program
from rlinf_phyai.driver.runner import PhyaiRunner
from rlinf_phyai.train import train
from tests.integration.faults import FAULTS


def actor_weights(worker: Any) -> dict[str, torch.Tensor]:
    weights = worker.get_model_state_dict(cpu_offload=True, full_state_dict=True)
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


def optimizer_state(worker: Any) -> dict[str, Any]:
    return {
        f"{index}.{key}": local(value).clone()
        for index, state in worker.optimizer.state_dict()["state"].items()
        for key, value in state.items()
    }


def rollout_weights(worker: Any) -> dict[str, torch.Tensor]:
    weights = worker.hf_model.state_dict()
    # A meta tensor is a weight that no computation reads: the engine holds its name only.
    return {name: tensor if tensor.is_meta else tensor.detach().cpu().clone() for name, tensor in weights.items()}


def move_weights(worker: Any, seed: int) -> None:
    """An imagined training step: every trainable parameter moves, on each rank by numbers of its own."""
    noise = torch.Generator().manual_seed(1000 * seed + worker._rank)
    with torch.no_grad():
        for parameter in worker.model.parameters():
            if parameter.requires_grad:
                part = local(parameter)
                part.add_(0.05 * torch.randn(part.shape, generator=noise))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that may be sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def save_batch(worker: Any, path: str) -> None:
    torch.save(worker.rollout_batch, path)


def reward_every_second_environment(worker: Any) -> None:
    worker.rollout_batch["rewards"][-1, ::2, -1] += 1.0


def watch_bootstrap(worker: Any) -> None:
    worker.seen_bootstraps = []
    original = worker.get_bootstrap_values

    def get_bootstrap_values(final_obs: Any) -> Any:
        values = original(final_obs)
        if values is not None:
            worker.seen_bootstraps.append((final_obs, values.clone()))
        return values

    worker.get_bootstrap_values = get_bootstrap_values


def seen_bootstraps(worker: Any) -> list[Any]:
    return worker.seen_bootstraps


class RecordingRunner(PhyaiRunner):
    """RLinf's loop; before and after some of its calls it looks into the workers."""

    def init_workers(self) -> None:
        self.record_dir = Path(os.environ["RECORD_DIR"])
        self.record_dir.mkdir(parents=True, exist_ok=True)
        self.syncs = 0
        self.start()

    def start(self) -> None:
        super().init_workers()
        self.ask(self.rollout, watch_bootstrap)
        compute = self.actor.compute_advantages_and_returns

        def recorded() -> Any:
            if os.environ.get("REWARD") == "1":
                self.ask_all(self.actor, reward_every_second_environment)
            self.ask(self.actor, save_batch, str(self.record_dir / f"batch_{self.global_step}.pt"))
            return compute()

        self.actor.compute_advantages_and_returns = recorded

    def update_rollout_weights(self) -> None:
        name, _, sync = os.environ.get("FAULT", "").partition("@")
        if name and int(sync) == self.syncs:
            group, function = FAULTS[name]
            ranks = getattr(self, group).worker_info_list
            victim = ranks[-1] if group == "rollout" else ranks[0]  # the actor's rank 0 is the one that sends
            ray.get(victim.worker.__ray_call__.remote(function))
        super().update_rollout_weights()
        record = {
            "actor": self.ask(self.actor, actor_weights),
            "rollout": self.ask_all(self.rollout, rollout_weights),
            "optimizer": self.ask(self.actor, optimizer_state),
        }
        torch.save(record, self.record_dir / f"sync_{self.syncs}.pt")
        self.syncs += 1

    def run(self) -> None:
        super().run()
        torch.save(self.ask(self.rollout, seen_bootstraps), self.record_dir / "bootstrap.pt")

    def ask_all(self, group: Any, function: Any, *arguments: Any) -> list[Any]:
        """The answers of every rank; they are asked at once, since gathering sharded weights takes all of them."""
        return ray.get([info.worker.__ray_call__.remote(function, *arguments) for info in group.worker_info_list])

    def ask(self, group: Any, function: Any, *arguments: Any) -> Any:
        """The answer of rank 0."""
        return self.ask_all(group, function, *arguments)[0]


class SyncRunner(RecordingRunner):
    """Weight syncs alone, between the real workers."""

    def start(self) -> None:
        for group in (self.rollout, self.actor):
            group.init_worker().wait()

    def run(self) -> None:
        for step in range(int(os.environ["SYNCS"])):
            self.global_step = step
            self.ask(self.actor, move_weights, step)
            self.update_rollout_weights()


def run(cfg: DictConfig) -> None:
    if "SYNCS" not in os.environ:
        train(cfg, RecordingRunner)
        return
    with worker_groups(cfg, ("actor", "rollout")) as (cfg, groups):
        runner = SyncRunner(cfg=cfg, env=None, **groups)
        runner.init_workers()
        runner.run()


@hydra.main(version_base="1.3", config_path=None, config_name=None)
def main(cfg: DictConfig) -> None:
    run_as_program(run, cfg)


if __name__ == "__main__":
    sys.argv[1:] = absolute_config_path(sys.argv[1:])
    main()
