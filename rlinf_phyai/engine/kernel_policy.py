# SPDX-License-Identifier: Apache-2.0
"""Kernel policies: YAML files that pin one backend per operation.

A policy is chosen by the configuration, or by the environment variable ``PHYAI_KERNEL_CONFIG``; none is loaded by default.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from rlinf_phyai.errors import KernelPolicyError
from rlinf_phyai.kernels import UnknownKernel, check_operations
from rlinf_phyai.paths import config_dir

ENVIRONMENT_VARIABLE = "PHYAI_KERNEL_CONFIG"
_KEYS = {"name", "description", "fallback", "operations"}


@dataclass(frozen=True)
class KernelPolicy:
    """A named choice of backends. ``fallback`` is None or ``"torch"``; operations left out use ``torch``."""

    name: str
    operations: dict[str, str] = field(default_factory=dict)
    fallback: str | None = None
    source: str = "built in"


TORCH_REFERENCE = KernelPolicy(name="torch_reference")


def policy_names() -> list[str]:
    """Names of the packaged policies."""
    return sorted(path.stem for path in (config_dir() / "kernel_policy").glob("*.yaml"))


def _find(choice: str) -> Path:
    path = Path(choice).expanduser()
    if path.suffix in (".yaml", ".yml"):
        if path.is_file():
            return path
        raise KernelPolicyError(f"kernel policy file {path} does not exist.")
    packaged = config_dir() / "kernel_policy" / f"{choice}.yaml"
    if packaged.is_file():
        return packaged
    raise KernelPolicyError(
        f"kernel policy {choice!r} is unknown; packaged policies: {', '.join(policy_names())}; or give the path of a .yaml file."
    )


def load_kernel_policy(choice: str | Path | None) -> KernelPolicy:
    """The policy that ``choice`` (name or file), the environment variable, or neither (torch reference) selects.

    Raises:
        KernelPolicyError: unknown name, missing file, unknown key, operation or backend.
    """
    chosen = str(choice) if choice is not None else os.environ.get(ENVIRONMENT_VARIABLE)
    if not chosen:
        return TORCH_REFERENCE
    path = _find(chosen)
    try:
        content = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise KernelPolicyError(f"kernel policy {path} is not valid YAML: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("operations", {}), dict):
        raise KernelPolicyError(f"kernel policy {path} must be a mapping with the keys {', '.join(sorted(_KEYS))}.")
    unknown = set(content) - _KEYS
    if unknown:
        raise KernelPolicyError(
            f"kernel policy {path} has unknown keys {sorted(map(str, unknown))}; allowed: {', '.join(sorted(_KEYS))}."
        )
    fallback = content.get("fallback")
    if fallback not in (None, "torch"):
        raise KernelPolicyError(f"kernel policy {path}: fallback is {fallback!r}; allowed: null or 'torch'.")
    operations = dict(content.get("operations") or {})
    if not all(isinstance(name, str) and isinstance(backend, str) for name, backend in operations.items()):
        raise KernelPolicyError(
            f"kernel policy {path}: operations is {operations}; expected names of operations with names of backends."
        )
    try:
        check_operations(operations)
    except UnknownKernel as error:
        raise KernelPolicyError(f"kernel policy {path}: {error}") from error
    return KernelPolicy(
        name=str(content.get("name", path.stem)), operations=operations, fallback=fallback, source=str(path)
    )
