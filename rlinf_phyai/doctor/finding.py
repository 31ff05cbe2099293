# SPDX-License-Identifier: Apache-2.0
"""What a check reports, and how a check is run so that nothing it does can end the doctor."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from typing import Literal

Status = Literal["ok", "warning", "error"]

INSTALL = (
    "repeat `bash requirements/install.sh --python 3.12 --torch 2.11.0 --install-rlinf embodied --model openpi --env libero "
    "--engine phyai`"
)


@dataclass(frozen=True)
class Finding:
    """One line of the table. A run is possible with warnings, not with errors."""

    part: str
    status: Status
    detail: str
    fix: str = ""


class Broken(Exception):
    """A check's own complaint: what was found and, where it is not the check's usual one, the fix."""

    def __init__(self, detail: str, fix: str = "") -> None:
        super().__init__(detail)
        self.fix = fix


class Doubtful(Broken):
    """The same for what works, but worse than it could, or for some runs only."""


@dataclass(frozen=True)
class Check:
    """``run`` returns what it found, or raises :class:`Broken`, :class:`Doubtful` or anything else."""

    part: str
    run: Callable[[], str]
    fix: str = INSTALL

    def __call__(self) -> Finding:
        try:
            return Finding(self.part, "ok", self.run())
        except Broken as broken:
            status: Status = "warning" if isinstance(broken, Doubtful) else "error"
            return Finding(self.part, status, str(broken), broken.fix or self.fix)
        except PackageNotFoundError as error:
            return Finding(self.part, "error", f"package {error.name} is not installed", self.fix)
        except (Exception, SystemExit) as error:  # a broken import may raise anything
            text = " ".join(str(error).split()) or "no message"
            return Finding(self.part, "error", f"{type(error).__name__}: {text[:300]}", self.fix)


def run_all(checks: Iterable[Check], starting: Callable[[str], None] = lambda part: None) -> Iterator[Finding]:
    """Findings in order; ``starting`` hears the part's name before its check runs."""
    for check in checks:
        starting(check.part)
        yield check()
