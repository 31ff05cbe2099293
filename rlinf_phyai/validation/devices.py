# SPDX-License-Identifier: Apache-2.0
"""Processes and devices: placement, FSDP, precision, and how weights travel."""

from __future__ import annotations

from collections.abc import Iterator

from rlinf_phyai.validation.placement import PLACEMENT, Component, placed_twice, replacing
from rlinf_phyai.validation.problems import Problem, did_you_mean, one_of, show
from rlinf_phyai.validation.settings import Settings

SYNCERS = ("bucket", "patch")
COMPRESSIONS = ("none", "nvcomp_lz4")
FSDP_STRATEGIES = ("fsdp", "fsdp2")
FP32_NAMES = ("fp32", "32", "32-true", 32)
MIXED_PRECISION = tuple(
    f"actor.fsdp_config.mixed_precision.{name}" for name in ("param_dtype", "reduce_dtype", "buffer_dtype")
)
PRECISION_REASON = (
    "PI0.5 mixes bfloat16 and float32 parts on purpose; one precision for all changes the actor's log-probs, and the "
    "engine would no longer compute the same function"
)


def placement_syntax(s: Settings) -> Iterator[Problem]:
    """Environments, rollout and (in training) actor must be placed, in RLinf's syntax."""
    if not s.keys(PLACEMENT):
        return  # the schema reports it
    for name in ("env", "rollout", *(("actor",) if s.trains else ())):
        placed = s.component(name)
        if isinstance(placed, Component):
            continue
        yield Problem(
            f"{PLACEMENT}.{name}",
            "missing" if placed is None else placed,
            "resources[:processes] parts such as 0-3, all, 0-1:0-3",
            f"add {name} to {PLACEMENT}" if placed is None else f"correct the placement of {name}",
        )


def placed_once(s: Settings) -> Iterator[Problem]:
    """A component may be placed by one key only."""
    twice = placed_twice(s.keys(PLACEMENT))
    if twice:
        yield Problem(
            PLACEMENT,
            "; ".join(f"{name} placed by {' and '.join(map(repr, keys))}" for name, keys in twice.items()),
            "every component under one key",
            f"keep one of the keys; on the command line replace the whole section, for example {replacing()}",
            "RLinf refuses a component with two placements, and an override with + adds a key beside those of the file",
        )


def one_gpu_per_rollout_worker(s: Settings) -> Iterator[Problem]:
    """A rollout worker drives one engine on exactly one GPU."""
    placed = s.component("rollout")
    if not isinstance(placed, Component) or placed.resources is None:
        return
    several = {process: ranks for process, ranks in enumerate(placed.resources) if len(ranks) > 1}
    if several:
        process, ranks = next(iter(several.items()))
        yield Problem(
            f"{PLACEMENT}.rollout",
            f"{len(ranks)} resources ({', '.join(map(str, ranks))}) for rollout process {process}",
            "one GPU per rollout process",
            "give the component one process per resource, for example rollout: 0-3 instead of rollout: 0-3:0-1",
            "one engine runs on one GPU; it cannot be split",
        )
    shared = placed.shared()
    if shared and not s.no_gpu:
        resource, processes = next(iter(shared.items()))
        yield Problem(
            f"{PLACEMENT}.rollout",
            f"GPU {resource} for rollout processes {', '.join(map(str, processes))}",
            "one GPU per rollout process",
            "give the component one process per GPU; one engine with a larger batch is faster than two engines",
            "every engine reserves its own weights, caches and graphs on its GPU",
        )


def fsdp_strategy(s: Settings) -> Iterator[Problem]:
    """FSDP must be a strategy that exists, and fsdp2 without a GPU."""
    key = "actor.fsdp_config.strategy"
    value = s.get(key, "fsdp")
    if not s.trains:
        return
    if str(value).lower() not in FSDP_STRATEGIES:
        yield Problem(
            key, show(value), one_of(FSDP_STRATEGIES), did_you_mean(str(value), FSDP_STRATEGIES) or f"set {key}: fsdp2"
        )
    elif s.no_gpu and str(value).lower() != "fsdp2":
        found = show(value) if s.has(key) else "missing (RLinf takes fsdp)"
        yield Problem(
            key,
            found,
            "fsdp2 without a GPU",
            f"set {key}: fsdp2",
            "RLinf's first FSDP strategy runs on accelerators only",
        )


def trained_prefix(s: Settings) -> Iterator[Problem]:
    """FSDP2 must keep the weights of a prefix that learns until its backward pass."""
    strategy, key = str(s.get("actor.fsdp_config.strategy")).lower(), "actor.fsdp_config.reshard_after_forward"
    lora = s.flag(f"{s.model}.is_lora")
    if not (
        s.trains and strategy == "fsdp2" and s.flag(key, True) and (lora or not s.flag(f"{s.openpi}.train_expert_only"))
    ):
        return
    yield Problem(
        key,
        show(s.get(key)) if s.has(key) else "missing (true)",
        f"false where fsdp2 trains the vision-language model ({s.model}.is_lora, or {s.openpi}.train_expert_only off)",
        f"set {key}: false, or actor.fsdp_config.strategy: fsdp",
        "the expert's gradient reaches a prefix layer through its keys and values only, which FSDP2 does not watch: the layer's "
        "weights would be gone when its backward pass needs them",
    )


def weight_syncer(s: Settings) -> Iterator[Problem]:
    """Weights travel through RLinf's bucket syncer, or its patch syncer on GPUs."""
    key = "weight_syncer.type"
    value = s.get(key)
    if not s.trains or not s.keys("weight_syncer"):
        return
    if value not in SYNCERS:
        found = show(value) if s.has(key) else "missing"
        yield Problem(key, found, one_of(SYNCERS), did_you_mean(str(value), SYNCERS) or f"set {key}: bucket")
    elif value == "patch" and s.no_gpu:
        yield Problem(
            key,
            "'patch'",
            "bucket without a GPU",
            f"set {key}: bucket",
            "the patch syncer compares weights with CUDA streams",
        )
    elif not s.keys(f"weight_syncer.{value}"):
        yield Problem(
            f"weight_syncer.{value}",
            "missing" if not s.has(f"weight_syncer.{value}") else show(s.get(f"weight_syncer.{value}")),
            f"a section with the options of the {value} syncer",
            f"add the section weight_syncer.{value}",
        )


def bucket_options(s: Settings) -> Iterator[Problem]:
    """The bucket syncer needs a size, and must leave the parameter names alone."""
    if not s.trains or s.get("weight_syncer.type") != "bucket" or not s.keys("weight_syncer.bucket"):
        return
    key = "weight_syncer.bucket.bucket_size"
    size = s.integer(key)
    if size is None or size < 1:
        found = show(s.get(key)) if s.has(key) else "missing"
        yield Problem(key, found, "a number of bytes, at least 1", f"set {key}: 536870912")
    if s.flag("weight_syncer.bucket.is_agent"):
        yield Problem(
            "weight_syncer.bucket.is_agent",
            "true",
            "false",
            "set weight_syncer.bucket.is_agent: false",
            "it renames parameters for language agents; the engine knows the actor's names",
        )


def patch_initial_sync(s: Settings) -> Iterator[Problem]:
    """The patch syncer must begin with a full synchronisation."""
    key = "weight_syncer.patch.init_sync.enabled"
    if (
        s.trains
        and not s.no_gpu
        and s.get("weight_syncer.type") == "patch"
        and s.keys("weight_syncer.patch")
        and not s.flag(key)
    ):
        yield Problem(
            key,
            show(s.get(key)) if s.has(key) else "missing (false)",
            "true",
            f"set {key}: true",
            "patches carry changes only; a value head that starts random on both sides would never become equal",
        )


def patch_compression(s: Settings) -> Iterator[Problem]:
    """RLinf ignores a compression that it does not know; the one that it knows needs NVIDIA's package and a GPU transport."""
    if not s.trains or s.no_gpu or s.get("weight_syncer.type") != "patch":
        return
    name = "compression_algorithm" if s.has("weight_syncer.patch.compression_algorithm") else "compression"
    key = f"weight_syncer.patch.{name}"
    value = s.get(key, "none")
    if value not in COMPRESSIONS:
        fix = did_you_mean(str(value), COMPRESSIONS) or f"set {key}: none"
        yield Problem(key, show(value), one_of(COMPRESSIONS), fix, "RLinf would send uncompressed patches")
    elif value != "none" and not str(s.get("weight_syncer.patch.transport_device", "cuda")).startswith("cuda"):
        found = f"{show(value)} with transport_device {show(s.get('weight_syncer.patch.transport_device'))}"
        yield Problem(key, found, "none where patches travel through the host", f"set {key}: none")


def lora_syncer(s: Settings) -> Iterator[Problem]:
    """Merged LoRA weights travel in buckets."""
    if s.trains and s.flag(f"{s.model}.is_lora") and s.get("weight_syncer.type") == "patch":
        yield Problem(
            "weight_syncer.type",
            "'patch'",
            f"bucket with {s.model}.is_lora: true",
            "use the group weight_syncer: bucket",
            "patches compare parameters by their adapters' names, and the engine holds merged matrices",
        )


def precision(s: Settings) -> Iterator[Problem]:
    """The actor must keep PI0.5's own mix of precisions."""
    if not s.trains:
        return
    for key in (f"{s.model}.precision", *MIXED_PRECISION):
        value = s.get(key)
        # float32 depends on the checkpoint: checked with the files.
        if value is not None and value != "null" and value not in FP32_NAMES:
            yield Problem(key, show(value), "null", f"set {key}: null", PRECISION_REASON)


CHECKS_ANY = (placement_syntax, placed_once)
CHECKS = (
    one_gpu_per_rollout_worker,
    fsdp_strategy,
    trained_prefix,
    weight_syncer,
    bucket_options,
    patch_initial_sync,
    patch_compression,
    lora_syncer,
    precision,
)
