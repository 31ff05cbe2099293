# SPDX-License-Identifier: Apache-2.0
"""Notices of other packages that tell nothing about a run, left out by their exact words.

LIBERO builds on gym and robosuite, and openpi logs each file that it reads. What they say in every process at its start would hide
the lines that matter. Anything else that these packages say, in other words, is shown.
"""

from __future__ import annotations

import logging
import os
from typing import Any

GYM = "Gym has been unmaintained since 2022"
LOGGED: dict[str, tuple[str, ...]] = {
    "robosuite_logs": (
        "No private macro file found!",
        "It is recommended to use a private macro file",
        "To setup, run: python ",
    ),
    "OpenGL.acceleratesupport": ("No OpenGL_accelerate module loaded",),
    "root": ("Loaded norm stats from ",),
}
"""Logger -> how its notices begin."""
RLINF_LEVEL = "RLINF_LOG_LEVEL"
PLACEMENTS = ("NodePlacementStrategy", "PackedPlacementStrategy", "FlexiblePlacementStrategy")
"""RLinf's loggers that keep to INFO whatever its variable says."""


class _Leave:
    """A logging filter that leaves out messages beginning in given ways."""

    def __init__(self, beginnings: tuple[str, ...]) -> None:
        self.beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            return not record.getMessage().startswith(self.beginnings)
        except Exception:  # arguments that do not fit: logging's handlers report that, and the caller goes on
            return True


class _Level:
    """A logging filter that holds a logger to RLinf's level."""

    def filter(self, record: logging.LogRecord) -> bool:
        level = logging.getLevelNamesMapping().get(os.environ.get(RLINF_LEVEL, "INFO").upper(), logging.INFO)
        return record.levelno >= level


def leave_out() -> None:
    """In this process, from now on; before gym is imported. Calling again does nothing."""
    for name, beginnings in LOGGED.items():
        _add(logging.getLogger(None if name == "root" else name), _Leave(beginnings))
    for name in PLACEMENTS:
        _add(logging.getLogger(name), _Level())
    # robosuite calls a method that Python renamed, and Python says so each time: call the new one.
    robosuite: Any = logging.getLogger("robosuite_logs")
    robosuite.warn = robosuite.warning
    try:
        from gym_notices.notices import notices  # type: ignore[import-untyped]
    except ImportError:  # then gym prints none
        return
    for version, text in list(notices.items()):
        if text.startswith(GYM):
            del notices[version]


def _add(logger: logging.Logger, new: _Leave | _Level) -> None:
    if not any(isinstance(known, type(new)) for known in logger.filters):
        logger.addFilter(new)


class LeaveOut:
    """Calls :func:`leave_out` in a process where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return leave_out, ()


def run(_notices: object, function: Any, *args: Any) -> Any:
    """``function(*args)``; pickled as ``(run, (LeaveOut(), function))``, the notices are left out before its module is imported."""
    return function(*args)
