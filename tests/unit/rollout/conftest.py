# SPDX-License-Identifier: Apache-2.0
"""A tiny checkpoint with uneven normalisation statistics, and RLinf's own actor model loaded from it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from rlinf_phyai.rollout.build import build_policy
from rlinf_phyai.rollout.policy import PhyaiPolicy
from tests.openpi_options import OPENPI_OPTIONS

TOLERANCE = 1e-4
SENTENCES = [
    "pick up the black bowl between the plate and the ramekin and place it on the plate",
    "open the top drawer",
    "put_both moka pots on the stove\nnow",
    "turn on the stove",
    "put the white mug on the plate and put the chocolate pudding to the right of the plate",
]

_CONFIG = """
runner: {only_eval: false, ckpt_path: null, val_check_interval: -1}
algorithm: {loss_type: actor_critic}
env:
  group_name: EnvGroup
  train: {total_num_envs: 4, rollout_epoch: 1, max_steps_per_rollout_epoch: 10}
rollout:
  group_name: RolloutGroup
  rollout_backend: phyai
  pipeline_stage_num: 1
  enable_offload: false
  phyai:
    max_batch_size: null
    kernel_policy: null
    use_cuda_graph: true
    params_dtype: null
    value_source: rollout
    debug_logprob_offset: 0.0
    progress: false
  model: {model_path: "???", precision: null}
actor:
  group_name: ActorGroup
  seed: 42
  model:
    model_type: openpi
    model_path: "???"
    precision: null
    is_lora: false
    num_action_chunks: 5
    num_steps: 3
    add_value_head: true
    openpi: ??? # OPENPI_OPTIONS
weight_syncer:
  type: bucket
  bucket: {bucket_size: 536870912, bucket_dtype: null, is_agent: false, load_instant: true}
"""


@pytest.fixture(scope="session", autouse=True)
def _quiet_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the sizes are tiny; more threads only wait for each other
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tiny checkpoint whose statistics differ in every dimension; openpi finds its tokenizer there."""
    from rlinf_phyai.models.pi05.tiny import ASSET_ID, make_tiny_checkpoint

    directory = make_tiny_checkpoint(tmp_path_factory.mktemp("tiny_pi05"), seed=3)
    numbers = np.random.default_rng(5)

    def stats(width: int) -> dict[str, list[float]]:
        low = numbers.normal(size=width) - 1.5
        return {
            "mean": numbers.normal(size=width).tolist(),
            "std": np.abs(numbers.normal(size=width)).tolist(),
            "q01": low.tolist(),
            "q99": (low + np.abs(numbers.normal(size=width)) + 0.5).tolist(),
        }

    content = {"norm_stats": {"state": stats(8), "actions": stats(7)}}
    (directory / ASSET_ID / "norm_stats.json").write_text(json.dumps(content))
    patch = pytest.MonkeyPatch()
    patch.setenv("OPENPI_DATA_HOME", str(directory))
    patch.setenv("JAX_PLATFORMS", "cpu")
    yield directory
    patch.undo()


@pytest.fixture(scope="session")
def base_config(checkpoint: Path) -> DictConfig:
    """The parts of a training config that the rollout reads."""
    from rlinf_phyai.plugin import register

    register()
    config = OmegaConf.create(_CONFIG)
    config.actor.model.openpi = OPENPI_OPTIONS
    config.actor.model.model_path = config.rollout.model.model_path = str(checkpoint)
    return config


@pytest.fixture
def make_config(base_config: DictConfig) -> Callable[..., DictConfig]:
    """``make_config("actor.model.openpi.num_steps=1", ...)``."""

    def make(*overrides: str) -> DictConfig:
        config = copy.deepcopy(base_config)
        return OmegaConf.merge(config, OmegaConf.from_dotlist(list(overrides)))

    return make


@pytest.fixture(scope="session")
def build_actor() -> Callable[[DictConfig], Any]:
    """Builds RLinf's actor model of a config; each different model config is built once."""
    from rlinf.models import get_model

    built: dict[str, Any] = {}

    def build(config: DictConfig) -> Any:
        key = OmegaConf.to_yaml(config.actor.model)
        if key not in built:
            torch.manual_seed(11)  # the value head, which no checkpoint of the rollout holds
            built[key] = get_model(config.actor.model).eval()
        return built[key]

    return build


def make_observation(batch: int, seed: int = 0, size: int = 256) -> dict[str, Any]:
    """One observation batch as RLinf's environment worker sends it."""
    numbers = np.random.default_rng(seed)
    # Smooth pictures with noise on top: a resize that errs shows in both.
    ramp = np.linspace(0, 255, size)[None, :, None, None] * numbers.uniform(0.2, 1.0, (batch, 1, 1, 3))
    images = [
        np.clip(ramp + numbers.normal(0, 40, (batch, size, size, 3)), 0, 255).astype(np.uint8).copy() for _ in range(2)
    ]
    return {
        "main_images": torch.from_numpy(images[0]),
        "wrist_images": torch.from_numpy(images[1]),
        "extra_view_images": None,
        "states": torch.from_numpy(numbers.normal(size=(batch, 8)).astype(np.float32)),
        "task_descriptions": [SENTENCES[index % len(SENTENCES)] for index in range(batch)],
    }


@pytest.fixture
def build(build_actor: Callable[[DictConfig], Any]) -> Iterator[Callable[..., tuple[PhyaiPolicy, Any]]]:
    """``build(config, max_batch_size=...)``: a policy whose engine holds the actor's weights, and the actor."""
    policies: list[PhyaiPolicy] = []

    def make(config: DictConfig, max_batch_size: int = 8, rank: int = 0) -> tuple[PhyaiPolicy, Any]:
        actor = build_actor(config)
        policy = build_policy(config, config.actor.model, "cpu", rank, max_batch_size)
        policies.append(policy)
        with policy.weight_session() as session:
            policy.load_state_dict(actor.state_dict())
            session.version = 0
        return policy, actor

    yield make
    for policy in policies:
        policy.engine.close()


def rescore(actor: Any, result: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What the actor finds when it replays a sample."""
    with torch.no_grad():
        return actor.default_forward(forward_inputs=result["forward_inputs"], compute_values=True)
