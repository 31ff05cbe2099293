# SPDX-License-Identifier: Apache-2.0
"""The GPU: seen by torch, new enough, one CUDA for driver, compiler and torch, and caches that kernels can be compiled into."""

import os
import tempfile
from pathlib import Path

from rlinf_phyai import cuda_tools
from rlinf_phyai.doctor.finding import Broken, Check, Doubtful

MIN_CAPABILITY = (8, 0)


def devices() -> str:
    import torch

    if not torch.cuda.is_available():
        driver = cuda_tools.driver_cuda()
        if driver is not None:
            raise Broken(
                f"the driver works (CUDA {driver}) but torch {torch.__version__} sees no GPU",
                "check CUDA_VISIBLE_DEVICES, and that torch is a CUDA build whose CUDA the driver runs",
            )
        raise Doubtful("no GPU: the tiny model trains, the full one does not", "train on a machine with an NVIDIA GPU")
    found = []
    for index in range(torch.cuda.device_count()):
        name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        if capability < MIN_CAPABILITY:
            raise Broken(
                f"GPU {index}, {name}, has compute capability {capability[0]}.{capability[1]}; the bfloat16 kernels need "
                f"{MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}",
                "use an Ampere GPU or a newer one, and hide the others with CUDA_VISIBLE_DEVICES",
            )
        memory = torch.cuda.get_device_properties(index).total_memory / 2**30
        found.append(f"{index}: {name}, {memory:.0f} GiB, capability {capability[0]}.{capability[1]}")
    return "; ".join(found)


def cuda_versions() -> str:
    import torch

    driver, compiler = cuda_tools.driver_cuda(), cuda_tools.find_nvcc()
    if torch.version.cuda is None:
        if driver is not None:
            raise Broken(f"the driver runs CUDA {driver}, but torch {torch.__version__} is built without CUDA")
        return "torch is built without CUDA"
    problems = cuda_tools.disagreements(torch.version.cuda, compiler, driver)
    if problems:
        raise Broken("; ".join(problems), "as said")
    nvcc = f"nvcc {compiler.cuda} ({compiler.path})" if compiler else "no nvcc"
    return f"torch {torch.version.cuda}, driver {driver or '-'}, {nvcc}"


def flashinfer() -> str:
    """Only kernel policies that name it need it."""
    import torch

    if not torch.cuda.is_available():
        return "not needed without a GPU"
    try:
        import flashinfer
    except ImportError as error:
        raise Doubtful(
            f"FlashInfer does not import ({error}): kernel policies that name it are refused",
            "add --flashinfer to the install command, or keep to the policies without it",
        ) from error
    if cuda_tools.find_nvcc() is None:
        raise Doubtful(
            f"flashinfer {flashinfer.__version__} finds no nvcc: only kernels compiled before can run",
            "install a CUDA toolkit and set CUDA_HOME to it",
        )
    return f"flashinfer {flashinfer.__version__}"


def kernel_caches() -> str:
    """Triton and FlashInfer compile on first use and keep the result."""
    home = Path.home()
    folders = {
        "TRITON_CACHE_DIR": Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache"),
        "FLASHINFER_WORKSPACE_BASE": Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or home)
        / ".cache"
        / "flashinfer",
    }
    for variable, folder in folders.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise Broken(
                f"compiled kernels cannot be kept in {folder} ({error.strerror})",
                f"make it writable, or name another folder in {variable}",
            ) from error
    return ", ".join(map(str, folders.values()))


CHECKS = (
    Check("GPU", devices),
    Check("CUDA versions", cuda_versions),
    Check("FlashInfer", flashinfer),
    Check("kernel caches", kernel_caches),
)
