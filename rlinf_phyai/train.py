# SPDX-License-Identifier: Apache-2.0
"""Train: ``python -m rlinf_phyai.train --config-path DIR --config-name NAME [overrides]``.

Validates the config, prints it, starts RLinf's workers with the classes of the chosen rollout backend, checks that they
run, and hands over to RLinf's runner.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf, open_dict

from rlinf_phyai import backends, environment, plugin
from rlinf_phyai.errors import PhyaiError
from rlinf_phyai.shutdown import Interrupted, RayGuard

_PATH_KEYS = (
    "runner.logger.log_path",
    "runner.ckpt_path",
    "runner.resume_dir",
    "actor.model.model_path",
    "rollout.model.model_path",
)


def train(cfg: DictConfig, runner_class: type[Any] | None = None) -> None:
    """Run the training that ``cfg`` describes, to the end.

    Args:
        cfg: a config as RLinf's embodied examples have it, plus ``rollout.rollout_backend`` and ``rollout.phyai``.
        runner_class: instead of :class:`rlinf_phyai.runner.PhyaiRunner`.

    Raises:
        PhyaiError: the config is refused, a worker does not run what it should, or a worker failed.
        Interrupted: SIGINT or SIGTERM; Ray is shut down then.
    """
    prepare()
    absolute_paths(cfg)
    backend = backends.get(cfg.rollout.get("rollout_backend", backends.DEFAULT))
    rollout_class, actor_class = backend.load_rollout_worker(), backend.load_actor_worker()
    validate(cfg)

    from rlinf.config import validate_cfg
    from rlinf.scheduler import Cluster
    from rlinf.utils.placement import HybridComponentPlacement
    from rlinf.workers.env.env_worker import EnvWorker

    from rlinf_phyai.runner import PhyaiRunner

    with RayGuard() as guard:
        cfg = validate_cfg(cfg)  # starts Ray
        guard.install()
        print_config(cfg)
        cluster = Cluster(cluster_cfg=cfg.cluster, distributed_log_dir=cfg.runner.per_worker_log_path)
        share_environment(cluster)
        placement = HybridComponentPlacement(cfg, cluster)

        def launch(component: str, worker_class: type[Any]) -> Any:
            return worker_class.create_group(cfg).launch(
                cluster, name=cfg[component].group_name, placement_strategy=placement.get_strategy(component)
            )

        classes = {"actor": actor_class, "rollout": rollout_class, "env": EnvWorker}
        groups = {component: launch(component, worker_class) for component, worker_class in classes.items()}
        for component, worker_class in classes.items():
            plugin.confirm(groups[component], worker_class)
        say(f"backend {backend.name}: {rollout_class.__name__}, {actor_class.__name__} confirmed in every worker")

        runner = (runner_class or PhyaiRunner)(cfg=cfg, **groups)
        runner.init_workers()
        runner.run()
        say(f"finished; logs in {cfg.runner.logger.log_path}")


def prepare() -> None:
    """What the driver needs before it imports RLinf: environment, spawned processes, the plugin."""
    environment.set_defaults()
    plugin.activate()
    import torch.multiprocessing

    torch.multiprocessing.set_start_method("spawn", force=True)
    plugin.register()


def absolute_paths(cfg: DictConfig) -> None:
    """Make the config's paths absolute: workers have a working directory of their own.

    A path that does not exist is left alone for the validation to report, except the log folder.
    """
    values = {key: OmegaConf.select(cfg, key) for key in _PATH_KEYS}
    for key, value in values.items():
        if value and (Path(value).exists() or key.endswith("log_path")):
            OmegaConf.update(cfg, key, os.path.abspath(value), force_add=True)


def validate(cfg: DictConfig) -> None:
    """Refuse what cannot work, all problems at once, before any process is started."""
    from rlinf_phyai.validation import validate_config

    validate_config(cfg)


def print_config(cfg: DictConfig) -> None:
    """The resolved config on stdout, as RLinf prints it."""
    print(json.dumps(OmegaConf.to_container(cfg, resolve=True), indent=2), flush=True)


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


def run_as_program(function: Any, cfg: DictConfig) -> None:
    """Call ``function(cfg)`` and turn our own errors into a message and an exit code instead of a traceback."""
    try:
        function(cfg)
    except PhyaiError as error:
        say(f"stopped: {error}")
        sys.exit(1)
    except Interrupted as error:
        say(str(error))
        sys.exit(error.exit_code)


def absolute_config_path(arguments: list[str]) -> list[str]:
    """Read a relative ``--config-path`` from the current folder; Hydra reads it from the program's."""
    result = list(arguments)
    for index, argument in enumerate(result):
        name, equals, value = argument.partition("=")
        if name not in ("--config-path", "-cp", "--config-dir", "-cd"):
            continue
        if equals and value and "://" not in value:
            result[index] = f"{name}={os.path.abspath(value)}"
        elif not equals and index + 1 < len(result) and "://" not in result[index + 1]:
            result[index + 1] = os.path.abspath(result[index + 1])
    return result


@hydra.main(version_base="1.3", config_path=None, config_name=None)
def _hydra_main(cfg: DictConfig) -> None:
    if not cfg:
        say("no config: pass --config-path DIR --config-name NAME")
        sys.exit(2)
    with open_dict(cfg):
        run_as_program(train, cfg)


def main() -> None:
    """Entry point of the program."""
    sys.argv[1:] = absolute_config_path(sys.argv[1:])
    _hydra_main()


if __name__ == "__main__":
    main()
