# SPDX-License-Identifier: Apache-2.0
"""``rlinf-phyai doctor`` without a config: every check finds this installation sound, and finds its own fault when provoked."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from rlinf_phyai import cuda_tools, doctor
from rlinf_phyai.cli import app
from rlinf_phyai.doctor import cluster, gpu, report, simulator, software
from rlinf_phyai.doctor.finding import Check, Doubtful, Finding

Provoke = Callable[[pytest.MonkeyPatch, Path], None]


def find(part: str) -> Finding:
    """The finding of one part of the real list."""
    (check,) = [check for check in doctor.CHECKS if check.part == part]
    return check()


def stub(folder: Path, name: str, line: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\necho '{line}'\n")
    (folder / name).chmod(0o755)


def use_stubs(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    patch.setenv("CUDA_HOME", str(folder.parent))


def old_nvcc(patch: pytest.MonkeyPatch, path: Path) -> None:
    stub(path / "bin", "nvcc", "Cuda compilation tools, release 11.8, V11.8.89")
    use_stubs(patch, path / "bin")


def old_driver(patch: pytest.MonkeyPatch, path: Path) -> None:
    stub(path / "bin", "nvidia-smi", "| Driver Version: 1.0   CUDA Version: 11.4 |")
    use_stubs(patch, path / "bin")


def driver_without_gpu(patch: pytest.MonkeyPatch, path: Path) -> None:
    stub(path / "bin", "nvidia-smi", "| Driver Version: 1.0   CUDA Version: 13.0 |")
    use_stubs(patch, path / "bin")
    patch.setattr(torch.cuda, "is_available", lambda: False)


def fake_gpu(patch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: 1)
    patch.setattr(torch.cuda, "get_device_name", lambda index: "GPU of the test")
    patch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    patch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=80 * 2**30))


def without(module: str) -> Provoke:
    """A package that does not import."""
    return lambda patch, path: patch.setitem(sys.modules, module, None)


def stock_transformers(patch: pytest.MonkeyPatch, path: Path) -> None:
    from transformers.models.gemma import modeling_gemma

    class GemmaRMSNorm:
        def __init__(self, dim: int, eps: float = 1e-6) -> None: ...

    patch.setattr(modeling_gemma, "GemmaRMSNorm", GemmaRMSNorm)


def gpu_without_flashinfer(patch: pytest.MonkeyPatch, path: Path) -> None:
    fake_gpu(patch)
    patch.setitem(sys.modules, "flashinfer", None)


def version_of(module: types.ModuleType, value: str) -> Provoke:
    return lambda patch, path: patch.setattr(module, "version", lambda name: value)


def a_file_in_the_way(variable: str) -> Provoke:
    def provoke(patch: pytest.MonkeyPatch, path: Path) -> None:
        (path / "file").touch()
        patch.setenv(variable, str(path / "file" / "cache"))

    return provoke


def no_assets(patch: pytest.MonkeyPatch, path: Path) -> None:
    import libero.libero

    (path / "config.yaml").touch()
    patch.setenv("LIBERO_CONFIG_PATH", str(path))
    patch.setattr(libero.libero, "get_libero_path", lambda name: str(path / name))


def little_space(module: types.ModuleType) -> Provoke:
    return lambda patch, path: patch.setattr(
        module.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**8, total=10**9)
    )


PROVOKED: list[tuple[str, Provoke, str, str]] = [
    ("Python", lambda p, _: p.setattr(software.platform, "python_version", lambda: "3.10.4"), "error", "needed is 3.12"),
    ("torch", without("torch"), "error", "torch"),
    ("torch", lambda p, _: p.setattr(torch, "__version__", "2.7.1+cu126"), "warning", "tested is 2.11.0"),
    ("RLinf", version_of(software, "0.2.0"), "error", "rlinf 0.2.0 is not among the supported 0.3.x"),
    ("transformers", stock_transformers, "error", "lacks openpi's edits"),
    ("openpi", without("openpi.models_pytorch.pi0_pytorch"), "error", "pi0_pytorch"),
    ("tokenizer", lambda p, path: p.setenv("OPENPI_DATA_HOME", str(path)), "warning", "no tokenizer at"),
    ("backend phyai", without("rlinf_phyai.rollout.worker"), "error", "rollout.worker"),
    ("config groups", lambda p, path: p.setattr("rlinf_phyai.paths._PACKAGE", path / "a" / "b"), "error", "no configuration groups"),
    ("GPU", lambda p, _: p.setattr(torch.cuda, "is_available", lambda: False), "warning", "no GPU"),
    ("GPU", driver_without_gpu, "error", "the driver works (CUDA 13.0) but torch"),
    ("GPU", lambda p, _: fake_gpu(p, (7, 0)), "error", "has compute capability 7.0; the bfloat16 kernels need 8.0"),
    ("CUDA versions", old_nvcc, "error", "is CUDA 11.8 and torch is built with CUDA 13.0"),
    ("CUDA versions", old_driver, "error", "driver runs CUDA 11.4 at most"),
    ("FlashInfer", gpu_without_flashinfer, "warning", "does not import"),
    ("kernel caches", a_file_in_the_way("TRITON_CACHE_DIR"), "error", "compiled kernels cannot be kept in"),
    ("kernel caches", a_file_in_the_way("FLASHINFER_WORKSPACE_BASE"), "error", "compiled kernels cannot be kept in"),
    ("LIBERO paths", lambda p, path: p.setenv("LIBERO_CONFIG_PATH", str(path)), "error", "LIBERO would ask for its paths"),
    ("LIBERO assets", no_assets, "error", "no assets at"),
    ("LIBERO assets", lambda p, path: p.setenv("LIBERO_CONFIG_PATH", str(path)), "error", "does not exist"),
    ("robosuite", version_of(simulator, "1.5.1"), "error", "robosuite 1.5.1; LIBERO needs 1.4.x"),
    ("rendering", lambda p, _: p.setenv("MUJOCO_GL", "nonsense"), "error", "MUJOCO_GL=nonsense renders no frame"),
    ("shared memory", little_space(cluster), "warning", "Ray falls back to slow files"),
    ("shared memory", lambda p, path: p.setattr(cluster, "SHARED_MEMORY", path / "none"), "error", "does not exist"),
    ("disk", little_space(cluster), "warning", "a full-size checkpoint of a run takes about 12 GB"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("part", "provoke", "status", "message"), PROVOKED, ids=[f"{part}-{text[:20]}" for part, _, _, text in PROVOKED]
)
def test_each_fault_is_found_with_a_fix(
    part: str, provoke: Provoke, status: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provoke(monkeypatch, tmp_path)
    finding = find(part)
    assert finding.status == status, finding
    assert message in finding.detail
    assert finding.fix


def test_this_installation_is_sound() -> None:
    """Every check but Ray's, which has a test of its own."""
    findings = [check() for check in doctor.CHECKS if check.part != "Ray and a worker"]
    assert len(findings) == 18
    assert [finding for finding in findings if finding.status == "error"] == []
    assert {"GPU", "tokenizer"} >= {f.part for f in findings if f.status == "warning"} - {"shared memory", "disk"}


def test_a_working_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch)
    assert gpu.devices() == "0: GPU of the test, 80 GiB, capability 9.0"


def test_flashinfer_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(__version__="0.6.13"))
    monkeypatch.setattr(cuda_tools, "find_nvcc", lambda: None)
    with pytest.raises(Doubtful, match="finds no nvcc"):
        gpu.flashinfer()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("import sys; sys.exit('no free port')", "Ray does not start: no free port"),
        ("import time; time.sleep(60)", "within 2 s"),
        (
            'print(\'noise\'); print(\'{"overlay": {"problem": "transformers lacks openpi"}, "registered": true}\')',
            "inside a worker: transformers lacks openpi",
        ),
    ],
)
def test_a_ray_that_fails(answer: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The probe is replaced by a program with that end."""
    (tmp_path / "probe.py").write_text(answer)
    (tmp_path / "python").write_text(f"#!/bin/sh\nexec {sys.executable} {tmp_path}/probe.py\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(cluster.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(cluster, "_TIMEOUT", 2)
    finding = find("Ray and a worker")
    assert finding.status == "error"
    assert message in finding.detail
    assert finding.fix


def test_nothing_ends_the_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also checks that raise what nobody expects; the table, the file and the exit code tell."""

    def end() -> str:
        raise SystemExit(3)

    def absent() -> str:
        raise Doubtful("no GPU", "buy one")

    monkeypatch.setattr(
        doctor,
        "CHECKS",
        (
            Check("a", lambda: "[works]"),
            Check("b", end, "repair b"),
            Check("c", absent),
            Check("d", lambda: str(1 / 0)),
        ),
    )
    result = CliRunner().invoke(app, ["doctor", "--json", str(tmp_path / "sub" / "found.json")])
    assert result.exit_code == 1
    for text in ("[works]", "fix: repair b", "fix: buy one", "ZeroDivisionError", "1 ok, 1 warning, 2 errors"):
        assert text in result.output
    content = json.loads((tmp_path / "sub" / "found.json").read_text())
    assert content["passed"] is False
    assert [finding["status"] for finding in content["findings"]] == ["ok", "error", "warning", "error"]


@pytest.mark.parametrize(
    "module", ["torch", "rlinf", "transformers", "openpi", "libero", "hydra", "psutil", "omegaconf"]
)
def test_any_package_may_be_missing(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, so without the checks that start another one."""
    checks = [check for check in doctor.CHECKS if check.part not in ("Ray and a worker", "rendering")]
    for check in checks:
        check()  # whatever is imported while a package is hidden would stay crippled for later tests
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(doctor, "CHECKS", checks)
    arguments = ["doctor", "no_such_config", "--json", str(tmp_path / "found.json")]
    assert CliRunner().invoke(app, arguments).exit_code == 1
    content = json.loads((tmp_path / "found.json").read_text())
    assert [finding["part"] for finding in content["findings"]] == [check.part for check in checks] + ["config"]


def test_warnings_are_no_failure() -> None:
    findings = [Finding("a", "ok", ""), Finding("b", "warning", "x", "y")]
    assert report.passed(findings)
    assert not report.passed([*findings, Finding("c", "error", "x", "y")])


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(simulator, "version", missing)
    assert find("robosuite").detail == "package robosuite is not installed"
