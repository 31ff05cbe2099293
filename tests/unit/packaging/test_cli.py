# SPDX-License-Identifier: Apache-2.0
"""The ``rlinf-phyai`` command."""

import functools
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.tensorboard import SummaryWriter
from typer.testing import CliRunner

from rlinf_phyai import __version__, run_summary
from rlinf_phyai.cli import app
from rlinf_phyai.engine import DeviceConfig, Engine, EngineArgs, EngineConfig
from rlinf_phyai.evaluation.report import FILE_NAME, Evaluation
from rlinf_phyai.models.pi05 import PI05Args


@pytest.fixture
def log_folder(tmp_path: Path) -> Path:
    """A run of two steps, its event file as deep as RLinf puts it."""
    with SummaryWriter(str(tmp_path / "run" / "tensorboard")) as writer:
        for step in range(2):
            writer.add_scalar("env/success_once", 0.25 * step, step)
            writer.add_scalar("train/actor/importance_sampling_weight", 1.0, step)
            writer.add_scalar("train/actor/unknown", 7.0, step)
            writer.add_scalar("time/step", 20.0 - step, step)
        writer.add_scalar("time/env/env/bootstrap_step", 9.0, 0)
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
    first, last = [cell.strip() for cell in " ".join(lines["time/env/env/bootstrap_step"]).split("│")][2:4]
    assert (first, last) == ("9.00 s", "")  # measured at the first step only
    assert "train/actor/unknown" not in result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "train/actor/unknown" in CliRunner().invoke(app, ["show-run", str(log_folder), "--all"]).output


def test_show_run_of_an_evaluation_shows_what_it_measured(tmp_path: Path) -> None:
    metrics = {"eval/success_once": 0.75, "eval/task_0/success_once": 0.5}
    with SummaryWriter(str(tmp_path / "run" / "tensorboard")) as writer:
        for tag, value in metrics.items():
            writer.add_scalar(tag, value, 0)
    arguments = ["show-run", str(tmp_path / "run")]
    output = CliRunner().invoke(app, arguments).output
    assert "run: an evaluation" in output
    rows = [[cell.strip() for cell in line.split("│")[1:3]] for line in output.splitlines() if "eval/" in line]
    assert rows == [[tag, str(value)] for tag, value in metrics.items()]
    assert "evaluation.json" not in output
    Evaluation("libero_spatial", ["a"], {}, []).write(tmp_path / "run" / FILE_NAME)
    assert str(tmp_path / "run" / FILE_NAME) in CliRunner().invoke(app, arguments).output


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


@pytest.mark.parametrize("model, name", [("pi05", "PI0.5"), ("pi0", "PI0")])
def test_make_tiny_checkpoint_of_either_model(model: str, name: str, tmp_path: Path) -> None:
    """What the command says, what the folder states, and what the engine finds in it."""
    from rlinf_phyai.models.pi05.configuration import PI05Config
    from rlinf_phyai.models.pi05.stated_sizes import TINY_SIZES, read_stated_sizes

    result = CliRunner().invoke(app, ["make-tiny-checkpoint", str(tmp_path), "--model", model])
    assert result.exit_code == 0, result.output
    assert f"tiny {name} checkpoint" in result.output
    assert read_stated_sizes(tmp_path) == TINY_SIZES[model]
    assert PI05Config.from_checkpoint(tmp_path).pi05 == (model == "pi05")


def test_make_tiny_checkpoint_refuses_a_model(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["make-tiny-checkpoint", str(tmp_path / "a"), "--model", "pi06"])
    assert result.exit_code == 2
    for word in ("--model", "'pi06'", "'pi05'", "'pi0'"):
        assert word in result.output
    assert not (tmp_path / "a").exists()


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


def test_make_random_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The full-size branch with a small model in place of the published size; the other sizes have tests of their own."""
    from rlinf_phyai.models.pi05 import random_checkpoint
    from rlinf_phyai.models.pi05.configuration import GemmaConfig, PI05Config, VisionConfig

    stack = {"depth": 1, "num_heads": 2, "head_dim": 8}
    small = PI05Config(
        vision=VisionConfig(hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2),
        prefix=GemmaConfig(width=16, mlp_dim=32, **stack),
        expert=GemmaConfig(width=8, mlp_dim=16, **stack),
        vocab_size=2000,
    )
    monkeypatch.setattr(random_checkpoint, "PI05Config", lambda: small)
    invoke = functools.partial(CliRunner().invoke, app)
    directory = tmp_path / "a"
    result = invoke(["make-random-checkpoint", str(directory), "--size", "full", "--device", "cpu", "--seed", "3"])
    assert result.exit_code == 0, result.output
    tokenizer = directory / "big_vision" / "paligemma_tokenizer.model"
    assert (directory / "physical-intelligence" / "libero" / "norm_stats.json").is_file()
    state = load_file(directory / "model.safetensors")
    assert {str(tensor.dtype) for tensor in state.values()} == {"torch.bfloat16", "torch.float32"}
    assert all(tensor.float().std() > 0 for tensor in state.values())

    args = ["make-random-checkpoint", str(tmp_path / "b"), "--device", "cpu", "--seed", "3"]
    assert invoke([*args, "--tokenizer", str(tokenizer)]).exit_code == 0
    for name in ("model.safetensors", "config.json", "big_vision/paligemma_tokenizer.model"):
        assert (tmp_path / "b" / name).read_bytes() == (directory / name).read_bytes()

    with Engine(
        EngineArgs(
            plugin="pi05",
            plugin_args=PI05Args(checkpoint_dir=directory, max_batch_size=1),
            config=EngineConfig(device=DeviceConfig(target="cpu", params_dtype=torch.float32)),
        )
    ) as engine:
        assert engine.load_report.missing == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "tpu"], "available here: cpu"),
        (["--size", "huge"], "huge"),
        (["--size", "tiny", "--tokenizer", __file__], "--tokenizer goes with --size full"),
    ],
)
def test_make_random_checkpoint_refuses(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = CliRunner().invoke(app, ["make-random-checkpoint", str(tmp_path / "a"), *options])
    assert result.exit_code == 2
    assert message in result.output
    assert not (tmp_path / "a").exists()


def test_make_random_checkpoint_without_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlinf_phyai.models.pi05 import random_checkpoint

    monkeypatch.setattr(random_checkpoint.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**9))
    result = CliRunner().invoke(app, ["make-random-checkpoint", str(tmp_path / "a"), "--device", "cpu"])
    assert result.exit_code == 1
    assert "the weights need 7.5 GB, free are 1.0 GB" in " ".join(result.output.split())


def test_show_run_that_cannot_draw_says_so(log_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for picture in (tmp_path / "file" / "run.png", tmp_path / "run.unknown"):
        result = CliRunner().invoke(app, ["show-run", str(log_folder), "--plot", str(picture)])
        assert result.exit_code == 1
        assert "cannot draw" in result.output


TINY = "libero_spatial_ppo_openpi_pi05_phyai_tiny"


@pytest.mark.parametrize("override", ["foo=1", "nowhere.key=3", "!!!", "a=["])
@pytest.mark.parametrize("command", ["check", "compare"])
def test_overrides_that_cannot_be_used(command: str, override: str, repository: Path) -> None:
    folder = repository / "examples" / "embodiment" / "config"
    result = CliRunner().invoke(app, [command, TINY, override, "--config-path", str(folder)])
    assert result.exit_code == 2, result.exception
    assert f"{TINY}.yaml with the overrides ['{override}']" in result.output


def test_findings_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    options = ["--only-config", "--json", str(tmp_path / "file" / "findings.json")]
    result = CliRunner().invoke(app, ["doctor", str(tmp_path / "nowhere.yaml"), *options])
    assert result.exit_code == 1
    assert "cannot write the findings" in result.output


@pytest.mark.parametrize("command", [["make-tiny-checkpoint"], ["make-random-checkpoint", "--size", "tiny"]])
@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors", "actor/full_weights.pt"])
def test_random_weights_never_replace_others(command: list[str], name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"trained for weeks")
    before = sorted(tmp_path.rglob("*"))
    result = CliRunner().invoke(app, [*command, str(tmp_path)])
    assert result.exit_code == 1
    assert f"it holds {name}, which is not random" in result.output
    assert (tmp_path / name).read_bytes() == b"trained for weeks"
    assert sorted(tmp_path.rglob("*")) == before


def test_random_weights_are_written_anew(tmp_path: Path) -> None:
    for _ in range(2):
        assert CliRunner().invoke(app, ["make-tiny-checkpoint", str(tmp_path)]).exit_code == 0


def test_a_full_disk_is_explained(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk; safetensors reports it with an error of its own."""
    code = (
        "import resource, signal, sys; from rlinf_phyai.cli import app; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6)); app(['make-tiny-checkpoint', sys.argv[1]])"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "cannot write the checkpoint" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_event_file_without_scalars(tmp_path: Path) -> None:
    (tmp_path / "events.out.tfevents.1").write_bytes(b"no events")
    result = CliRunner().invoke(app, ["show-run", str(tmp_path)])
    assert result.exit_code == 1
    assert "holds no scalar" in result.output
