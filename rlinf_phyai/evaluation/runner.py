# SPDX-License-Identifier: Apache-2.0
"""RLinf's evaluation runner that keeps the episodes behind its averages."""

from __future__ import annotations

from typing import Any

from rlinf.runners.embodied_eval_runner import EmbodiedEvalRunner

from rlinf_phyai.driver.runner import StartProgress
from rlinf_phyai.evaluation.outcomes import Episode
from rlinf_phyai.evaluation.worker import TASK, TRIAL, episodes_of


class EvaluationRunner(EmbodiedEvalRunner):
    """Its environment group must run :class:`rlinf_phyai.evaluation.worker.EvaluationEnvWorker`.

    Attributes:
        episodes: of the last evaluation.
    """

    episodes: list[Episode]

    def init_workers(self) -> None:
        """Start rollout and environment workers, and print which of them are ready."""
        with StartProgress({"rollout": self.rollout, "env": self.env}):
            super().init_workers()

    def evaluate(self) -> dict[str, Any]:
        """RLinf's evaluation and its averaged metrics."""
        start, handles = self.env.evaluate, []

        def kept(**channels: Any) -> Any:
            handles.append(start(**channels))
            return handles[-1]

        self.env.evaluate = kept
        try:
            metrics = super().evaluate()
        finally:
            self.env.evaluate = start
        self.episodes = episodes_of(handles[-1].wait())
        return {name: value for name, value in metrics.items() if name not in (TASK, TRIAL)}
