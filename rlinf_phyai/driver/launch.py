# SPDX-License-Identifier: Apache-2.0
"""What training and evaluation share: from a composed config to confirmed RLinf worker groups, and a clean end."""

import importlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rlinf_phyai import backends, environment, plugin
from rlinf_phyai.calls import CallLog
from rlinf_phyai.driver.cluster import ray_cluster
from rlinf_phyai.driver.log_dir import claimed
from rlinf_phyai.driver.shutdown import RayGuard
from rlinf_phyai.driver.stall import watched
from rlinf_phyai.signs import SignsOfLife

_PATH_KEYS = (
    "runner.logger.log_path",
    "runner.ckpt_path",
    "runner.resume_dir",
    "actor.model.model_path",
    "rollout.model.model_path",
)


@contextmanager
def worker_groups(
    cfg: DictConfig, components: Iterable[str], env_worker: str | None = None
) -> Iterator[tuple[DictConfig, dict[str, Any]]]:
    """RLinf's worker groups of these components (``actor``, ``rollout``, ``env``), launched and confirmed.

    Args:
        env_worker: class of the environment workers, as ``module:Class``, instead of the backend's own.

    Yields:
        the config as RLinf completed it, and the groups by component. Leaving the block shuts Ray down.

    Raises:
        PhyaiError: the config is refused, the log folder or the Ray cluster cannot be used, a worker does not run what
            it should, or a worker failed.
    """
    prepare()
    validate(cfg)  # first: it lists a wrong backend or a value that cannot be resolved with everything else
    absolute_paths(cfg)
    backend = backends.get(cfg.rollout.get("rollout_backend") or backends.DEFAULT)
    components = tuple(components)
    classes = {component: _worker_class(backend, component, env_worker) for component in components}

    from rlinf.config import validate_cfg
    from rlinf.scheduler import Cluster
    from rlinf.utils.placement import HybridComponentPlacement

    log_path = cfg.runner.logger.log_path
    with claimed(log_path), ray_cluster(cfg.cluster.num_nodes, say), RayGuard() as guard:
        cfg = validate_cfg(cfg)  # starts Ray
        guard.install()
        write_config(cfg)
        cluster = Cluster(cluster_cfg=cfg.cluster, distributed_log_dir=cfg.runner.per_worker_log_path)
        share_environment(cluster)
        placement = HybridComponentPlacement(cfg, cluster)
        groups = {}
        with guard.patient():  # a worker without the plugin may fail at once, and only asking all of them tells why
            for component, worker_class in classes.items():
                groups[component] = worker_class.create_group(cfg).launch(
                    cluster, name=cfg[component].group_name, placement_strategy=placement.get_strategy(component)
                )
            plugin.confirm([(groups[component], worker_class) for component, worker_class in classes.items()])
        running = ", ".join(f"{component} {worker_class.__name__}" for component, worker_class in classes.items())
        watchable = all(issubclass(worker_class, SignsOfLife) for worker_class in classes.values())  # ours
        calls = CallLog(groups.values())
        guard.explain = calls.failures
        say(f"rollout backend {backend.name}; every worker confirmed: {running}")
        with watched(cfg, groups, calls, say, guard.end) if watchable else nullcontext():
            yield cfg, groups


def _worker_class(backend: backends.RolloutBackend, component: str, env_worker: str | None) -> type[Any]:
    if component == "actor":
        return backend.load_actor_worker()
    if component == "rollout":
        return backend.load_rollout_worker()
    if env_worker is not None:
        module, _, name = env_worker.partition(":")
        return getattr(importlib.import_module(module), name)
    return backend.load_env_worker()


def prepare() -> None:
    """What the driver needs before it imports RLinf: environment, spawned processes, the plugin."""
    environment.set_defaults()
    plugin.activate()
    import torch.multiprocessing

    torch.multiprocessing.set_start_method("spawn", force=True)
    plugin.register()


def absolute_paths(cfg: DictConfig) -> None:
    """Make the config's paths absolute, ``~`` expanded: workers have a working directory of their own, RLinf expands none.

    A path that does not exist is left alone for the validation to report, except the log folder.
    """
    values = {key: OmegaConf.select(cfg, key, throw_on_missing=False) for key in _PATH_KEYS}
    for key, value in values.items():
        path = os.path.expanduser(value) if value else ""
        if path and (Path(path).exists() or key.endswith("log_path")):
            OmegaConf.update(cfg, key, os.path.abspath(path), force_add=True)


def validate(cfg: DictConfig) -> None:
    """Refuse what cannot work, all problems at once, before any process is started; print the warnings."""
    from rlinf_phyai.validation import validate_config

    for warning in validate_config(cfg, gpus=cluster_gpus(cfg)):
        say(f"warning: {warning}")


def cluster_gpus(cfg: DictConfig) -> int | None:
    """Accelerators of the cluster as RLinf will count them; None for several nodes, which only Ray knows."""
    from rlinf.scheduler.hardware import Accelerator

    if OmegaConf.select(cfg, "cluster.num_nodes", throw_on_missing=False) != 1:
        return None
    found = Accelerator.enumerate()
    return 0 if found is None else len(found.infos)


def write_config(cfg: DictConfig) -> None:
    """The resolved config, as RLinf completed it, into ``config.yaml`` of the log folder."""
    file = Path(cfg.runner.logger.log_path) / "config.yaml"
    file.write_text(OmegaConf.to_yaml(cfg, resolve=True))
    say(f"config: {file}")


def share_environment(cluster: Any) -> None:
    """Name the plugin on every node, whatever environment Ray was started with there."""
    for rank in range(cluster.num_nodes):
        variables = cluster.get_node_info(rank).env_vars
        if plugin.CHAINED_MODULE in os.environ:
            variables[plugin.CHAINED_MODULE] = os.environ[plugin.CHAINED_MODULE]
        plugin.activate(variables)


def say(line: str) -> None:
    """One line of our own among Ray's."""
    print(f"[rlinf-phyai] {line}", flush=True)
