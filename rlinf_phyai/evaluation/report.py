# SPDX-License-Identifier: Apache-2.0
"""An evaluation as a JSON file and as tables; two of them side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rlinf_phyai.evaluation.outcomes import Episode, Paired, Rate, first_of_each, pair, rates

FILE_NAME = "evaluation.json"


@dataclass(frozen=True)
class Evaluation:
    """What was evaluated, on what, and how each episode ended.

    Attributes:
        suite: LIBERO suite, such as ``libero_spatial``.
        sentences: its tasks in order.
        policy: what identifies the policy: ``backend``, ``model_path``, ``ckpt_path``.
        episodes: finished episodes.
    """

    suite: str
    sentences: list[str]
    policy: Mapping[str, Any]
    episodes: list[Episode]

    def write(self, file: Path) -> None:
        """Everything, the rates included, as JSON."""
        overall, by_task = Rate.of(e.success for e in self.episodes), rates(self.episodes)
        content = {
            "suite": self.suite,
            "policy": dict(self.policy),
            "overall": _rate(overall),
            "tasks": [{"task": t, "sentence": self.sentences[t], **_rate(rate)} for t, rate in by_task.items()],
            "sentences": self.sentences,
            "episodes": [asdict(episode) for episode in self.episodes],
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Evaluation:
        """From a file, or from the log folder that holds ``evaluation.json``.

        Raises:
            FileNotFoundError: there is none.
            ValueError: the file is something else.
        """
        file = path / FILE_NAME if path.is_dir() else path
        if not file.is_file():
            raise FileNotFoundError(f"there is no {file}; name an {FILE_NAME}, or the log folder of an evaluation")
        try:
            content = json.loads(file.read_text())
            episodes = [Episode(**episode) for episode in content["episodes"]]
            found = cls(content["suite"], content["sentences"], content["policy"], episodes)
            found._check_types()
            return found
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file} is not an evaluation written by rlinf_phyai.eval: {error!r}") from error

    def _check_types(self) -> None:
        """Raises ``ValueError`` for content that no evaluation has."""
        if not isinstance(self.suite, str) or not isinstance(self.policy, Mapping):
            raise ValueError("suite is no text, or policy no object")
        if not isinstance(self.sentences, list) or not all(isinstance(text, str) for text in self.sentences):
            raise ValueError("sentences is no list of texts")
        for e in self.episodes:
            numbers = all(type(value) is int and value >= 0 for value in (e.task, e.trial, e.steps))
            if not numbers or type(e.success) is not bool or e.task >= len(self.sentences):
                raise ValueError(f"{e} is no episode of {len(self.sentences)} tasks")


def print_evaluation(evaluation: Evaluation) -> None:
    """Success rate by task and overall."""
    table = Table(title=f"{evaluation.suite}: success rate with 95% interval", title_justify="left")
    for heading in ("task", "episodes", "success", "95% interval"):
        table.add_column(heading, justify="left" if heading == "task" else "right", no_wrap=True)
    for task, rate in rates(evaluation.episodes).items():
        table.add_row(f"{task} {evaluation.sentences[task]}", *_cells(rate))
    table.add_section()
    table.add_row("all", *_cells(Rate.of(e.success for e in evaluation.episodes)))
    _console().print(table)


def print_comparison(first: Evaluation, second: Evaluation) -> Paired:
    """Two evaluations on the initial states that both saw, task by task, each state once.

    Raises:
        ValueError: other suites, or no common initial state.
    """
    if first.suite != second.suite:
        raise ValueError(f"the evaluations are of different suites: {first.suite} and {second.suite}.")
    overall = pair(first.episodes, second.episodes)
    table = Table(title=f"{first.suite}: the same initial states, two policies", title_justify="left")
    for heading in ("task", "pairs", "both", "only A", "only B", "neither", "A - B"):
        table.add_column(heading, justify="left" if heading == "task" else "right", no_wrap=True)
    for task in sorted({e.task for e in first.episodes} & {e.task for e in second.episodes}):
        try:
            found = pair([e for e in first.episodes if e.task == task], [e for e in second.episodes if e.task == task])
        except ValueError:  # this task was started from other states on each side
            continue
        table.add_row(f"{task} {first.sentences[task]}", *_counts(found))
    table.add_section()
    table.add_row("all", *_counts(overall))
    console = _console()
    for name, evaluation in (("A", first), ("B", second)):
        console.print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in evaluation.policy.items()))
        if repeats := len(evaluation.episodes) - len(first_of_each(evaluation.episodes)):
            console.print(f"   {repeats} of its episodes repeat an initial state; only the first of each counts")
    console.print(table)
    verdict = "no evidence that they differ" if overall.p_value > 0.05 else "they differ"
    console.print(f"exact McNemar test: p = {overall.p_value:.3g}, {verdict} at the 5% level")
    return overall


def _rate(rate: Rate) -> dict[str, Any]:
    return {**asdict(rate), "success_rate": rate.value, "low": rate.low, "high": rate.high}


def _cells(rate: Rate) -> tuple[str, ...]:
    return str(rate.episodes), f"{rate.value:.1%}", f"{rate.low:.1%} - {rate.high:.1%}"


def _counts(found: Paired) -> tuple[str, ...]:
    counts = (found.episodes, found.both, found.only_first, found.only_second, found.neither)
    return (*map(str, counts), f"{found.difference:+.1%}")


def _console() -> Console:
    console = Console()
    return Console(width=max(console.width, 150))  # a pipe has no width of its own
