# SPDX-License-Identifier: Apache-2.0
"""What an evaluation changes in a training config."""

from omegaconf import DictConfig, OmegaConf, open_dict


def for_evaluation(cfg: DictConfig) -> None:
    """Turn a training config into one that RLinf evaluates: it then reads the model from ``rollout.model``."""
    with open_dict(cfg):
        cfg.runner.task_type = "embodied_eval"
        cfg.runner.only_eval = True
        if cfg.get("actor") is not None:
            # The actor's interpolations name actor.model; they stay valid where the section is copied to.
            cfg.rollout.model = OmegaConf.merge(cfg.actor.model, cfg.rollout.model)
