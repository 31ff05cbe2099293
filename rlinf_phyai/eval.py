# SPDX-License-Identifier: Apache-2.0
"""Evaluate: ``python -m rlinf_phyai.eval --config-path DIR --config-name NAME [overrides]``.

Takes a training config: the environments of ``env.eval``, the model of ``actor.model``, no actor, no noise. Set
``runner.ckpt_path`` to evaluate the weights of an RL run. Prints the success rate of every task, and writes it with every
episode to ``evaluation.json`` in the log folder.
"""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from rlinf_phyai.driver.launch import say, worker_groups
from rlinf_phyai.driver.program import run_as_program, run_hydra
from rlinf_phyai.evaluation.config import for_evaluation


def evaluate(cfg: DictConfig) -> dict[str, float]:
    """Run one evaluation and return its metrics (``eval/success_once``, the same of every task, and RLinf's others).

    Raises:
        PhyaiError: the config is refused, a worker does not run what it should, or a worker failed.
        Interrupted: SIGINT or SIGTERM; Ray is shut down then.
    """
    for_evaluation(cfg)
    env_worker = "rlinf_phyai.evaluation.worker:EvaluationEnvWorker"
    with worker_groups(cfg, ("rollout", "env"), env_worker=env_worker) as (cfg, groups):
        from rlinf_phyai.evaluation.outcomes import rates
        from rlinf_phyai.evaluation.report import FILE_NAME, Evaluation, print_evaluation
        from rlinf_phyai.evaluation.runner import EvaluationRunner

        runner = EvaluationRunner(cfg=cfg, **groups)
        runner.init_workers()
        metrics = {f"eval/{name}": float(value) for name, value in runner.evaluate().items()}
        metrics |= {f"eval/task_{task}/success_once": rate.value for task, rate in rates(runner.episodes).items()}
        runner.metric_logger.log(step=0, data=metrics)
        runner.metric_logger.finish()
        logs = Path(cfg.runner.logger.log_path)
        policy = {
            "backend": cfg.rollout.get("rollout_backend"),
            "model_path": cfg.rollout.model.model_path,
            "ckpt_path": cfg.runner.get("ckpt_path"),
        }
        sentences = groups["env"].task_sentences().wait()[0]
        evaluation = Evaluation(cfg.env.eval.task_suite_name, sentences, policy, runner.episodes)
        evaluation.write(logs / FILE_NAME)
        print_evaluation(evaluation)
        if cfg.env.eval.video_cfg.save_video:
            say(f"videos in {cfg.env.eval.video_cfg.video_base_dir}")
        say(f"wrote {logs / FILE_NAME}")
        say(f"finished; logs in {logs}")
        return metrics


@hydra.main(version_base="1.3", config_path=None, config_name=None)
def _hydra_main(cfg: DictConfig) -> None:
    run_as_program(evaluate, cfg)


def main() -> None:
    """Entry point of the program."""
    run_hydra(_hydra_main)


if __name__ == "__main__":
    main()
