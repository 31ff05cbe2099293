# SPDX-License-Identifier: Apache-2.0
"""Writes ``docs/refusals.md`` from the checks and the test cases: ``python -m tests.unit.validation.page``."""

import inspect
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlinf_phyai.models.pi05.tiny import make_tiny_checkpoint
from rlinf_phyai.validation import ANY_BACKEND, FILES, PHYAI_ONLY, Problem, find_problems
from rlinf_phyai.validation.options import UNSUPPORTED
from rlinf_phyai.validation.problems import one_of, show
from tests.unit.validation.case import Case
from tests.unit.validation.cases import ERRORS, WARNINGS
from tests.unit.validation.conftest import MakeConfig, compose_examples, config_maker

PAGE = Path(__file__).resolve().parents[3] / "docs" / "refusals.md"

INTRODUCTION = """\
# What a start refuses

`rlinf_phyai.train` and `rlinf_phyai.eval` check the composed config before they start a process. All problems come at
once, numbered, each with the key, the value found, the values allowed, the reason and what to change:

    the config has 2 problems; nothing was started.
    1. algorithm.importance_sampling_fix
         found:   true
         allowed: true together with algorithm.recompute_logprobs: true
         why:     the weight is exp(actor's score - rollout's score); without rescoring there is no actor's score
         change:  set algorithm.recompute_logprobs: true, or turn algorithm.importance_sampling_fix off
    2. env.train.total_num_envs
         ...

Warnings are printed and do not stop the start. With `rollout.rollout_backend: huggingface` only the checks under
"Any backend" run: what RLinf itself would refuse later.

The tables show examples of real messages. This page is generated: `python -m tests.unit.validation.page`.
"""

SECTIONS = (
    ("Any backend", ANY_BACKEND),
    ("The phyai backend: the config", PHYAI_ONLY),
    ("The phyai backend: files and kernels", FILES),
)


def problem_of(case: Case, config: MakeConfig) -> Problem:
    """The report that a case is about, the checkpoint's path made general."""
    problems = find_problems(config(case.base, case.changes), gpus=case.gpus)
    problem = next(problem for problem in problems if problem.check == case.check)
    folder = config().actor.model.model_path
    found, allowed = (text.replace(folder, "/path/to/checkpoint") for text in (problem.found, problem.allowed))
    return replace(problem, found=found, allowed=allowed)


def depends_on_the_installation(case: Case) -> bool:
    """Messages that list what happens to be installed."""
    return case.check in ("kernel_policy", "rollout_backend")


def page(config: MakeConfig) -> str:
    """The whole page as Markdown."""
    parts = [INTRODUCTION]
    for title, checks in SECTIONS:
        parts.append(f"\n## {title}\n")
        for check in checks:
            parts.append("\n".join(_check(check, config)))
    return "\n".join(parts)


def _check(check: Callable[..., Any], config: MakeConfig) -> Iterator[str]:
    text = (inspect.getdoc(check) or "").replace("``", "`")
    yield f"### {check.__name__}\n\n{text}\n"
    if check.__name__ == "unsupported_options":
        yield from _unsupported()
    cases = [
        case for case in ERRORS + WARNINGS if case.check == check.__name__ and not depends_on_the_installation(case)
    ]
    if cases:
        yield row("key", "found", "allowed", "why", "change")
        yield "|---|---|---|---|---|"
        problems = [problem_of(case, config) for case in cases]
        yield from dict.fromkeys(problem_row(problem) for problem in problems)
        yield ""


def _unsupported() -> Iterator[str]:
    yield row("key", "allowed", "why", "applies to")
    yield "|---|---|---|---|"
    for option in UNSUPPORTED:
        allowed = one_of([show(value) for value in option.allowed])
        key = option.key.format(model="<model>", section="train|eval")
        yield row(f"`{key}`", allowed, option.reason, "training" if option.training_only else "training, evaluation")
    yield "\n`<model>` is `actor.model` in training and `rollout.model` in evaluation.\n"


def problem_row(problem: Problem) -> str:
    found = problem.found if problem.severity == "error" else f"{problem.found} (a warning)"
    return row(f"`{problem.key}`", found, problem.allowed, problem.reason, problem.fix)


def row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def write_page(path: Path, render: Callable[[MakeConfig], str]) -> None:
    """Renders a generated page of docs/ with the configs of the examples and a tiny checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        make = config_maker(compose_examples(), make_tiny_checkpoint(Path(folder) / "checkpoint"), Path(folder))
        path.write_text(render(make).rstrip() + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    write_page(PAGE, page)
