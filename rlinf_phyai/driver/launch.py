# SPDX-License-Identifier: Apache-2.0
"""What training and evaluation share: from a composed config to confirmed RLinf worker groups, and a clean end."""

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rlinf_phyai import backends, config_files, environment, plugin
from rlinf_phyai.calls import CallLog
from rlinf_phyai.driver.cluster import ray_cluster
from rlinf_phyai.driver.log_dir import claimed
from rlinf_phyai.driver.shutdown import Interrupted, RayGuard
from rlinf_phyai.driver.stall import watched
from rlinf_phyai.errors import PhyaiError
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


def run_hydra(program: Callable[[], None]) -> None:
    """A ``hydra.main`` program: relative config paths count from the current folder, a config that cannot be composed is one line."""
    sys.argv[1:] = absolute_config_path(sys.argv[1:])
    traceback_wanted = "HYDRA_FULL_ERROR" in os.environ
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra would print a traceback itself and exit
    file = config_file(sys.argv[1:])
    try:
        config_files.explained(file, str(file or "the config"), program, overrides(sys.argv[1:]))
    except config_files.ConfigFileError as error:
        if traceback_wanted:
            raise
        say(f"stopped: {error}")
        sys.exit(1)


def run_as_program(function: Callable[[DictConfig], object], cfg: DictConfig) -> None:
    """Call ``function(cfg)`` and turn our own errors into a message and an exit code instead of a traceback."""
    if not cfg:
        say("no config: pass --config-path DIR --config-name NAME")
        sys.exit(2)
    try:
        function(cfg)
    except PhyaiError as error:
        say(f"stopped: {error}")
        sys.exit(1)
    except Interrupted as error:
        say(str(error))
        sys.exit(error.exit_code)
    except Exception:  # a fault of ours, or of RLinf: everything about it, and never mistaken for a config's
        traceback.print_exc()
        sys.exit(1)


_CONFIG_PATH, _CONFIG_DIR, _CONFIG_NAME = ("--config-path", "-cp"), ("--config-dir", "-cd"), ("--config-name", "-cn")


def config_file(arguments: list[str]) -> Path | None:
    """The file that ``--config-path`` and ``--config-name`` name, or None: then it is left to Hydra to find."""
    given: dict[str, str] = {}
    for argument, following in zip(arguments, [*arguments, ""][1:], strict=True):
        name, equals, value = argument.partition("=")
        given[name] = value if equals else following
    folder, name = (next((given[k] for k in keys if k in given), "") for keys in (_CONFIG_PATH, _CONFIG_NAME))
    if not folder or not name or "://" in folder or any(key in given for key in _CONFIG_DIR):
        return None
    return Path(folder) / (name if name.endswith(".yaml") else f"{name}.yaml")


def overrides(arguments: list[str]) -> list[str]:
    """The Hydra overrides of a command line."""
    before = ["", *arguments]
    options = (*_CONFIG_PATH, *_CONFIG_DIR, *_CONFIG_NAME)
    return [a for a, option in zip(arguments, before, strict=False) if not a.startswith("-") and option not in options]


def absolute_config_path(arguments: list[str]) -> list[str]:
    """Read a relative ``--config-path`` from the current folder; Hydra would read it from the program's."""
    result = list(arguments)
    for index, argument in enumerate(result):
        name, equals, value = argument.partition("=")
        if name not in (*_CONFIG_PATH, *_CONFIG_DIR):
            continue
        if equals and value and "://" not in value:
            result[index] = f"{name}={os.path.abspath(value)}"
        elif not equals and index + 1 < len(result) and "://" not in result[index + 1]:
            result[index + 1] = os.path.abspath(result[index + 1])
    return result
