# SPDX-License-Identifier: Apache-2.0
"""The part of the weight-sync benchmark that needs no GPU: timers of finished runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from benchmarks.weight_sync import add_runs, sync_timer


def write_run(folder: Path, seconds: list[float], tag: str = "time/sync_weights") -> Path:
    with SummaryWriter(str(folder / "tensorboard")) as writer:
        for step, value in enumerate(seconds):
            writer.add_scalar(tag, value, step)
    return folder


def test_the_first_sync_is_listed_apart(tmp_path: Path) -> None:
    found = sync_timer(write_run(tmp_path / "a", [3.0, 0.5, 0.25, 1.0]))
    expected = {"log_dir": "a", "syncs": 4, "first_s": 3.0, "median_s": 0.5, "min_s": 0.25, "max_s": 1.0}
    assert found == expected
    assert sync_timer(write_run(tmp_path / "b", [3.0])) == {"log_dir": "b", "syncs": 1, "first_s": 3.0}


def test_runs_are_added_to_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "weight_sync.json"
    output.write_text(
        json.dumps(
            {"machine": {"gpu": "one"}, "rows": [{"what": "trainable", "ms": 9.9, "floor_ms": 0.52}], "runs": ["old"]}
        )
    )
    write_run(tmp_path / "ours", [1.0, 0.125])
    write_run(tmp_path / "stock", [4.0, 3.5])
    add_runs([f"phyai={tmp_path / 'ours'}", f"stock={tmp_path / 'stock'}"], output)
    result = json.loads(output.read_text())
    assert (result["machine"], len(result["rows"])) == ({"gpu": "one"}, 1)
    assert [(run["run"], run["median_s"]) for run in result["runs"]] == [("phyai", 0.125), ("stock", 3.5)]
    table = capsys.readouterr().out
    for text in ("floor of the trainable weights 0.52 ms", "125.0", "3500.0"):
        assert text in table


def test_a_run_without_the_timer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no TensorBoard event file"):
        sync_timer(tmp_path)
    with pytest.raises(SystemExit, match="logged no time/sync_weights"):
        sync_timer(write_run(tmp_path / "a", [1.0], tag="time/step"))
    with pytest.raises(SystemExit, match="expected NAME=LOG_DIR"):
        add_runs(["phyai"], tmp_path / "out.json")
