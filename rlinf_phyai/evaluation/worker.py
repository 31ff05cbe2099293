# SPDX-License-Identifier: Apache-2.0
"""RLinf's environment worker that also says which episode each outcome belongs to.

RLinf averages ``success_once`` over all finished episodes. Whatever an environment puts beside it into its episode report
travels the same way, masked and gathered alike, so the environment adds task and initial state there.
"""

from __future__ import annotations

from typing import Any

import torch

from rlinf_phyai.env.worker import PhyaiEnvWorker
from rlinf_phyai.evaluation.outcomes import Episode

TASK, TRIAL = "task_id", "trial_id"


class EvaluationEnvWorker(PhyaiEnvWorker):
    """LIBERO environments whose episodes carry their names."""

    def _setup_env_and_wrappers(self, env_cls: type[Any], env_cfg: Any, num_envs_per_stage: int) -> list[Any]:
        return super()._setup_env_and_wrappers(
            env_cls=naming_episodes(env_cls), env_cfg=env_cfg, num_envs_per_stage=num_envs_per_stage
        )

    def task_sentences(self) -> list[str]:
        """The suite's tasks in order, as the policy is told them."""
        suite = self.eval_env_list[0].unwrapped.task_suite  # a video recorder may be around it
        return [suite.get_task(task).language for task in range(suite.get_num_tasks())]


def naming_episodes(env_cls: type[Any]) -> type[Any]:
    """A subclass of RLinf's ``LiberoEnv`` whose episode report holds ``task_id`` and ``trial_id``, int64 ``[B]``."""

    class NamingEpisodes(env_cls):  # type: ignore[misc]
        def _record_metrics(self, step_reward: Any, terminations: Any, infos: Any) -> Any:
            infos = super()._record_metrics(step_reward, terminations, infos)
            # Copies: a reset later in this very step puts the next episode's numbers into these arrays.
            infos["episode"][TASK] = torch.as_tensor(self.task_ids).clone()
            infos["episode"][TRIAL] = torch.as_tensor(self.trial_ids).clone()
            return infos

    return NamingEpisodes


def episodes_of(results: list[dict[str, list[torch.Tensor]] | None]) -> list[Episode]:
    """The episodes in what every worker's ``evaluate`` returned, by task and initial state."""
    found = []
    for result in results:
        if not result:
            continue
        columns = (torch.cat([part.reshape(-1) for part in result[name]]).tolist() for name in _COLUMNS)
        found += [Episode(int(a), int(b), bool(c), int(d)) for a, b, c, d in zip(*columns, strict=True)]
    return sorted(found)


_COLUMNS = (TASK, TRIAL, "success_once", "episode_len")
