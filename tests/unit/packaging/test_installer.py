# SPDX-License-Identifier: Apache-2.0
"""requirements/install.sh: its command line, and its check of what it made."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rlinf_phyai import cuda_tools

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
    written = [command for command in commands if "(writes)" in command]
    assert [
        name for name in ("overrides.txt", "config.yaml", "activate", "installed") if name not in str(written)
    ] == []
    assert "check_install.py" in commands[-3]
    assert "apt-get install libegl1" in commands[-2]


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


class FakeMachine:
    """A virtual environment that holds nothing but torch's version file, and a PATH of stubs: uv only logs its commands."""

    def __init__(self, folder: Path, torch_cuda: str | None, nvcc: str | None, driver: str | None) -> None:
        self.venv, self.log, self.bin = folder / "venv", folder / "uv.log", folder / "bin"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(self.venv)], check=True)
        (site,) = self.venv.glob("lib/python*/site-packages")
        (site / "torch").mkdir()
        (site / "torch" / "version.py").write_text(f"cuda = {torch_cuda!r}\n")
        self.bin.mkdir()
        self.stub("uv", f'[ "$1" = --version ] || echo "$*" >>{self.log}')
        if nvcc is not None:
            self.stub("nvcc", f"echo 'Cuda compilation tools, release {nvcc}, V{nvcc}.61'")
        if driver is not None:
            self.stub("nvidia-smi", f"echo '| NVIDIA-SMI 1.0  Driver Version: 1.0  CUDA Version: {driver}  |'")

    def stub(self, name: str, script: str) -> None:
        (self.bin / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.bin / name).chmod(0o755)

    def install(self, root: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], str]:
        """The result, and the uv commands that ran."""
        command = ["bash", str(root / "requirements" / "install.sh"), "--env", "none", "--venv", str(self.venv)]
        environment = {**os.environ, "PATH": f"{self.bin}:/usr/bin:/bin"}
        for name in ("CUDA_HOME", "CUDA_PATH", "PYTHONPATH"):
            environment.pop(name, None)
        if not (self.bin / "nvcc").exists():
            environment["CUDA_HOME"] = str(self.bin)  # whatever this machine has
        result = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, check=False, timeout=60, env=environment
        )
        return result, self.log.read_text()


@pytest.mark.parametrize(
    ("torch_cuda", "nvcc", "driver", "message"),
    [
        (
            "13.0",
            "12.8",
            "13.0",
            "is CUDA 12.8 and torch is built with CUDA 13.0, .*set CUDA_HOME to a toolkit of CUDA 13",
        ),
        (
            "12.8",
            "13.0",
            "13.0",
            "is CUDA 13.0 and torch is built with CUDA 12.8, .*set CUDA_HOME to a toolkit of CUDA 12",
        ),
        ("13.0", "13.0", "12.4", "driver runs CUDA 12.4 at most and torch is built with CUDA 13.0: update the driver"),
        ("13.0", None, "12.4", "driver runs CUDA 12.4 at most"),
        (None, "13.0", "13.0", "the installed torch has no CUDA.*--no-flashinfer"),
        ("13.0", "broken", "13.0", "nvcc does not run: repair that CUDA toolkit"),
    ],
)
def test_stops_before_a_flashinfer_that_cannot_work(
    root: Path, tmp_path: Path, torch_cuda: str | None, nvcc: str | None, driver: str | None, message: str
) -> None:
    """On a machine with a driver FlashInfer is chosen by itself."""
    result, commands = FakeMachine(tmp_path, torch_cuda, nvcc, driver).install(root)
    assert result.returncode == 1
    assert re.search(message, result.stdout.replace("\n", " ")), result.stdout
    assert "FlashInfer was not installed" in result.stdout
    assert 'stopped in step 5, "FlashInfer' in result.stderr
    assert "torch==2.11.0" in commands
    assert "flashinfer.txt" not in commands


@pytest.mark.parametrize(("torch_cuda", "nvcc", "driver"), [("13.0", "13.2", "13.1"), ("12.8", None, "13.0")])
def test_installs_flashinfer_for_torchs_cuda(
    root: Path, tmp_path: Path, torch_cuda: str, nvcc: str | None, driver: str
) -> None:
    machine = FakeMachine(tmp_path, torch_cuda, nvcc, driver)
    result, commands = machine.install(root)
    assert "flashinfer.txt --constraint" in commands
    held = (machine.venv / "etc" / "rlinf-phyai" / "cuda.txt").read_text()
    assert held.strip() == f"nvidia-cuda-nvcc=={torch_cuda.split('.')[0]}.*"
    # The stub installed nothing, and the last step notices.
    assert result.returncode == 1
    assert "flashinfer-python is not installed (needed: 0.6.13)" in result.stdout


def test_no_flashinfer_without_a_driver(root: Path, tmp_path: Path) -> None:
    _, commands = FakeMachine(tmp_path, None, None, None).install(root)
    assert "flashinfer.txt" not in commands


def test_cuda_home_names_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = FakeMachine(tmp_path, "13.0", "12.8", None)
    monkeypatch.setenv("PATH", f"{machine.bin}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    assert cuda_tools.find_nvcc() is None
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))  # its bin/nvcc
    assert cuda_tools.find_nvcc() == cuda_tools.Compiler(tmp_path / "bin" / "nvcc", "12.8")
    monkeypatch.delenv("CUDA_HOME")
    assert cuda_tools.find_nvcc() == cuda_tools.Compiler(machine.bin / "nvcc", "12.8")


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


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An environment in which the code of ``tmp_path / "other"`` is installed."""
    other = tmp_path / "other"
    (other / "rlinf_phyai").mkdir(parents=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    (site,) = (tmp_path / "env" / "lib").glob("python3*/site-packages")
    info = site / "rlinf_phyai-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlinf-phyai\nVersion: 0.1.0\n")
    (info / "direct_url.json").write_text(json.dumps({"url": other.as_uri(), "dir_info": {"editable": True}}))
    return tmp_path / "env"


def test_an_environment_of_another_checkout_is_not_taken_over(root: Path, environment: Path, tmp_path: Path) -> None:
    command = (*DOCUMENTED, "--venv", str(environment), "--no-flashinfer", "--dry-run")
    refused = installer(root, *command)
    assert refused.returncode == 2
    for words in (
        f"runs the code of {tmp_path / 'other'}",
        f"installing from {root}",
        "--venv DIR",
        "RLINF_PHYAI_VENV",
        "--take-over",
    ):
        assert words in refused.stderr
    assert "+ " not in refused.stdout
    taken = installer(root, *command, "--take-over")
    assert taken.returncode == 0, taken.stderr
    assert f"ran the code of {tmp_path / 'other'}; from now on it runs that of {root}" in taken.stdout


def test_an_environment_whose_checkout_is_gone_is_used(root: Path, environment: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "other")
    assert installer(root, *DOCUMENTED, "--venv", str(environment), "--no-flashinfer", "--dry-run").returncode == 0


def test_an_environment_of_this_checkout_is_used(root: Path, environment: Path) -> None:
    (record,) = environment.glob("lib/python3*/site-packages/*.dist-info/direct_url.json")
    record.write_text(json.dumps({"url": root.as_uri(), "dir_info": {"editable": True}}))
    assert installer(root, *DOCUMENTED, "--venv", str(environment), "--no-flashinfer", "--dry-run").returncode == 0
