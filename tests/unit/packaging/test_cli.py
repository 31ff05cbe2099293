# SPDX-License-Identifier: Apache-2.0
"""The ``rlinf-phyai`` command."""

import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter
from typer.testing import CliRunner

from rlinf_phyai import __version__, run_summary
from rlinf_phyai.cli import app


@pytest.fixture
def log_folder(tmp_path: Path) -> Path:
    """A run of two steps, its event file as deep as RLinf puts it."""
    with SummaryWriter(str(tmp_path / "run" / "tensorboard")) as writer:
        for step in range(2):
            writer.add_scalar("env/success_once", 0.25 * step, step)
            writer.add_scalar("train/actor/importance_sampling_weight", 1.0, step)
            writer.add_scalar("train/actor/unknown", 7.0, step)
            writer.add_scalar("time/step", 20.0 - step, step)
    return tmp_path / "run"


def test_version() -> None:
    assert CliRunner().invoke(app, ["version"]).output.strip() == __version__


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; import rlinf_phyai.cli; print([m for m in ('torch', 'rlinf', 'transformers') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_read_scalars(log_folder: Path) -> None:
    scalars = run_summary.read_scalars(log_folder)
    assert scalars["env/success_once"] == [(0, 0.0), (1, 0.25)]
    assert scalars["time/step"] == [(0, 20.0), (1, 19.0)]


def test_show_run_prints_key_metrics_and_timers(log_folder: Path, tmp_path: Path) -> None:
    picture = tmp_path / "out" / "run.png"
    result = CliRunner().invoke(app, ["show-run", str(log_folder), "--plot", str(picture)])
    assert result.exit_code == 0, result.output
    lines = {words[1]: words for words in (line.split() for line in result.output.splitlines()) if len(words) > 3}
    assert lines["env/success_once"][3:6:2] == ["0", "0.25"]
    assert lines["time/step"][3] == "20.00"
    assert "train/actor/unknown" not in result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "train/actor/unknown" in CliRunner().invoke(app, ["show-run", str(log_folder), "--all"]).output


def test_show_run_without_events_says_so(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["show-run", str(tmp_path)])
    assert result.exit_code == 1
    assert "no TensorBoard event file" in result.output


def test_make_tiny_checkpoint_is_a_function_of_the_seed(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        result = CliRunner().invoke(app, ["make-tiny-checkpoint", str(tmp_path / name), "--seed", str(seed)])
        assert result.exit_code == 0, result.output
    weights = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in "abc"}
    assert weights["a"] == weights["b"]
    assert weights["a"] != weights["c"]


@pytest.mark.parametrize("seed", ["abc", "-1", str(2**70)])
def test_make_tiny_checkpoint_refuses_a_seed(seed: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["make-tiny-checkpoint", str(tmp_path / "a"), "--seed", seed])
    assert result.exit_code == 2
    assert not (tmp_path / "a").exists()


def test_make_tiny_checkpoint_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["make-tiny-checkpoint", str(tmp_path / "file")])
    assert result.exit_code == 1
    assert "cannot write the checkpoint" in result.output


def test_show_run_that_cannot_draw_says_so(log_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for picture in (tmp_path / "file" / "run.png", tmp_path / "run.unknown"):
        result = CliRunner().invoke(app, ["show-run", str(log_folder), "--plot", str(picture)])
        assert result.exit_code == 1
        assert "cannot draw" in result.output
