# SPDX-License-Identifier: Apache-2.0
"""What each worker of a run does at the moment, for somebody who wonders why nothing moves."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import psutil

from rlinf_phyai.calls import Pending
from rlinf_phyai.signs import Sign, outwards, shown

_SILENT_S = 10.0  # signs come every two seconds; a busy machine may delay a few


def process_state(sign: Sign) -> str:
    """The system's word for the state of a worker's process; nothing for one of another node. Needs a running Ray."""
    import ray

    if sign.host != ray.get_runtime_context().get_node_id():
        return ""
    try:
        return str(psutil.Process(sign.pid).status())
    except psutil.Error:
        return "gone"


def describe(
    workers: Sequence[str],
    signs: Mapping[str, Sign],
    silent: Mapping[str, float | None],
    pending: Sequence[Pending],
    driver: threading.Thread,
    state_of: Callable[[Sign], str] = process_state,
) -> list[str]:
    """Lines about every worker, those first that are most likely the cause.

    That is a worker that does not answer, then one inside a call that does not wait for others; among equals, the one
    whose last sign is oldest.

    Args:
        workers: the names of all.
        signs: what each published last; those that never did are absent.
        silent: seconds since a worker was last heard, None where it never was.
        pending: calls that have not returned.
        driver: thread of this process that makes the calls.
        state_of: the state of the process behind a sign.
    """
    found = []
    for worker in workers:
        sign, calls = signs.get(worker), [call for call in pending if call.worker == worker]
        state = state_of(sign) if sign else ""
        found.append(_Condition(worker, sign, silent[worker] or 0.0, calls, state))
    lines = [line for one in sorted(found, key=lambda one: (one.rank(), -one.age())) for line in one.lines()]
    if not pending:
        lines.append("- no worker was asked for anything; the driver itself is at:")
        frames = list(outwards(sys._current_frames().get(driver.ident or 0)))
        lines += [f"      {line}" for line in shown(frames[::-1])]
    return lines


@dataclass(frozen=True)
class _Condition:
    """One worker."""

    name: str
    sign: Sign | None
    silent: float
    calls: Sequence[Pending]
    state: str

    def answers(self) -> bool:
        return self.sign is not None and self.silent <= _SILENT_S and self.state != psutil.STATUS_STOPPED

    def rank(self) -> int:
        """0 for the first suspects."""
        if not self.answers():
            return 0
        return 3 if not self.calls else 2 if self.sign and self.sign.waits else 1

    def age(self) -> float:
        """Seconds since the last mark."""
        return float("inf") if self.sign is None else self.sign.age + self.silent

    def lines(self) -> Iterator[str]:
        called = ", ".join(f"in {call.function}() for {call.seconds:.0f} s" for call in self.calls) or "in no call"
        sign = self.sign
        if sign is None:
            yield f"- {self.name} never gave a sign of life; {called}"
            return
        state = f", {self.state}" if self.state else ""
        yield f"- {self.name} (process {sign.pid} on {sign.address}{state}) {self._does(sign)}"
        yield f"    {called}; last sign of life: {sign.last or 'its start'}, {self.age():.0f} s ago"
        if sign.stack:
            yield f"    its Python code {'is' if self.answers() else f'was, {self.silent:.0f} s ago,'} at:"
            yield from (f"      {line}" for line in sign.stack)

    def _does(self, sign: Sign) -> str:
        if self.state == psutil.STATUS_STOPPED:
            return "is stopped"
        if not self.answers():
            return (
                f"has not answered for {self.silent:.0f} s: native code keeps Python's lock, the process is stopped, or its "
                "node is cut off"
            )
        if not self.calls:
            return "has nothing to do"
        if sign.waits:
            return "waits for another worker"
        return f"is busy, or blocked by itself ({sign.cpu:.1f} s of CPU time since its last sign of life)"
