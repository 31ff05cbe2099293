# SPDX-License-Identifier: Apache-2.0
"""The training program with eyes: records what crosses between the workers of a real run, for tests to judge.

Run like ``rlinf_phyai.train``, with ``RECORD_DIR`` in the environment. Files written there:

    sync_<n>.pt       after weight sync n: ``actor`` and ``rollout``, each a dict name -> tensor, from every rank 0
    batch_<n>.pt      the actor's batch of training step n, as it was received
    bootstrap.pt      (observation, values) of every call of the rollout worker's get_bootstrap_values

The functions below that take a worker run inside the worker's process; nothing in the package knows of them.
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

from rlinf_phyai.launch import absolute_config_path, run_as_program
from rlinf_phyai.runner import PhyaiRunner
from rlinf_phyai.train import train


def actor_weights(worker: Any) -> dict[str, torch.Tensor]:
    weights = worker.get_model_state_dict(cpu_offload=True, full_state_dict=True)
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


def rollout_weights(worker: Any) -> dict[str, torch.Tensor]:
    weights = worker.hf_model.state_dict()
    # A meta tensor is a weight that no computation reads: the engine holds its name only.
    return {name: tensor if tensor.is_meta else tensor.detach().cpu().clone() for name, tensor in weights.items()}


def save_batch(worker: Any, path: str) -> None:
    torch.save(worker.rollout_batch, path)


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
        super().init_workers()
        self.record_dir = Path(os.environ["RECORD_DIR"])
        self.record_dir.mkdir(parents=True, exist_ok=True)
        self.syncs = 0
        self.ask(self.rollout, watch_bootstrap)
        compute = self.actor.compute_advantages_and_returns

        def recorded() -> Any:
            self.ask(self.actor, save_batch, str(self.record_dir / f"batch_{self.global_step}.pt"))
            return compute()

        self.actor.compute_advantages_and_returns = recorded

    def update_rollout_weights(self) -> None:
        super().update_rollout_weights()
        torch.save(
            {"actor": self.ask(self.actor, actor_weights), "rollout": self.ask(self.rollout, rollout_weights)},
            self.record_dir / f"sync_{self.syncs}.pt",
        )
        self.syncs += 1

    def run(self) -> None:
        super().run()
        torch.save(self.ask(self.rollout, seen_bootstraps), self.record_dir / "bootstrap.pt")

    def ask(self, group: Any, function: Any, *arguments: Any) -> Any:
        return ray.get(group.worker_info_list[0].worker.__ray_call__.remote(function, *arguments))


def run(cfg: DictConfig) -> None:
    train(cfg, RecordingRunner)


@hydra.main(version_base="1.3", config_path=None, config_name=None)
def main(cfg: DictConfig) -> None:
    run_as_program(run, cfg)


if __name__ == "__main__":
    sys.argv[1:] = absolute_config_path(sys.argv[1:])
    main()
