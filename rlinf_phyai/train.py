# SPDX-License-Identifier: Apache-2.0
"""Train: ``python -m rlinf_phyai.train --config-path DIR --config-name NAME [overrides]``.

Validates the config, writes it into the log folder, starts RLinf's workers with the classes of the chosen rollout backend, checks that they
run, and hands over to RLinf's runner.
"""

from typing import Any

import hydra
from omegaconf import DictConfig

from rlinf_phyai.driver.launch import say, worker_groups
from rlinf_phyai.driver.program import run_as_program, run_hydra
from rlinf_phyai.driver.shutdown import Interrupted
from rlinf_phyai.errors import PhyaiError


def train(cfg: DictConfig, runner_class: type[Any] | None = None) -> None:
    """Run the training that ``cfg`` describes, to the end.

    Args:
        cfg: a config as RLinf's embodied examples have it, plus ``rollout.rollout_backend`` and ``rollout.phyai``.
        runner_class: instead of :class:`rlinf_phyai.driver.runner.PhyaiRunner`.

    Raises:
        PhyaiError: the config is refused, a worker does not run what it should, or a worker failed.
        Interrupted: SIGINT or SIGTERM; Ray is shut down then.
    """
    runner = None
    try:
        with worker_groups(cfg, ("actor", "rollout", "env")) as (cfg, groups):
            if runner_class is None:
                from rlinf_phyai.driver.runner import PhyaiRunner

                runner_class = PhyaiRunner
            runner = runner_class(cfg=cfg, **groups)
            runner.init_workers()
            runner.run()
            say(f"finished; logs in {cfg.runner.logger.log_path}")
    except (PhyaiError, Interrupted):
        if checkpoint := getattr(runner, "checkpoint", None):
            say(f"to continue from the latest checkpoint: runner.resume_dir={checkpoint}")
        raise


@hydra.main(version_base="1.3", config_path=None, config_name=None)
def _hydra_main(cfg: DictConfig) -> None:
    run_as_program(train, cfg)


def main() -> None:
    """Entry point of the program."""
    run_hydra(_hydra_main)


if __name__ == "__main__":
    main()
