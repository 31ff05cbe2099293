# SPDX-License-Identifier: Apache-2.0
"""How much memory a config needs, per GPU and on the host: exact sizes of what is stored, measured rates for the rest.

Per GPU that a rollout worker uses (engine, B = its largest batch, T = camera tokens + 24 prompt tokens, plus the 257 padding rows
of an exact value; docs/performance.md measured 9.42 GiB at B = 64):

    weights      bytes of the engine's storages
    cache        2 * layers * B * (T + horizon) * kv_heads * head_dim * 2 bytes
    activations  B * T * (mlp_dim + 8 * width) * 2 bytes: the gated MLP's product, and eight rows of the hidden size
    inputs       twice B float32 images per camera: the buckets of smaller batches add up to one more

Per GPU that an actor uses (benchmarks/results/actor_mb32.json and actor_mb128.json measured 17.9 and 35.1 GiB):

    parameters   bytes in the actor's types; gradients and Adam's two moments: the same per trainable byte, so once and twice
    activations  0.18 GiB per observation of the micro-batch, from the two measurements

With offloading, the larger of the two sides counts. A strategy that shards divides parameters, gradients and moments by the number
of actors. Not measured, so assumed: 0.6 GiB for the CUDA context of each process, 0.2 GiB for an environment that renders on the
GPU. Measured on a CPU: 2.2 GiB of host memory for a LIBERO environment.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import torch

from rlinf_phyai.models.pi05.checkpoint import LM_HEAD
from rlinf_phyai.models.pi05.configuration import PI05Config
from rlinf_phyai.models.pi05.weights import PI05Weights

GIB = 2**30
PROMPT_TOKENS = 24
PADDING_ROWS = 257
HIDDEN_ROWS = 8
ACTIVATION_GIB = 0.18
CONTEXT_GIB = 0.6
ENVIRONMENT_GPU_GIB = 0.2
ENVIRONMENT_HOST_GIB = 2.2
TRAINABLE = ("paligemma_with_expert.gemma_expert.", "action_in_proj.", "action_out_proj.", "time_mlp_", "value_head.")

Parts = dict[str, float]
"""Name of a part -> GiB."""


@dataclass(frozen=True)
class Run:
    """The numbers of a config that decide about memory. Batches and environments are those of one process.

    Attributes:
        sizes: which model it is, in words.
        actors, rollouts, environment_workers: per process, the GPUs it uses.
        shards: the FSDP strategy divides the model over the actors.
        actor_offload, rollout_offload: that side leaves the GPU while the other works.
    """

    model: PI05Config
    sizes: str
    dtype: torch.dtype
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


def engine_parts(model: PI05Config, batch: int, cameras: int, dtype: torch.dtype = torch.bfloat16) -> Parts:
    """Memory of one engine; ``model.value_mode`` tells whether it computes values."""
    prefix, width = model.prefix, dtype.itemsize
    tokens = cameras * model.vision.num_tokens + min(PROMPT_TOKENS, model.tokenizer_max_length)
    computed = tokens + (PADDING_ROWS if model.critic_after_vlm else 0)
    cache = 2 * prefix.depth * batch * (tokens + model.action_horizon) * prefix.num_kv_heads * prefix.head_dim * width
    activations = batch * computed * (prefix.mlp_dim + HIDDEN_ROWS * prefix.width) * width
    inputs = 2 * batch * cameras * 3 * model.vision.image_size**2 * 4
    return {
        "engine weights": PI05Weights(model, torch.device("meta"), dtype).num_bytes / GIB,
        "engine key/value cache": cache / GIB,
        "engine activations": (activations + inputs) / GIB,
    }


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
    engine = _placed(run.rollouts, engine_parts(run.model, run.rollout_batch, run.cameras, run.dtype))
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
    """Host memory of the environments."""
    return ENVIRONMENT_HOST_GIB * run.environments * max(1, len(run.environment_workers))


def published(value: bool) -> PI05Config:
    """The published sizes, with or without a critic after the VLM."""
    return replace(PI05Config(), value_mode="mean_token" if value else None)
