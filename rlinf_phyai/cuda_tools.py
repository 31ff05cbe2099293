# SPDX-License-Identifier: Apache-2.0
"""Which CUDA the driver, the compiler and torch are for. Standard library only: the installer uses it before the rest is there."""

import os
import re
import runpy
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Compiler:
    """An ``nvcc`` and its CUDA version, such as ``13.0``; the version is None where it does not run."""

    path: Path
    cuda: str | None


def torch_cuda(site_packages: Path) -> str | None:
    """CUDA version that the installed torch is built with; None without torch or for a build without CUDA."""
    file = site_packages / "torch" / "version.py"
    return runpy.run_path(str(file)).get("cuda") if file.is_file() else None


def driver_cuda() -> str | None:
    """Newest CUDA version that the NVIDIA driver runs, from ``nvidia-smi``; None without a working driver."""
    found = re.search(r"CUDA Version:\s*(\d+\.\d+)", _output("nvidia-smi"))
    return found[1] if found else None


def find_nvcc() -> Compiler | None:
    """The compiler that FlashInfer takes: of CUDA_HOME, else of CUDA_PATH, else on the PATH, else of /usr/local/cuda."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    on_path = shutil.which("nvcc")
    if home is None and on_path is not None:
        path = Path(on_path)
    else:
        path = Path(home or "/usr/local/cuda") / "bin" / "nvcc"
    if not path.is_file():
        return None
    found = re.search(r"release (\d+\.\d+)", _output(str(path), "--version"))
    return Compiler(path, found[1] if found else None)


def disagreements(torch: str, compiler: Compiler | None, driver: str | None) -> list[str]:
    """What cannot work together, each with both versions and the fix; CUDA keeps its promises within a major version."""
    problems = []
    if compiler is not None and compiler.cuda is None:
        problems.append(f"{compiler.path} does not run: repair that CUDA toolkit, or set CUDA_HOME to another one")
    elif compiler is not None and _major(compiler.cuda) != _major(torch):
        problems.append(
            f"nvcc ({compiler.path}) is CUDA {compiler.cuda} and torch is built with CUDA {torch}, but FlashInfer compiles its "
            f"kernels with that nvcc: set CUDA_HOME to a toolkit of CUDA {_major(torch)}, or install without FlashInfer "
            "(--no-flashinfer)"
        )
    if driver is not None and _major(driver) < _major(torch):
        problems.append(
            f"the NVIDIA driver runs CUDA {driver} at most and torch is built with CUDA {torch}: update the driver, or choose "
            f"a --torch built with CUDA {_major(driver)}"
        )
    return problems


def _major(version: str | None) -> int:
    return int((version or "0").split(".")[0])


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
