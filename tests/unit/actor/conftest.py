# SPDX-License-Identifier: Apache-2.0
"""RLinf's real FSDP2 actor in this process: gloo, one rank, CPU, the tiny PI0.5.

Only ``Worker.__init__`` (Ray) is left out; every method that a test calls is the real one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from tests.openpi_options import OPENPI_OPTIONS

T, B = 3, 4  # chunk steps and trajectories of the batch below
SENTENCES = [
    "pick up the black bowl between the plate and the ramekin and place it on the plate",
    "pick up the black bowl and put it on the stove",
]

CONFIG = """
runner: {task_type: embodied, ckpt_path: null}
algorithm:
  adv_type: gae
  loss_type: actor_critic
  reward_type: chunk_level
  logprob_type: chunk_level
  entropy_type: token_level
  entropy_bonus: 0
  normalize_advantages: true
  group_size: 1
  update_epoch: 1
  clip_ratio_high: 0.2
  clip_ratio_low: 0.2
  value_clip: 0.2
  huber_delta: 10.0
  gamma: 0.99
  gae_lambda: 0.95
  filter_rewards: false
env:
  group_name: EnvGroup
  train: {rollout_epoch: 1, max_episode_steps: 15, auto_reset: false, ignore_terminations: false}
rollout: {group_name: RolloutGroup, pipeline_stage_num: 1, phyai: {value_source: rollout}}
actor:
  seed: 7
  micro_batch_size: 2
  global_batch_size: 6
  enable_offload: false
  model:
    model_type: openpi
    model_path: ???
    precision: null
    num_action_chunks: 5
    action_dim: 7
    num_steps: 3
    add_value_head: true
    openpi: ??? # OPENPI_OPTIONS
  optim: {lr: 1.0e-3, value_lr: 1.0e-3, adam_beta1: 0.9, adam_beta2: 0.95, adam_eps: 1.0e-8, weight_decay: 0.01,
      clip_grad: 1.0}
  fsdp_config:
    strategy: fsdp2
    sharding_strategy: no_shard
    gradient_checkpointing: false
    cpu_offload: false
    offload_pin_memory: false
    reshard_after_forward: true
    enable_gradient_accumulation: true
    amp_autocast: {enabled: false, precision: bf16}
    grad_scaler: {enabled: false}
    mixed_precision: {param_dtype: null, reduce_dtype: null, buffer_dtype: null}
"""


@pytest.fixture(scope="session")
def process_group() -> Iterator[None]:
    """A default process group of one rank; RLinf's CPU platform is installed."""
    from rlinf_phyai.actor.in_process import start_process_group

    start_process_group()
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PI0.5 checkpoint with few tokens: the time goes into the number of operations."""
    from rlinf_phyai.models.pi05.stated_sizes import GemmaSizes, StatedSizes, VisionSizes
    from rlinf_phyai.models.pi05.tiny import make_tiny_checkpoint

    sizes = StatedSizes(
        vision=VisionSizes(patch_size=112, num_layers=1),
        prefix=GemmaSizes(width=64, mlp_dim=160),
        expert=GemmaSizes(width=32, mlp_dim=96),
        tokenizer_max_length=64,
    )
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny_pi05"), seed=0, config=sizes)


@pytest.fixture(scope="session")
def base_config(checkpoint: Path) -> DictConfig:
    """The config above with the checkpoint filled in; copy before changing."""
    cfg = OmegaConf.create(CONFIG)
    cfg.actor.model.openpi = OPENPI_OPTIONS
    cfg.actor.model.model_path = str(checkpoint)
    return cfg


@pytest.fixture
def make_config(base_config: DictConfig):
    """``make_config("algorithm.update_epoch=2", ...)``."""

    def make(*overrides: str) -> DictConfig:
        cfg = copy.deepcopy(base_config)
        cfg.merge_with_dotlist(list(overrides))
        return cfg

    return make


@pytest.fixture
def make_actor(process_group: None, monkeypatch: pytest.MonkeyPatch):
    """``make_actor(cfg)`` builds our worker, ``make_actor(cfg, stock=True)`` RLinf's."""
    from rlinf.workers.actor import fsdp_actor_worker

    from rlinf_phyai.actor.in_process import in_process_actor
    from rlinf_phyai.actor.model_provider import build_openpi
    from rlinf_phyai.actor.worker import PhyaiActorWorker

    monkeypatch.setattr(fsdp_actor_worker, "get_model", build_openpi)

    def make(cfg: DictConfig, *, stock: bool = False) -> Any:
        torch.manual_seed(0)  # the value head starts random
        worker_class = fsdp_actor_worker.EmbodiedFSDPActor if stock else PhyaiActorWorker
        return in_process_actor(cfg, worker_class=worker_class)

    return make


@pytest.fixture(scope="session")
def recorded_batch(base_config: DictConfig, process_group: None) -> dict[str, Any]:
    """A step's trajectories as the actor receives them, sampled by the actor's own model on random images.

    ``rewards`` [T,B,5], ``dones`` [T+1,B,5], ``prev_values`` [T+1,B,1], ``prev_logprobs`` [T,B,5,7],
    ``forward_inputs.*`` [T,B,...]. Trajectory 1 ends in chunk step 1, so that its last step is masked.
    """
    from rlinf_phyai.actor.model_provider import build_openpi

    torch.manual_seed(0)
    model = build_openpi(base_config.actor.model).eval()
    g = np.random.default_rng(0)
    torch.manual_seed(1)
    steps, values = [], []
    for _ in range(T + 1):
        obs = {
            "main_images": torch.from_numpy(g.integers(0, 256, (B, 256, 256, 3), dtype=np.uint8)),
            "wrist_images": torch.from_numpy(g.integers(0, 256, (B, 256, 256, 3), dtype=np.uint8)),
            "extra_view_images": None,
            "states": torch.from_numpy(g.normal(size=(B, 8)).astype(np.float32)),
            "task_descriptions": [SENTENCES[i % 2] for i in range(B)],
        }
        _, result = model.predict_action_batch(obs, mode="train")
        values.append(result["prev_values"])
        steps.append(result)
    steps = steps[:T]
    dones = torch.zeros(T + 1, B, 5, dtype=torch.bool)
    dones[2, 1, 3] = True
    dones[T, :, -1] = True
    batch = {
        "prev_logprobs": torch.stack([s["prev_logprobs"] for s in steps]),
        "prev_values": torch.stack(values),
        "rewards": torch.from_numpy(g.random((T, B, 5)).astype(np.float32)),
        "dones": dones,
        "terminations": dones.clone(),
        "truncations": torch.zeros_like(dones),
        "forward_inputs": {
            key: torch.stack([s["forward_inputs"][key] for s in steps]) for key in steps[0]["forward_inputs"]
        },
    }
    batch["versions"] = torch.zeros_like(batch["prev_logprobs"])
    return batch


@pytest.fixture
def give_batch(recorded_batch: dict[str, Any]):
    """``give_batch(actor)`` hands the actor its own copy, through RLinf's own processing of received trajectories."""

    def give(actor: Any, **replace: torch.Tensor) -> dict[str, Any]:
        batch: dict[str, Any] = {}
        for key, value in recorded_batch.items():
            nested = isinstance(value, dict)
            batch[key] = {name: tensor.clone() for name, tensor in value.items()} if nested else value.clone()
        batch.update(replace)
        actor.rollout_batch = actor._process_received_rollout_batch(batch)
        return actor.rollout_batch

    return give
