# SPDX-License-Identifier: Apache-2.0
"""Python packages: the right versions, and that they work by using them."""

import importlib
import inspect
import os
import platform
from importlib.metadata import version
from pathlib import Path

from rlinf_phyai.doctor.finding import Broken, Check, Doubtful

TESTED_TORCH = "2.11.0"
OVERLAY_FIX = "install requirements/overlay.txt last, with --no-deps --reinstall"
TOKENIZER_FIX = (
    "fetch it once, with internet access: python -c 'from openpi.models.tokenizer import PaligemmaTokenizer; "
    "PaligemmaTokenizer()'; or put it into the checkpoint folder"
)


def python() -> str:
    found = platform.python_version()
    if tuple(map(int, found.split(".")[:2])) < (3, 12):
        raise Broken(f"Python {found}; needed is 3.12 or newer")
    return f"Python {found}"


def torch() -> str:
    import torch

    found = f"torch {torch.__version__}, built with CUDA {torch.version.cuda or '-'}"
    if torch.__version__.split("+")[0] != TESTED_TORCH:
        raise Doubtful(f"{found}; tested is {TESTED_TORCH}")
    return found


def rlinf() -> str:
    importlib.import_module("rlinf.config")
    found = version("rlinf")
    if not found.startswith("0.3."):
        raise Broken(f"rlinf {found} is not among the supported 0.3.x")
    return f"rlinf {found}"


def transformers_overlay() -> str:
    """Also run inside a Ray worker: what counts are the classes that a process really imports."""
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    if "cond_dim" not in inspect.signature(GemmaRMSNorm.__init__).parameters:
        raise Broken("transformers lacks openpi's edits (they were overwritten, or never installed)")
    return f"transformers {version('transformers')} with openpi's edits"


def openpi() -> str:
    importlib.import_module("openpi.models_pytorch.pi0_pytorch")
    return f"openpi {version('rlinf-openpi')}"


def tokenizer() -> str:
    """openpi's cache; with a config the checkpoint's own tokenizer counts too (:mod:`.run_config`)."""
    from rlinf_phyai.models.pi05.tiny import TOKENIZER_FILE

    file = Path(os.environ.get("OPENPI_DATA_HOME", "~/.cache/openpi")).expanduser() / TOKENIZER_FILE
    if not file.is_file():
        raise Doubtful(f"no tokenizer at {file}: the checkpoint must bring one")
    return str(file)


def backend() -> str:
    from rlinf_phyai import backends, plugin

    plugin.register()
    found = backends.get("phyai")
    return f"{found.load_rollout_worker().__name__}, {found.load_actor_worker().__name__}"


def config_groups() -> str:
    from rlinf_phyai.paths import config_dir

    return str(config_dir())


CHECKS = (
    Check("Python", python),
    Check("torch", torch),
    Check("RLinf", rlinf),
    Check("transformers", transformers_overlay, OVERLAY_FIX),
    Check("openpi", openpi),
    Check("tokenizer", tokenizer, TOKENIZER_FIX),
    Check("backend phyai", backend, "read the error: a worker would fail the same way"),
    Check("config groups", config_groups, "reinstall rlinf-phyai"),
)
