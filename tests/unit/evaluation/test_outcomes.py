# SPDX-License-Identifier: Apache-2.0
"""Success rates, their intervals, and two evaluations side by side."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rlinf_phyai.cli import app
from rlinf_phyai.evaluation.outcomes import Episode, Paired, Rate, pair, rates
from rlinf_phyai.evaluation.report import Evaluation, print_comparison, print_evaluation

SENTENCES = ["pick up the bowl", "open the drawer"]


@pytest.mark.parametrize(
    ("successes", "episodes", "low", "high"),
    [  # published values of Wilson's interval without continuity correction
        (0, 10, 0.0, 0.27754),
        (5, 10, 0.23659, 0.76341),
        (10, 10, 0.72246, 1.0),
        (81, 263, 0.25529, 0.36621),  # Newcombe 1998, table I
        (1, 29, 0.00611, 0.17176),  # the same
    ],
)
def test_wilson_interval(successes: int, episodes: int, low: float, high: float) -> None:
    rate = Rate(successes, episodes)
    assert (rate.low, rate.high) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))
    assert rate.low <= rate.value <= rate.high


def test_no_episode_says_nothing() -> None:
    rate = Rate.of([])
    assert math.isnan(rate.value)
    assert (rate.low, rate.high) == (0.0, 1.0)


def episodes(*outcomes: tuple[int, int, bool]) -> list[Episode]:
    return [Episode(task, trial, success, 240) for task, trial, success in outcomes]


def test_rates_by_task() -> None:
    found = rates(episodes((1, 0, True), (0, 0, False), (1, 1, False), (1, 2, True)))
    assert found == {0: Rate(0, 1), 1: Rate(2, 3)}


def test_pairs_are_of_the_same_initial_state() -> None:
    first = episodes((0, 0, True), (0, 1, True), (0, 2, False), (1, 0, False), (1, 9, True))
    second = episodes((1, 0, True), (0, 2, False), (0, 1, False), (0, 0, True), (1, 8, True))
    found = pair(first, second)
    assert found == Paired(both=1, only_first=1, only_second=1, neither=1)
    assert found.difference == 0.0
    with pytest.raises(ValueError, match="share no initial state"):
        pair(first, episodes((2, 0, True)))


@pytest.mark.parametrize("side", ["first", "second", "both"])
def test_an_initial_state_counts_once(side: str) -> None:
    once = episodes((0, 0, True), (0, 1, False), (1, 0, False))
    twice = [*once, *episodes((0, 1, True), (0, 0, False), (0, 0, True))]
    other = episodes((0, 0, False), (0, 1, True), (1, 0, False))
    expected = pair(once, other)
    assert expected == Paired(both=0, only_first=1, only_second=1, neither=1)
    first = once if side == "second" else twice
    second = other if side == "first" else [*other, *episodes((0, 0, True))]
    assert pair(first, second) == expected


def test_the_comparison_says_how_many_episodes_repeat_a_state(capsys: pytest.CaptureFixture[str]) -> None:
    once = episodes((0, 0, True), (1, 0, False))
    a = Evaluation("libero_goal", SENTENCES, {"backend": "phyai"}, [*once, *once[:1]])
    b = Evaluation("libero_goal", SENTENCES, {"backend": "huggingface"}, once)
    assert print_comparison(a, b).episodes == 2
    lines = capsys.readouterr().out.splitlines()
    assert "1 of its episodes repeat an initial state; only the first of each counts" in lines[1]
    assert sum("repeat" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("only_first", "only_second", "p"), [(0, 0, 1.0), (8, 1, 20 / 512), (1, 8, 20 / 512), (3, 3, 1.0)]
)
def test_mcnemar(only_first: int, only_second: int, p: float) -> None:
    assert Paired(5, only_first, only_second, 7).p_value == pytest.approx(p)


def test_episodes_of_several_workers() -> None:
    """What RLinf's workers return: a tensor per key, nothing from a worker without a finished episode."""
    from rlinf_phyai.evaluation.worker import episodes_of

    def result(task: list[int], trial: list[int], success: list[bool]) -> dict[str, torch.Tensor]:
        columns = {"task_id": task, "trial_id": trial, "success_once": success, "episode_len": [10] * len(task)}
        return {name: torch.tensor(column) for name, column in columns.items()}

    found = episodes_of([result([1, 0], [4, 3], [True, False]), None, {}, result([0], [2], [True])])
    assert found == [Episode(0, 2, True, 10), Episode(0, 3, False, 10), Episode(1, 4, True, 10)]


def evaluation(*outcomes: tuple[int, int, bool], suite: str = "libero_spatial") -> Evaluation:
    return Evaluation(suite, SENTENCES, {"backend": "phyai", "model_path": "m", "ckpt_path": None}, episodes(*outcomes))


def test_file_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = evaluation((0, 0, True), (0, 1, True), (1, 0, False))
    written.write(tmp_path / "logs" / "evaluation.json")
    assert Evaluation.read(tmp_path / "logs") == written  # by its folder
    content = json.loads((tmp_path / "logs" / "evaluation.json").read_text())
    assert content["overall"]["success_rate"] == pytest.approx(2 / 3)
    assert [task["success_rate"] for task in content["tasks"]] == [1.0, 0.0]
    print_evaluation(written)
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert any("0 pick up the bowl │ 2 │ 100.0% │ 34.2% - 100.0%" in row for row in rows)
    assert any("all │ 3 │ 66.7% │ 20.8% - 93.9%" in row for row in rows)


def test_compare_evaluations_command(tmp_path: Path) -> None:
    evaluation((0, 0, True), (0, 1, True), (1, 0, False)).write(tmp_path / "a.json")
    evaluation((0, 0, True), (0, 1, False), (1, 0, False)).write(tmp_path / "b.json")
    evaluation((0, 0, True), suite="libero_goal").write(tmp_path / "goal.json")
    (tmp_path / "other.json").write_text("{}")

    def call(*files: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["compare-evaluations", *(str(tmp_path / file) for file in files)])
        return result.exit_code, result.output

    code, output = call("a.json", "b.json")
    assert code == 0
    assert "all │ 3 │ 1 │ 1 │ 0 │ 1 │ +33.3%" in " ".join(output.split())
    assert "p = 1, no evidence that they differ" in output
    assert call("a.json", "goal.json") == (
        2,
        "the evaluations are of different suites: libero_spatial and libero_goal.\n",
    )
    for wrong in ("other.json", "nothing.json"):
        code, output = call("a.json", wrong)
        assert code == 2
        assert wrong in output


@pytest.mark.parametrize(
    "change",
    [
        {"suite": None},
        {"policy": ["phyai"]},
        {"sentences": []},
        {"sentences": None},
        {"episodes": [{"task": 0, "trial": 0, "success": "no", "steps": 1}]},
        {"episodes": [{"task": 7, "trial": 0, "success": True, "steps": 1}]},
        {"episodes": [{"task": [0], "trial": 0, "success": True, "steps": 1}]},
    ],
)
def test_files_that_are_no_evaluations(change: dict[str, object], tmp_path: Path) -> None:
    Evaluation("libero_spatial", ["a"], {}, [Episode(0, 0, True, 5)]).write(tmp_path / "evaluation.json")
    content = json.loads((tmp_path / "evaluation.json").read_text())
    (tmp_path / "evaluation.json").write_text(json.dumps(content | change))
    with pytest.raises(ValueError, match="is not an evaluation written by"):
        Evaluation.read(tmp_path)
