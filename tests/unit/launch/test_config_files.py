# SPDX-License-Identifier: Apache-2.0
"""Configs that are none and overrides of keys that are none: every program and command says so in one line, never with a traceback."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlinf_phyai import config_files
from rlinf_phyai.cli import app
from rlinf_phyai.driver import program

NONE: dict[str, tuple[bytes | None, str]] = {
    "missing": (None, "there is no config"),
    "empty": (b"", "is empty; a training config is a mapping of sections"),
    "comments": (b"# nothing\n", "is empty"),
    "list": (b"- a\n- b\n", "holds a list"),
    "text": (b"just text\n", "holds a single value"),
    "broken": (b"a: 1\nb: [1\nc: 2\n", "is no valid YAML: line 3, column 2: expected ',' or ']', but got ':'"),
    "binary": (b"\xff\xfe\x00", "is no UTF-8 text"),
    "unknown default": (b"defaults:\n  - nowhere\n", "Could not load 'nowhere'"),
    "a key twice": (b"a: 1\na: 2\n", "it is no valid YAML"),
    "no list of defaults": (b"defaults: nowhere\na: 1\n", "defaults must be a list"),
    "no number": (b"a: !!int x\n", "invalid literal for int()"),
    "half an interpolation": (b"a: ${b\n", "no viable alternative at input '${b'"),
    "itself": (b"defaults: [own, _self_]\na: 1\n", "recursion"),
    "other sections": (b"a: 1\n", "cluster"),  # a list of problems that names each section
}


@pytest.fixture(params=list(NONE))
def broken(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """A config file and what is to be said of it."""
    content, message = NONE[request.param]
    if content is not None:
        (tmp_path / "own.yaml").write_bytes(content)
    return tmp_path / "own.yaml", message


@pytest.mark.parametrize("command", ["check", "compare", "doctor"])
def test_commands(command: str, broken: tuple[Path, str]) -> None:
    file, message = broken
    options = ["--only-config"] if command == "doctor" else []
    result = CliRunner().invoke(app, [command, str(file), *options], terminal_width=1000)
    assert result.exit_code == (1 if command == "doctor" else 2), result.exception
    assert isinstance(result.exception, SystemExit)
    assert message in " ".join(result.output.split())


@pytest.mark.parametrize("command", ["check", "compare", "doctor"])
def test_a_directory(command: str, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").mkdir()
    options = ["--only-config"] if command == "doctor" else []
    result = CliRunner().invoke(app, [command, str(tmp_path / "own.yaml"), *options])
    assert isinstance(result.exception, SystemExit)
    assert "is a directory; name a .yaml file" in " ".join(result.output.split())


EXAMPLE = Path(__file__).resolve().parents[3] / "examples/embodiment/config/libero_spatial_ppo_openpi_pi05_phyai.yaml"
REPLACED = "'~cluster.component_placement' '+cluster.component_placement={}'"
EXAMPLE_SECTION = "{actor: 0, rollout: 1, env: 1}"
UNKNOWN = {
    "rollout.phyai.kernel_polcy=torch_reference": "no key rollout.phyai.kernel_polcy; did you mean rollout.phyai.kernel_policy?",
    "env.train.total_num_env=4": "no key env.train.total_num_env; did you mean env.train.total_num_envs?",
    "rolout.phyai.kernel_policy=a": "did you mean rollout.phyai.kernel_policy?",  # a section's name
    "rollout.phyai={kernel_polcy: a}": "no key rollout.phyai.kernel_polcy; did you mean rollout.phyai.kernel_policy?",
    "~rollout.phyai.kernel_polcy": "did you mean rollout.phyai.kernel_policy?",
    "~qqq": "no key qqq; leave ~qqq out",
    "qqq=1": "no key qqq; correct it; for a key that is new on purpose write +qqq=1",
    "cluster.component_placement={env: 0-1, rollout: 2-5, actor: 6-7}": "replace the whole section: "
    + REPLACED.format("{env: 0-1, rollout: 2-5, actor: 6-7}"),
    "cluster.component_placement.actor=0": f"replace the whole section: {REPLACED.format(EXAMPLE_SECTION)}",
}


@pytest.mark.parametrize("override", UNKNOWN)
def test_an_unknown_key(override: str) -> None:
    with pytest.raises(config_files.ConfigFileError) as raised:
        config_files.load_config(str(EXAMPLE), [override])
    assert UNKNOWN[override] in str(raised.value)
    assert str(raised.value) == f"{raised.value.found}; {raised.value.fix}"
    assert "To append" not in str(raised.value)


def test_two_unknown_keys() -> None:
    """The first is explained although the config does not compose without it either."""
    with pytest.raises(config_files.ConfigFileError, match=r"did you mean env\.train\.total_num_envs\?"):
        config_files.load_config(str(EXAMPLE), ["env.train.total_num_env=4", "runner.max_step=3", "runner.max_steps=3"])


def test_the_advice_works() -> None:
    section = "{env: 0-1, rollout: 2-5, actor: 6-7}"
    cfg = config_files.load_config(str(EXAMPLE), shlex.split(REPLACED.format(section)))
    assert cfg.cluster.component_placement == {"env": "0-1", "rollout": "2-5", "actor": "6-7"}
    cfg = config_files.load_config(str(EXAMPLE), shlex.split(REPLACED.format(EXAMPLE_SECTION)))
    assert cfg.cluster.component_placement == {"actor": 0, "rollout": 1, "env": 1}


def test_a_key_that_is_null() -> None:
    with pytest.raises(
        config_files.ConfigFileError, match=r"runner\.resume_dir is null, .*leave ~runner\.resume_dir out"
    ):
        config_files.load_config(str(EXAMPLE), ["~runner.resume_dir"])


def test_no_placement_to_replace(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("cluster:\n  num_nodes: 1\n")
    with pytest.raises(config_files.ConfigFileError) as raised:
        config_files.load_config(str(tmp_path / "own.yaml"), ["cluster.component_placement={actor: 0}"])
    assert "write '+cluster.component_placement={actor: 0}'" in str(raised.value)
    assert "~" not in raised.value.fix


@pytest.mark.parametrize(
    ("command", "override"),
    [
        ("check", "env.train.total_num_env=4"),
        ("compare", "env.train.total_num_env=4"),
        ("doctor", "cluster.component_placement={actor: 0, env: 0}"),
    ],
)
def test_commands_explain_an_unknown_key(command: str, override: str) -> None:
    options = ["--only-config"] if command == "doctor" else []
    result = CliRunner().invoke(app, [command, str(EXAMPLE), override, *options], terminal_width=1000)
    assert result.exit_code == (1 if command == "doctor" else 2), result.exception
    text = " ".join(result.output.split())
    assert (
        "did you mean env.train.total_num_envs?" if "total" in override else "replace the whole section: '~"
    ) in text
    assert "To append" not in text
    assert "name a file" not in text


@pytest.mark.parametrize("program", ["train", "eval"])
def test_programs_explain_an_unknown_key(program: str) -> None:
    result = run(
        program, "--config-path", str(EXAMPLE.parent), "--config-name", EXAMPLE.stem, "env.train.total_num_env=4"
    )
    assert result.returncode == 1
    assert result.stdout.count("\n") == 1
    assert "no key env.train.total_num_env; did you mean env.train.total_num_envs?" in result.stdout
    assert "Traceback" not in result.stdout + result.stderr


def test_the_overrides_of_a_command_line() -> None:
    given = ["--config-path", "a=b", "-cn=own", "x=1", "--config-dir=c", "~y", "+z=-1"]
    assert program.overrides(given) == ["x=1", "~y", "+z=-1"]


def run(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"rlinf_phyai.{program}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)


@pytest.mark.parametrize("program", ["train", "eval"])
@pytest.mark.parametrize("kind", ["list", "broken", "no list of defaults", "other sections"])
def test_programs(program: str, kind: str, tmp_path: Path) -> None:
    content, message = NONE[kind]
    (tmp_path / "own.yaml").write_bytes(content or b"")
    result = run(program, "--config-path", str(tmp_path), "--config-name", "own")
    assert result.returncode == 1
    assert result.stdout.startswith("[rlinf-phyai] stopped: ")
    assert message in result.stdout
    assert "Traceback" not in result.stdout + result.stderr
    assert kind == "other sections" or len(result.stdout.splitlines()) == 1


def test_the_program_shows_hydras_traceback_on_request(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("defaults:\n  - nowhere\n")
    arguments = ("--config-path", str(tmp_path), "--config-name", "own")
    short, full = run("train", *arguments), run("train", *arguments, HYDRA_FULL_ERROR="1")
    assert short.returncode == full.returncode == 1
    assert short.stdout.count("\n") == 1
    assert "Could not load 'nowhere'" in short.stdout
    assert "MissingConfigException" in full.stderr


def test_a_file_that_a_config_includes(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "one.yaml").write_text("a: [")
    (tmp_path / "own.yaml").write_text("defaults:\n  - part: one\n")
    with pytest.raises(config_files.ConfigFileError, match=r"a file that it includes.*one\.yaml, line 1"):
        config_files.load_config(str(tmp_path / "own.yaml"), [])


def test_the_file_of_a_command_line(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    assert program.config_file(["--config-path", str(tmp_path), "--config-name", "own", "a=b"]) == file
    assert program.config_file([f"--config-path={tmp_path}", "-cn", "own.yaml"]) == file
    for unknown in (
        [],
        ["--config-name", "own"],
        ["-cp", "pkg://x", "-cn", "own"],
        ["-cp", "a", "-cd", "b", "-cn", "c"],
    ):
        assert program.config_file(unknown) is None


def test_a_fault_of_the_program_is_no_fault_of_the_config(capsys: pytest.CaptureFixture[str]) -> None:
    from omegaconf import OmegaConf

    with pytest.raises(SystemExit) as exit_:
        program.run_as_program(lambda cfg: cfg.nowhere.deep, OmegaConf.create({"a": 1}))
    assert exit_.value.code == 1
    assert "Traceback" in capsys.readouterr().err
