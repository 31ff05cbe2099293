# SPDX-License-Identifier: Apache-2.0
"""What an evaluation changes in a training config."""

from omegaconf import DictConfig, OmegaConf, open_dict


def for_evaluation(cfg: DictConfig) -> None:
    """Turn a training config into one that RLinf evaluates: it then reads the model from ``rollout.model``.

    A section that is not there stays away, for the validation to name.
    """
    runner, actor, rollout = (
        OmegaConf.select(cfg, key, throw_on_missing=False) for key in ("runner", "actor.model", "rollout.model")
    )
    with open_dict(cfg):
        if isinstance(runner, DictConfig):
            runner.task_type = "embodied_eval"
            runner.only_eval = True
        if isinstance(actor, DictConfig) and isinstance(rollout, DictConfig):
            # The actor's interpolations name actor.model; they stay valid where the section is copied to.
            cfg.rollout.model = OmegaConf.merge(actor, rollout)
