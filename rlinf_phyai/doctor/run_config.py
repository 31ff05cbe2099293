# SPDX-License-Identifier: Apache-2.0
"""What a config asks for, against this machine: its validation, its checkpoint, and the memory it needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf_phyai.doctor.finding import Broken, Check, Doubtful, Finding

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from rlinf_phyai.doctor.memory import Parts, Run

_NEARLY_FULL = 0.9
_FULL_FIX = (
    "the largest part names the key: engine activations and cache: rollout.phyai.max_batch_size; actor activations: "
    "actor.micro_batch_size; environments: env.train.total_num_envs; parameters and optimizer: place actor and rollout on "
    "different GPUs in cluster.component_placement"
)
_FULL_FIX_EVALUATION = (
    "the largest part names the key: engine activations and cache: rollout.phyai.max_batch_size; environments: "
    "env.eval.total_num_envs"
)


@dataclass(frozen=True)
class Machine:
    """What memory is compared with. ``None``: not known.

    Attributes:
        gpus: number of GPUs. gpu_gib: memory of the smallest. host_gib: available host memory.
    """

    gpus: int
    gpu_gib: float | None
    host_gib: float | None

    @classmethod
    def here(cls) -> Machine:
        """This machine, as far as it can be read."""
        gpus, smallest = 0, None
        try:
            import torch

            gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
            sizes = [torch.cuda.get_device_properties(index).total_memory for index in range(gpus)]
            smallest = min(sizes) / 2**30 if sizes else None
        except Exception:  # the check of torch says why
            gpus, smallest = 0, None
        try:
            import psutil

            host = psutil.virtual_memory().available / 2**30
        except Exception:  # a part of Ray's installation
            host = None
        return cls(gpus, smallest, host)


def findings(
    config: str, overrides: list[str], config_path: str | None, machine: Machine, memory: dict[str, Any]
) -> Iterator[Finding]:
    """Everything about one config; ``memory`` is filled with the estimate, GiB by GPU and part."""
    composed: list[DictConfig] = []

    def compose() -> str:
        from rlinf_phyai.config_files import ConfigFileError, load_config
        from rlinf_phyai.evaluation.config import for_evaluation
        from rlinf_phyai.validation.settings import Settings

        try:
            cfg = load_config(config, overrides, config_path)
        except ConfigFileError as error:
            raise Broken(error.found, error.fix) from error
        if Settings(cfg).only_eval:
            for_evaluation(cfg)  # as rlinf_phyai.eval does before it looks at the config
        composed.append(cfg)
        return config

    fix = (
        "name a file of examples/embodiment/config without .yaml, or a path; each override is one argument key=value, "
        "quoted where its value holds spaces"
    )
    yield Check("config", compose, fix)()
    if not composed:
        return
    cfg = composed[0]
    problems: list[Finding] = []

    def validate() -> str:
        from rlinf_phyai.validation import find_problems

        problems.extend(
            Finding(
                p.key, p.severity, f"{p.found}; allowed: {p.allowed}" + (f". {p.reason}" if p.reason else ""), p.fix
            )
            for p in find_problems(cfg, gpus=machine.gpus)
        )
        return "nothing to complain about"

    checked = Check("config values", validate)()
    yield from problems or [checked]
    if not any(problem.part.endswith(".model_path") for problem in problems):
        fix = "set actor.model.model_path to a downloaded PI0.5 checkpoint"
        yield Check("checkpoint", lambda: _checkpoint(cfg), fix)()
    yield from _memory(cfg, machine, memory)


def _checkpoint(cfg: DictConfig) -> str:
    from omegaconf import OmegaConf

    from rlinf_phyai.models.pi05.checkpoint import tensor_shapes
    from rlinf_phyai.models.pi05.configuration import PI05Config
    from rlinf_phyai.rollout.openpi_setup import load_openpi_setup
    from rlinf_phyai.validation.settings import Settings

    section = OmegaConf.select(cfg, Settings(cfg).model)
    folder = Path(str(section.model_path))
    shapes = tensor_shapes(folder)
    model = PI05Config.from_checkpoint(folder)
    load_openpi_setup(section)  # normalisation statistics and tokenizer, read as a worker reads them
    critic = "with" if any(name.startswith("value_head.") for name in shapes) else "without"
    return (
        f"{folder}: {len(shapes)} tensors, {model.prefix.depth} layers of width {model.prefix.width}, {critic} critic"
    )


def _memory(cfg: DictConfig, machine: Machine, memory: dict[str, Any]) -> Iterator[Finding]:
    from rlinf_phyai.doctor.memory import host_gib, per_gpu

    runs: list[Run] = []

    def read() -> str:
        runs.append(read_run(cfg, machine.gpus))
        return ""

    problem = Check("GPU memory", read, "correct the config's problems first")()
    if not runs:
        yield replace(problem, status="warning", detail=f"no estimate: {problem.detail}")
        return
    run = runs[0]
    estimate, fix = per_gpu(run), _FULL_FIX if run.trains else _FULL_FIX_EVALUATION
    memory |= {"gpus": estimate, "host_gib": host_gib(run)}
    same: dict[tuple[tuple[str, float], ...], list[int]] = {}
    for rank, parts in estimate.items():
        same.setdefault(tuple(parts.items()), []).append(rank)
    for items, ranks in same.items():
        name = "GPU memory" if len(same) == 1 else f"GPU memory, {', '.join(map(str, ranks))}"
        yield Check(name, lambda items=items: _fits(dict(items), machine, run.sizes), fix)()  # type: ignore[misc]
    yield Check(
        "host memory",
        lambda: _host(host_gib(run), run.nodes, machine),
        f"fewer environments (env.{'train' if run.trains else 'eval'}.total_num_envs), or more nodes",
    )()


def _fits(parts: Parts, machine: Machine, sizes: str) -> str:
    total = sum(parts.values())
    listed = ", ".join(f"{name} {size:.1f}" for name, size in parts.items() if size >= 0.05)
    text = f"about {total:.1f} GiB for {sizes} ({listed})"
    if machine.gpu_gib is None:
        return f"no GPU here to compare with; on one it would take {text}"
    text += f" of {machine.gpu_gib:.0f}"
    if total > machine.gpu_gib:
        raise Broken(text)
    if total > _NEARLY_FULL * machine.gpu_gib:
        raise Doubtful(text)
    return text


def _host(needed: float, nodes: int, machine: Machine) -> str:
    text = f"environments take about {needed:.0f} GiB{f' on each of {nodes} nodes' if nodes > 1 else ''}"
    if machine.host_gib is None:
        return text
    text += f"; {machine.host_gib:.0f} GiB are available{' here' if nodes > 1 else ''}"
    if needed > machine.host_gib:
        raise Doubtful(text)
    return text


def read_run(cfg: DictConfig, gpus: int) -> Run:
    """The numbers of ``cfg`` that decide about memory, on a cluster of ``gpus`` (0 counts as one).

    Raises:
        Broken: the placement or a number is missing.
    """
    from rlinf_phyai.doctor.memory import Run, published
    from rlinf_phyai.models.pi05.configuration import PI05Config
    from rlinf_phyai.rollout.build import params_dtype
    from rlinf_phyai.validation.placement import Component
    from rlinf_phyai.validation.settings import Settings

    settings = Settings(cfg, gpus or 1)
    placed = {}
    for name in ("actor", "rollout", "env") if settings.trains else ("rollout", "env"):
        component = settings.component(name)
        resources = component.resources if isinstance(component, Component) else None
        if not resources:
            raise Broken(f"cluster.component_placement does not place {name}: {component}")
        placed[name] = resources
    environments = max((section.total or 0 for section in settings.environments), default=0)
    if not environments:
        names = [section.key("total_num_envs") for section in settings.environments]
        raise Broken(f"{' and '.join(names)} {'are' if len(names) > 1 else 'is'} not set")
    openpi = settings.get(settings.openpi) or {}
    critic = None
    if settings.has_critic:
        critic = openpi.get("value_vlm_mode", "mean_token") if settings.critic_after_vlm else "expert"
    folder = settings.path(f"{settings.model}.model_path")
    known = folder is not None and folder.is_dir()
    model = PI05Config.from_checkpoint(folder) if known and folder else published(value=False)
    dtype = params_dtype(settings.text("rollout.phyai.params_dtype"), folder or "")
    stages = max(1, settings.stages or 1)
    per_worker = -(-environments // len(placed["rollout"]))
    batch = settings.integer("rollout.phyai.max_batch_size") or -(-per_worker // stages)
    fsdp = str(settings.text("actor.fsdp_config.strategy") or "fsdp")
    sharding = str(settings.text("actor.fsdp_config.sharding_strategy") or "no_shard")
    return Run(
        model=replace(model, value_mode=critic),
        sizes="this checkpoint" if known else "the published sizes (the checkpoint is not here)",
        dtype=dtype,
        fp8_prefix=settings.text("rollout.phyai.prefix_precision") == "fp8",
        cameras=int(openpi.get("num_images_in_input", 2)),
        rollout_batch=min(batch, per_worker),
        micro_batch=settings.integer("actor.micro_batch_size") or 1,
        environments=-(-environments // len(placed["env"])),
        trains=settings.trains,
        expert_only=bool(openpi.get("train_expert_only", False)),
        shards=fsdp == "fsdp2" or sharding != "no_shard",
        actor_offload=settings.flag("actor.enable_offload"),
        rollout_offload=settings.flag("rollout.enable_offload"),
        actors=placed["actor"] if settings.trains else (),
        rollouts=placed["rollout"],
        environment_workers=placed["env"],
        nodes=max(1, settings.integer("cluster.num_nodes") or 1),
    )
