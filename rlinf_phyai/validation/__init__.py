# SPDX-License-Identifier: Apache-2.0
"""Startup validation: what would stop or spoil a run minutes later, found before anything starts, listed at once.

:func:`validate_config` is what an entry point calls; :func:`find_problems` gives the reports themselves. Checks are
small functions of a read-only view of the config, grouped by subject; the modules' ``CHECKS`` tuples are the registry.
Only :mod:`rlinf_phyai.validation.files` and ``disk`` look outside the config. A run with RLinf's own rollout backend meets the
``CHECKS_ANY`` alone: what RLinf would refuse itself, later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from omegaconf import DictConfig

from rlinf_phyai.validation import batches, correction, devices, disk, engine_group, files, model, options, run, schema
from rlinf_phyai.validation.problems import ConfigError, Problem, Severity
from rlinf_phyai.validation.settings import PHYAI, Settings

__all__ = [
    "ANY_BACKEND",
    "FILES",
    "PHYAI_ONLY",
    "ConfigError",
    "Problem",
    "Severity",
    "find_problems",
    "validate_config",
]

Check = Callable[[Settings], Iterable[Problem]]

ANY_BACKEND: tuple[Check, ...] = (*run.CHECKS_ANY, *correction.CHECKS_ANY, *devices.CHECKS_ANY, *batches.CHECKS_ANY)
"""Checks of every run, whatever its rollout backend."""

PHYAI_ONLY: tuple[Check, ...] = (
    *schema.CHECKS,
    *run.CHECKS,
    *options.CHECKS,
    *correction.CHECKS,
    *model.CHECKS,
    *devices.CHECKS,
    *batches.CHECKS,
    *engine_group.CHECKS,
)
"""Checks of runs with ``rollout.rollout_backend: phyai``: pure functions of the config."""

FILES: tuple[Check, ...] = (*files.CHECKS, *disk.CHECKS)
"""Checks of runs with ``rollout.rollout_backend: phyai`` that look at files and installed kernels."""


def find_problems(cfg: DictConfig, *, gpus: int | None = None, look_at_files: bool = True) -> list[Problem]:
    """Everything that speaks against starting a run with ``cfg``, errors and warnings.

    Args:
        cfg: the composed config, before RLinf's own validation. It is not changed.
        gpus: accelerators of the whole cluster; 0 where there is none, None where it is not known: then a placement
            ``all`` stays open and the arithmetic that depends on it is left to RLinf.
        look_at_files: False leaves out the checks of files and kernels (paths may lie on another machine).
    """
    settings = Settings(cfg, gpus)
    checks = ANY_BACKEND
    if settings.backend == PHYAI:
        checks += PHYAI_ONLY + (FILES if look_at_files else ())
    problems = [replace(problem, check=check.__name__) for check in checks for problem in check(settings)]
    return [*_unresolved(settings), *problems]


def validate_config(cfg: DictConfig, *, gpus: int | None = None) -> list[str]:
    """Refuse a config that cannot run; see :func:`find_problems`.

    Returns:
        Warnings, one text each.

    Raises:
        ConfigError: the message lists all errors, numbered: the key, the value found, what is allowed, what to change.
    """
    problems = find_problems(cfg, gpus=gpus)
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors:
        raise ConfigError(errors)
    return [str(problem) for problem in problems]


def _unresolved(settings: Settings) -> Iterator[Problem]:
    """Values that a check asked for and that the config cannot give."""
    if settings.backend != PHYAI:
        return  # RLinf reports it itself
    for key, message in settings.unresolved.items():
        yield Problem(
            key,
            message,
            "a value that can be resolved",
            f"set {key}, or the variable that it refers to",
            check="resolvable",
        )
