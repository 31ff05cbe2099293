# SPDX-License-Identifier: Apache-2.0
"""One refusal or warning as a table row: what changes in a valid config, and what the report says. And the changes that recur."""

from dataclasses import dataclass, field
from typing import Any

from tests.unit.validation.conftest import FULL

P = "cluster.component_placement"


def placed(**components: str) -> dict[str, Any]:
    return {P: {name.replace("_", ","): text for name, text in components.items()}}


GRPO = {
    "algorithm.adv_type": "grpo",
    "algorithm.loss_type": "actor",
    "algorithm.group_size": 8,
    "actor.model.add_value_head": False,
}
EVALUATION = {"runner.val_check_interval": 10, "env.eval.total_num_envs": 64}
NO_CORRECTION = {"algorithm.recompute_logprobs": False, "algorithm.importance_sampling_fix": False}
STOCK = {"rollout.rollout_backend": "huggingface", **NO_CORRECTION}
ONLY_EVALUATION = {"runner.only_eval": True, "env.eval.total_num_envs": 64, "rollout.model": "${actor.model}"}


@dataclass(frozen=True)
class Case:
    """``changes`` of the example ``base`` on ``gpus`` accelerators -> one report per (check, key, parts of its message)."""

    check: str
    key: str
    changes: dict[str, Any]
    words: tuple[str, ...]
    gpus: int | None = 2
    base: str = FULL
    also: tuple[str, ...] = field(default=())
    """Further checks that report an error, each once."""

    @property
    def id(self) -> str:
        return f"{self.check}-{'+'.join(self.changes) or self.base}-gpus{self.gpus}"[:150]


def change_one(check: str, key: str, value: Any, *words: str, **more: Any) -> Case:
    """The common case: one key is changed and that key is reported."""
    return Case(check, key, {key: value}, words, **more)


MODEL, OPENPI, ENGINE = "actor.model", "actor.model.openpi", "rollout.phyai"
CPS = {f"{OPENPI}.noise_method": "flow_cps"}
LEARNED = {f"{OPENPI}.noise_method": "flow_noise", f"{OPENPI}.joint_logprob": True}


def annealed(*params: float) -> dict[str, Any]:
    return {f"{OPENPI}.noise_anneal": True, f"{OPENPI}.noise_params": list(params)}
