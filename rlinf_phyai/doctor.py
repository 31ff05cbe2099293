# SPDX-License-Identifier: Apache-2.0
"""Checks an installation part by part, each by using it: what works, what does not, and what to do about it."""

import importlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

INSTALL = "bash requirements/install.sh --install-rlinf embodied --model openpi --env libero --engine phyai"


@dataclass(frozen=True)
class Finding:
    """Outcome of one check. ``needed`` tells whether training works without it."""

    name: str
    ok: bool
    detail: str
    fix: str = ""
    needed: bool = True


class Failed(Exception):
    """A check's own complaint: what was found."""


def check_torch() -> str:
    import torch

    return f"torch {torch.__version__}, built with CUDA {torch.version.cuda or '-'}"


def check_gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        raise Failed("no CUDA device: the tiny model trains, the full one does not")
    return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def check_flashinfer() -> str:
    import flashinfer

    return f"flashinfer {flashinfer.__version__}"


def check_rlinf() -> str:
    importlib.import_module("rlinf.config")
    found = version("rlinf")
    if not found.startswith("0.3."):
        raise Failed(f"rlinf {found} is not among the supported 0.3.x")
    return f"rlinf {found}"


def check_transformers() -> str:
    import inspect

    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    if "cond_dim" not in inspect.signature(GemmaRMSNorm.__init__).parameters:
        raise Failed("transformers lacks openpi's edits (they were overwritten, or never installed)")
    return f"transformers {version('transformers')} with openpi's edits"


def check_openpi() -> str:
    importlib.import_module("openpi.models_pytorch.pi0_pytorch")
    return f"openpi {version('rlinf-openpi')}"


def check_libero() -> str:
    from libero.libero import get_libero_path

    assets = Path(get_libero_path("assets"))
    if not (assets / "scenes").is_dir():
        raise Failed(f"no assets at {assets}")
    return f"assets at {assets}"


def check_rendering() -> str:
    import mujoco

    context = mujoco.GLContext(64, 64)
    context.make_current()
    context.free()
    return f"off-screen through {os.environ.get('MUJOCO_GL', 'the default')}"


def check_backend() -> str:
    from rlinf_phyai import backends, plugin

    plugin.register()
    backend = backends.get("phyai")
    return f"{backend.load_rollout_worker().__name__}, {backend.load_actor_worker().__name__}"


def check_config_groups() -> str:
    from rlinf_phyai.paths import config_dir

    return str(config_dir())


_INSTALL = f"run `{INSTALL}`"
CHECKS: tuple[tuple[str, Callable[[], str], str, bool], ...] = (
    ("torch", check_torch, _INSTALL, True),
    ("RLinf", check_rlinf, _INSTALL, True),
    ("transformers", check_transformers, "install requirements/overlay.txt last, with --no-deps --reinstall", True),
    ("openpi", check_openpi, _INSTALL, True),
    (
        "LIBERO",
        check_libero,
        "run `libero-download-assets`, or install requirements/libero-assets.txt and --link them",
        True,
    ),
    ("rendering", check_rendering, "install libegl1 libegl-mesa0 libgl1-mesa-dri, or NVIDIA's EGL driver", True),
    ("config groups", check_config_groups, "reinstall rlinf-phyai", True),
    ("backend phyai", check_backend, "read the error: a worker would fail the same way", True),
    ("GPU", check_gpu, "check nvidia-smi and torch's CUDA version", False),
    ("FlashInfer", check_flashinfer, "on a GPU machine add --flashinfer to the install command", False),
)


def run_checks() -> Iterable[Finding]:
    """Runs every check, one after the other, and reports each as it ends; none of them raises."""
    from rlinf_phyai.environment import set_defaults

    set_defaults()
    for name, check, fix, needed in CHECKS:
        try:
            yield Finding(name, True, check(), needed=needed)
        except Failed as failed:
            yield Finding(name, False, str(failed), fix, needed)
        except PackageNotFoundError as error:
            yield Finding(name, False, f"package {error} is not installed", fix, needed)
        except Exception as error:  # a broken import may raise anything
            yield Finding(name, False, f"{type(error).__name__}: {error}", fix, needed)
