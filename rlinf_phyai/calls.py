# SPDX-License-Identifier: Apache-2.0
"""Which calls to workers are under way, and what became of those that failed.

RLinf waits for every call in a thread of its own, prints what was raised and sends the driver a signal. The driver then
knows that something failed, not what. A :class:`CallLog` keeps the calls, so that the last line of a run can say which
worker failed in which call and why, or which calls never returned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rlinf_phyai.errors import PhyaiError

_SETTLE_S = 2.0  # a dead worker takes others down with it: wait this long for the first cause to show


@dataclass(frozen=True)
class _Call:
    group: str
    function: str
    handle: Any  # RLinf's WorkerGroupFuncResult
    made: float  # time.monotonic()


@dataclass(frozen=True)
class Pending:
    """A call that has not returned: the worker ``<group> rank <n>``, the function, the seconds since it was made."""

    worker: str
    function: str
    seconds: float


class CallLog:
    """Remembers the calls to worker groups that have not returned.

    Args:
        groups: RLinf's launched worker groups; the functions attached to them are wrapped.
    """

    def __init__(self, groups: Iterable[Any] = ()) -> None:
        self._calls: list[_Call] = []
        self._made = 0
        for group in groups:
            self.watch(group)

    def watch(self, group: Any) -> None:
        """Remember the calls to this group from now on."""
        from rlinf.scheduler.worker.worker_group import WorkerGroupFunc

        for name, function in list(vars(group).items()):
            if isinstance(function, WorkerGroupFunc) and not name.startswith("_"):
                setattr(group, name, self._recorded(group.worker_group_name, name, function))

    def _recorded(self, group: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            handle = function(*args, **kwargs)
            self._calls = [one for one in self._calls if not one.handle.done()]
            self._calls.append(_Call(group, name, handle, time.monotonic()))
            self._made += 1
            return handle

        return call

    def progress(self) -> tuple[int, int]:
        """Another value after every call that was made or has returned."""
        return self._made, sum(not one.handle.done() for one in self._calls)

    def pending(self) -> list[Pending]:
        """The calls that have not returned, worker by worker. Needs a running Ray."""
        import ray

        found = []
        for call in self._calls:
            references = list(call.handle._remote_results)
            _, waiting = ray.wait(references, num_returns=len(references), timeout=0)
            seconds = time.monotonic() - call.made
            found += [Pending(f"{call.group} rank {references.index(one)}", call.function, seconds) for one in waiting]
        return found

    def failures(self) -> list[str]:
        """One sentence per failed call, dead workers first; empty if none failed. Needs a running Ray."""
        deadline = time.monotonic() + _SETTLE_S
        found: list[tuple[bool, str]] = []
        while not any(dead for dead, _ in found) and time.monotonic() < deadline:
            found = sorted(_failures(self._calls), key=lambda one: not one[0])
            time.sleep(0.1)
        return [text for _, text in found]


def _failures(calls: Iterable[_Call]) -> list[tuple[bool, str]]:
    """(True for a dead worker, False for one that raised) and the sentence."""
    import ray

    found = []
    for call in calls:
        references = list(call.handle._remote_results)
        ended, _ = ray.wait(references, num_returns=len(references), timeout=0)
        for reference in ended:
            where = f"{call.group} rank {references.index(reference)} in {call.function}()"
            try:
                ray.get(reference, timeout=5)
            except ray.exceptions.RayActorError as error:
                found.append((True, f"{where}: {_death(error)}"))
            except ray.exceptions.OutOfMemoryError as error:
                found.append((True, f"{where}: {killed_for_memory(error)}"))
            except ray.exceptions.RayTaskError as error:
                cause = error.cause
                text = str(cause) if isinstance(cause, PhyaiError) else str(cause).partition("\n")[0]  # not a traceback
                found.append((False, f"{where} raised {type(cause).__name__}: {text}"))
            except ray.exceptions.RayError as error:
                found.append((False, f"{where}: {error}"))
    return found


def _death(error: Any) -> str:
    details = dict(line.strip().split(": ", 1) for line in str(error).splitlines() if ": " in line.strip())
    process = f"its process {details['pid']} on {details['ip']}" if {"pid", "ip"} <= set(details) else "its process"
    return (
        f"{process} died without raising anything: it was killed (by hand, or by the kernel when memory ran out: see "
        "dmesg), or it crashed in native code. What Ray knows is in the output above."
    )


def killed_for_memory(error: Exception) -> str:
    """What to say of Ray's ``OutOfMemoryError``, whose own text is a page of figures below one sentence."""
    found = str(error).strip().partition("\n")[0].rstrip(".")
    return (
        f"Ray killed its process: {found}. End other programs on that machine, or lower env.train.total_num_envs "
        "(env.eval.total_num_envs in an evaluation); `rlinf-phyai doctor CONFIG` estimates what environments take."
    )
