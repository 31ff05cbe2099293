# SPDX-License-Identifier: Apache-2.0
"""How much memory a config needs, per GPU and on the host: exact sizes of what is stored, measured rates for the rest.

Per GPU that a rollout worker uses: :mod:`rlinf_phyai.models.pi05.memory`, with the engine's largest batch.

Per GPU that an actor uses (benchmarks/results/actor_mb32.json and actor_mb128.json measured 17.9 and 35.1 GiB):

    parameters   bytes in the actor's types; gradients and Adam's two moments: the same per trainable byte, so once and twice
    activations  0.18 GiB per observation of the micro-batch, from the two measurements

With offloading, the larger of the two sides counts. A strategy that shards divides parameters, gradients and moments by the number
of actors. Measured on an H200: 0.6 GiB for the CUDA context of a process, 0.54 GiB for an environment that renders its two cameras on the
GPU (eight of them took 4.3 GiB). On a CPU: 2.2 GiB of host memory for a LIBERO environment.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace

import torch

from rlinf_phyai.models.pi05.checkpoint import LM_HEAD
from rlinf_phyai.models.pi05.configuration import PI05Config
from rlinf_phyai.models.pi05.memory import HIDDEN_ROWS, engine_bytes
from rlinf_phyai.models.pi05.weights import PI05Weights

GIB = 2**30
ACTIVATION_GIB = 0.18
CONTEXT_GIB = 0.6
ENVIRONMENT_GPU_GIB = 0.54
ENVIRONMENT_HOST_GIB = 2.2
TRAINABLE = ("paligemma_with_expert.gemma_expert.", "action_in_proj.", "action_out_proj.", "time_mlp_", "value_head.")

Parts = dict[str, float]
"""Name of a part -> GiB."""


@dataclass(frozen=True)
class Run:
    """The numbers of a config that decide about memory. Batches and environments are those of one process.

    Attributes:
        sizes: which model it is, in words.
        nodes: of the cluster; environment workers are taken to be spread evenly over them.
        actors, rollouts, environment_workers: per process, the GPUs it uses.
        shards: the FSDP strategy divides the model over the actors.
        actor_offload, rollout_offload: that side leaves the GPU while the other works.
    """

    model: PI05Config
    sizes: str
    dtype: torch.dtype
    fp8_prefix: bool
    cameras: int
    rollout_batch: int
    micro_batch: int
    environments: int
    trains: bool
    expert_only: bool
    shards: bool
    actor_offload: bool
    rollout_offload: bool
    actors: tuple[tuple[int, ...], ...]
    rollouts: tuple[tuple[int, ...], ...]
    environment_workers: tuple[tuple[int, ...], ...]
    nodes: int = 1


def engine_parts(
    model: PI05Config, batch: int, cameras: int, dtype: torch.dtype = torch.bfloat16, fp8_prefix: bool = False
) -> Parts:
    """Memory of one engine (:func:`rlinf_phyai.models.pi05.memory.engine_bytes`)."""
    parts = engine_bytes(model, batch, cameras, dtype, fp8_prefix)
    return {f"engine {name}": size / GIB for name, size in parts.items()}


def actor_parts(
    model: PI05Config, micro_batch: int, *, expert_only: bool, shards: int = 1, dtype: torch.dtype = torch.bfloat16
) -> Parts:
    """Memory of one actor. ``shards``: over how many GPUs the model is divided."""
    views = PI05Weights(model, torch.device("meta"), dtype).views
    # The output head is tied to the embedding.
    sizes = {name: view.numel() * view.element_size() for name, view in views.items() if name != LM_HEAD}
    trainable = sum(size for name, size in sizes.items() if not expert_only or name.startswith(TRAINABLE))
    return {
        "actor parameters": sum(sizes.values()) / GIB / shards,
        "actor gradients": trainable / GIB / shards,
        "actor optimizer (Adam)": 2 * trainable / GIB / shards,
        "actor activations": ACTIVATION_GIB * micro_batch * _prefix_work(model) / _prefix_work(PI05Config()),
    }


def _prefix_work(model: PI05Config) -> int:
    """What the activations of an actor's observation grow with."""
    prefix = model.prefix
    return prefix.depth * (prefix.mlp_dim + HIDDEN_ROWS * prefix.width) * model.vision.num_tokens


def per_gpu(run: Run) -> dict[int, Parts]:
    """GPU -> its parts when they are most: while the engine samples or while the actor trains, without what is offloaded then."""
    engine = _placed(run.rollouts, engine_parts(run.model, run.rollout_batch, run.cameras, run.dtype, run.fp8_prefix))
    actor: dict[int, Parts] = {}
    if run.trains:
        shards = max(1, len(run.actors)) if run.shards else 1
        parts = actor_parts(run.model, run.micro_batch, expert_only=run.expert_only, shards=shards, dtype=run.dtype)
        actor = _placed(run.actors, parts)
    processes = _placed(run.rollouts + (run.actors if run.trains else ()), {"CUDA contexts": CONTEXT_GIB})
    simulators = _placed(run.environment_workers, {"environments": ENVIRONMENT_GPU_GIB * run.environments})
    found = {}
    for rank in sorted({*engine, *actor, *processes, *simulators}):
        always = processes.get(rank, {}) | simulators.get(rank, {})
        sampling = engine.get(rank, {}) | ({} if run.actor_offload else actor.get(rank, {}))
        training = actor.get(rank, {}) | ({} if run.rollout_offload else engine.get(rank, {}))
        found[rank] = max(sampling, training, key=lambda parts: sum(parts.values())) | always
    return found


def _placed(users: tuple[tuple[int, ...], ...], parts: Parts) -> dict[int, Parts]:
    """Parts per GPU; a process on several GPUs is taken to use them evenly."""
    found: dict[int, Parts] = defaultdict(dict)
    for ranks in users:
        for rank in ranks:
            for name, size in parts.items():
                found[rank][name] = found[rank].get(name, 0.0) + size / len(ranks)
    return found


def host_gib(run: Run) -> float:
    """Host memory of the environments of one node, GiB."""
    return ENVIRONMENT_HOST_GIB * math.ceil(run.environments * max(1, len(run.environment_workers)) / run.nodes)


def published(value: bool) -> PI05Config:
    """The published sizes, with or without a critic after the VLM."""
    return replace(PI05Config(), value_mode="mean_token" if value else None)
