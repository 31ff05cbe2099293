# SPDX-License-Identifier: Apache-2.0
"""Signs of life of a worker process: the last point that its work reached, and where its Python code stands now.

Work passes :func:`mark`, which costs less than a microsecond. A thread of the process publishes the latest mark every
few seconds, so that a worker is described also while the thread that does its calls is blocked in native code. It needs
Python's lock; a process that is stopped, or whose native code keeps the lock, falls silent, and that is a sign too.

The channel is a :class:`Board`, one small Ray actor (60 MB) beside the workers. A blocked worker answers no Ray call, so the
driver cannot ask; files in the log folder would reach one node only; a port of our own would need an address and an open
firewall. What RLinf's own managers use works wherever a run works.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import linecache
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

PERIOD_S = 2.0  # between two publications
_FRAMES = 8  # innermost ones that are published
_MACHINERY = (  # its frames say nothing about a call
    "/ray/",
    "/asyncio/",
    "/threading.py",
    "/selectors.py",
    "/concurrent/futures/",
    "/rlinf/scheduler/worker/",
)
_MEETING_POINTS = (  # its code waits for another worker
    "/rlinf/scheduler/channel/",
    "/rlinf/scheduler/collective/",
    "/torch/distributed/distributed_c10d.py",
)


class _Reached:
    """The latest mark of this process."""

    count = 0
    what: tuple[object, ...] = ()
    when = time.monotonic()


def mark(*what: object) -> None:
    """The work of this process went on and reached this point, for example ``mark("micro-batch", 3)``."""
    _Reached.what = what
    _Reached.when = time.monotonic()
    _Reached.count += 1


@dataclass(frozen=True)
class Sign:
    """What a worker publishes. Durations are its own clock's: those of two nodes need not agree.

    Attributes:
        host: Ray's name of its node.
        address: of the node.
        pid: of the process on that node.
        heartbeat: number of this publication.
        marks: passed so far.
        last: the latest mark, "" before the first.
        age: seconds since then.
        cpu: seconds of CPU time that the process used since then.
        stack: where the thread that does the calls stands, innermost frame last; of a suspended call, where it awaits.
        waits: that place lies in a channel or a collective operation, which takes another worker.
    """

    host: str
    address: str
    pid: int
    heartbeat: int
    marks: int
    last: str
    age: float
    cpu: float
    stack: tuple[str, ...]
    waits: bool


class Board:
    """Keeps the latest sign of every worker, by its name. Runs as a Ray actor."""

    def __init__(self) -> None:
        self._signs: dict[str, Sign] = {}

    def publish(self, worker: str, sign: Sign) -> None:
        """Replace what this worker published before."""
        self._signs[worker] = sign

    def read(self) -> dict[str, Sign]:
        """The latest sign of every worker that gave one."""
        return self._signs


class SignsOfLife:
    """What a class of RLinf workers gains: they publish signs of life once they are told where."""

    async def give_signs(self: Any, board: Any) -> None:
        """Publish from now on, until the process ends.

        A coroutine, since Ray runs those in the thread and the event loop in which it runs all calls to such a worker.

        Args:
            board: Ray handle of a :class:`Board`.
        """
        name = f"{self._group_name} rank {self._rank}"
        where = _Place(threading.get_ident(), asyncio.get_running_loop())
        threading.Thread(target=_publish, args=(name, board, where), name="signs of life", daemon=True).start()


class _Place:
    """Where calls run in this process."""

    def __init__(self, thread: int, loop: asyncio.AbstractEventLoop) -> None:
        self._thread, self._loop = thread, loop

    def stack(self) -> list[FrameType]:
        """Frames of the calls in progress, innermost last: of the one that runs, or of all that are suspended."""
        running = _telling(outwards(sys._current_frames().get(self._thread)))
        if running:
            return running[::-1]
        return [frame for task in asyncio.all_tasks(self._loop) for frame in _telling(_suspended(task.get_coro()))]


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _suspended(coroutine: Any) -> Iterator[FrameType]:
    """Frames of a suspended coroutine and of those that it awaits."""
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None)
        if isinstance(frame, FrameType):
            yield frame
        awaited = getattr(coroutine, "cr_await", None)
        if type(awaited).__name__ == "coroutine_wrapper":  # compiled code (Ray's) awaits through what __await__ returns
            awaited = next(iter(gc.get_referents(awaited)), None)
        coroutine = awaited


def _telling(frames: Iterable[FrameType]) -> list[FrameType]:
    return [frame for frame in frames if not any(part in frame.f_code.co_filename for part in _MACHINERY)]


def shown(frames: Iterable[FrameType]) -> tuple[str, ...]:
    """``file:line in function: source`` of the innermost frames; innermost last, as they come."""
    lines = []
    for frame in list(frames)[-_FRAMES:]:
        code = frame.f_code
        file = code.co_filename.rpartition("/site-packages/")[2]
        source = linecache.getline(code.co_filename, frame.f_lineno).strip()
        lines.append(f"{file}:{frame.f_lineno} in {code.co_name}: {source}")
    return tuple(lines)


def _address() -> tuple[str, str]:
    """Ray's name of this node, and its address."""
    import ray

    return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()


def _publish(name: str, board: Any, where: _Place) -> None:
    host, address = _address()
    marks, cpu = -1, 0.0
    complained = False
    for heartbeat in itertools.count():
        if marks != _Reached.count:
            marks, cpu = _Reached.count, time.process_time()
        try:
            stack = where.stack()
            sign = Sign(
                host=host,
                address=address,
                pid=os.getpid(),
                heartbeat=heartbeat,
                marks=marks,
                last=" ".join(map(str, _Reached.what)),
                age=time.monotonic() - _Reached.when,
                cpu=time.process_time() - cpu,
                stack=shown(stack),
                waits=any(part in frame.f_code.co_filename for frame in stack for part in _MEETING_POINTS),
            )
            board.publish.remote(name, sign)
        except Exception:  # a worker that falls silent looks dead: say why, and go on
            if not complained:
                traceback.print_exc()
            complained = True
        time.sleep(PERIOD_S)
