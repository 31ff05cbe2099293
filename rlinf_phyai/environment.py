# SPDX-License-Identifier: Apache-2.0
"""Environment variables that a run needs and a user need not know. What is set already stays."""

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

PTRACER = "ignore:prctl(PR_SET_PTRACER:UserWarning"
"""RLinf lets debuggers of the same user attach, which containers forbid: nothing that a run needs."""


def set_defaults(environment: MutableMapping[str, str] | None = None) -> None:
    """Fill in the variables. Call before RLinf, LIBERO or jax is imported; Ray's workers inherit them."""
    environment = os.environ if environment is None else environment
    defaults = {
        "MUJOCO_GL": "egl",  # render off-screen
        "PYOPENGL_PLATFORM": "egl",
        "JAX_PLATFORMS": "cpu",  # openpi imports jax, which would take the GPU's memory
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "TOKENIZERS_PARALLELISM": "false",
    }
    # The installer writes LIBERO's path file here; without one LIBERO asks questions on stdin.
    libero = Path(sys.prefix) / "etc" / "libero"
    if (libero / "config.yaml").is_file():
        defaults["LIBERO_CONFIG_PATH"] = str(libero)
    for name, value in defaults.items():
        environment.setdefault(name, value)
    # RLinf's workers ask for it before they load an extension, so only the interpreter's own list of filters comes first.
    filters = environment.get("PYTHONWARNINGS", "")
    if PTRACER not in filters:
        environment["PYTHONWARNINGS"] = f"{filters},{PTRACER}" if filters else PTRACER
