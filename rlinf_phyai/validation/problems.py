# SPDX-License-Identifier: Apache-2.0
"""What a startup check reports, and the error that lists all reports at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlinf_phyai.errors import PhyaiError

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Problem:
    """One thing in the config that cannot work (``error``) or is probably not meant (``warning``).

    Attributes:
        key: the dotted config key to look at.
        found: its value, as text.
        allowed: the values that work.
        fix: what to change.
        reason: why the value does not work.
        severity: errors stop the start, warnings are printed.
        check: name of the check that reported it (filled in by the caller of the check).
    """

    key: str
    found: str
    allowed: str
    fix: str
    reason: str = ""
    severity: Severity = "error"
    check: str = ""

    def __str__(self) -> str:
        sentences = [f"{self.key} is {self.found}; allowed: {self.allowed}", self.reason, f"Change: {self.fix}"]
        return " ".join(text if text.endswith(("?", ".")) else f"{text}." for text in sentences if text)


class ConfigError(PhyaiError, ValueError):
    """The config cannot run. ``problems`` holds every error found; the message lists them, numbered."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        title = f"the config has {count} problem{'s' if count != 1 else ''}; nothing was started."
        super().__init__("\n".join([title, *(_entry(number, p) for number, p in enumerate(self.problems, 1))]))


def _entry(number: int, problem: Problem) -> str:
    lines = [f"{number}. {problem.key}", f"     found:   {problem.found}", f"     allowed: {problem.allowed}"]
    if problem.reason:
        lines.append(f"     why:     {problem.reason}")
    lines.append(f"     change:  {problem.fix}")
    return "\n".join(lines)


def warning(key: str, found: str, allowed: str, fix: str, reason: str = "") -> Problem:
    """A problem that does not stop the start."""
    return Problem(key, found, allowed, fix, reason, severity="warning")


def show(value: Any) -> str:
    """A config value as its YAML reader knows it: ``null``, ``true``, quoted text, plain numbers."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return repr(value)
    return str(value)


def one_of(names: Iterable[str]) -> str:
    """``a, b or c``."""
    items = list(names)
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} or {items[-1]}"


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """A hint that names the closest known spelling, or nothing."""
    near = closest(name, known, cutoff)
    return f"did you mean {near}?" if near else ""


def closest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name most like ``name``, None where none is alike."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return near[0] if near else None
