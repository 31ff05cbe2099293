# SPDX-License-Identifier: Apache-2.0
"""requirements/install.sh: its command line, and its check of what it made."""

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

DOCUMENTED = [
    "--python",
    "3.12",
    "--torch",
    "2.11.0",
    "--install-rlinf",
    "embodied",
    "--model",
    "openpi",
    "--env",
    "libero",
    "--engine",
    "phyai",
]


def installer(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(root / "requirements" / "install.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture(scope="module")
def check_install(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_install", root / "requirements" / "check_install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_dry_run_of_the_documented_command(root: Path, tmp_path: Path) -> None:
    result = installer(root, *DOCUMENTED, "--venv", str(tmp_path / "env"), "--no-flashinfer", "--dry-run")
    assert result.returncode == 0, result.stderr
    commands = [line for line in result.stdout.splitlines() if line.lstrip().startswith("+ ")]
    order = ["torch==2.11.0", "core.txt", "libero.txt", "libero-assets.txt", "overlay.txt", "--editable"]
    places = [next(i for i, command in enumerate(commands) if word in command) for word in order]
    assert places == sorted(places), "the overlay comes after everything that could replace transformers"
    resolvers = [c for c in commands if "pip install" in c and "--no-deps" not in c]
    assert len(resolvers) == 4
    assert all("--override" in c and "--constraint" in c and "--compile-bytecode" in c for c in resolvers)
    assert not (tmp_path / "env").exists()


def test_flashinfer_only_when_asked_for(root: Path, tmp_path: Path) -> None:
    base = (*DOCUMENTED, "--venv", str(tmp_path / "env"), "--dry-run")
    assert "flashinfer.txt" in installer(root, *base, "--flashinfer").stdout
    assert "flashinfer.txt" not in installer(root, *base, "--no-flashinfer").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--env", "maniskill"), "--env is 'maniskill'; allowed: libero none"),
        (("--engine", "vllm"), "--engine is 'vllm'; allowed: phyai none"),
        (("--torch",), "--torch needs a value"),
        (("--torch", "--python"), "--torch needs a value"),
        (("--torch", "2.11"), "give all three numbers"),
        (("--python", "3.9"), "needs 3.12 or newer"),
        (("--colour", "red"), "unknown option '--colour'"),
        (("embodied", "reasoning"), "only one part"),
    ],
)
def test_bad_arguments(root: Path, arguments: tuple[str, ...], message: str) -> None:
    result = installer(root, *arguments)
    assert result.returncode == 2
    assert message in result.stderr


def test_help_shows_the_documented_command(root: Path) -> None:
    text = installer(root, "--help").stdout
    assert "--install-rlinf embodied" in text
    assert "--venv DIR" in text


def test_pins(check_install: ModuleType, tmp_path: Path) -> None:
    pins = tmp_path / "pins.txt"
    pins.write_text("# a comment\npytest==0.0.1\nnot-there-at-all==1.0\ngym\nlerobot ; python_version < '3'\n")
    first, second = check_install.check_pins([pins], None)
    assert first.startswith("pytest is ")
    assert first.endswith("needed is 0.0.1")
    assert second == "not-there-at-all is not installed (needed: 1.0)"


@pytest.mark.parametrize(
    ("nvcc", "torch_cuda", "complaints"),
    [("13.2.86", "13.0", 0), ("12.8.61", "13.0", 1), ("13.2.86", "12.8", 1), (None, "13.0", 0), ("13.2.86", None, 1)],
)
def test_cuda_majors_must_agree(
    check_install: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nvcc: str,
    torch_cuda: str,
    complaints: int,
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(f"cuda = {torch_cuda!r}\n")
    monkeypatch.setattr(check_install, "SITE", tmp_path)
    monkeypatch.setattr(check_install, "installed", {"nvidia-cuda-nvcc": nvcc, "torch": "2.11.0"}.get)
    problems = check_install.check_cuda()
    assert len(problems) == complaints
    assert all("CUDA" in problem for problem in problems)


def test_libero_files(check_install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_install, "SITE", tmp_path)
    config = tmp_path / "etc"
    assert len(check_install.check_libero(config, assets=True)) == 2
    (tmp_path / "libero" / "libero" / "assets" / "scenes").mkdir(parents=True)
    config.mkdir()
    (config / "config.yaml").write_text("benchmark_root: /elsewhere/libero\n")
    (problem,) = check_install.check_libero(config, assets=True)
    assert "another environment" in problem
    (config / "config.yaml").write_text(f"benchmark_root: {tmp_path}/libero/libero\n")
    assert check_install.check_libero(config, assets=True) == []
