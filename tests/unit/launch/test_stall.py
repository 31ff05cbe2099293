# SPDX-License-Identifier: Apache-2.0
"""When a run counts as standing still, without Ray and without waiting."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rlinf_phyai import shutdown, signs
from rlinf_phyai.calls import Pending
from rlinf_phyai.errors import PhyaiError
from rlinf_phyai.signs import Sign
from rlinf_phyai.stall import DEFAULT_S, StallClock, StallError, clock_for
from rlinf_phyai.stall_report import describe

LOOK = 2.0


def looks(clock: StallClock, seconds: float, progress: object, start: float = 0.0) -> Iterator[tuple[float, str]]:
    """(time, verdict) of looks every two seconds, leaving out those at which nothing is to be done."""
    now = start
    while now <= start + seconds:
        verdict = clock.look(now, progress(now) if callable(progress) else progress)
        if verdict in ("warn", "end"):
            yield now, verdict
        now += LOOK


def test_a_run_in_which_any_worker_moves_is_left_alone() -> None:
    """For three days one of 64 workers passes one mark every 55 minutes, the others none."""
    still = [("worker", rank, 7) for rank in range(1, 64)]
    verdicts = looks(clock_for(DEFAULT_S), 3 * 86400, lambda now: (int(now // 3300), *still))
    assert {verdict for _, verdict in verdicts} == {"warn"}


def test_one_warning_per_standstill_and_the_end_at_the_limit() -> None:
    clock = StallClock(end_after=600, warn_after=100)
    assert list(looks(clock, 500, "a")) == [(100, "warn")]
    assert list(looks(clock, 98, "b", start=502)) == []
    assert list(looks(clock, 598, "c", start=602)) == [(702, "warn")]
    assert list(looks(clock, 610, "d", start=1300)) == [(1400, "warn"), *((1900 + 2 * i, "end") for i in range(6))]


def test_null_warns_and_never_ends() -> None:
    assert list(looks(clock_for(None), 30 * 86400, "a")) == [(600, "warn")]


def test_time_in_which_the_driver_was_suspended_does_not_count() -> None:
    clock = clock_for(3600)
    clock.look(0, "a")
    assert clock.look(2, "a") == "still"
    assert clock.look(9 * 3600, "a") == "still"
    assert clock.still < 10


def state(sign: Sign) -> str:
    return "stopped" if sign.pid == 2 else ""


def sign(**changes: Any) -> Sign:
    values: dict[str, Any] = {
        "host": "another node",
        "address": "10.0.0.1",
        "pid": 1,
        "heartbeat": 5,
        "marks": 3,
        "last": "predict train",
        "age": 50.0,
        "cpu": 0.25,
        "stack": ("a.py:1 in f: g()",),
        "waits": False,
    }
    return Sign(**values | changes)


def test_the_report_begins_with_the_suspects() -> None:
    found = {
        "Waiting": sign(waits=True, age=900.0),
        "Idle": sign(age=950.0),
        "Busy": sign(age=60.0),
        "Busy for longer": sign(age=70.0),
        "Silent": sign(age=1.0),
        "Stopped": sign(age=2.0, pid=2, waits=True),
    }
    silent = {
        "Waiting": 1.0,
        "Idle": 1.0,
        "Busy": 1.0,
        "Busy for longer": 1.0,
        "Silent": 400.0,
        "Stopped": 1.0,
        "Unheard of": None,
    }
    pending = [Pending(worker, "generate", 80.0) for worker in silent if worker != "Idle"]
    lines = describe(list(silent), found, silent, pending, threading.current_thread(), state)
    report = "\n".join(lines)
    names = [line[2:].partition(" (")[0].partition(" never")[0] for line in lines if line.startswith("- ")]
    assert names == ["Unheard of", "Silent", "Stopped", "Busy for longer", "Busy", "Waiting", "Idle"]
    assert "- Silent (process 1 on 10.0.0.1) has not answered for 400 s" in report
    assert "- Stopped (process 2 on 10.0.0.1, stopped) is stopped" in report
    assert "- Busy (process 1 on 10.0.0.1) is busy, or blocked by itself (0.2 s of CPU time" in report
    assert "in generate() for 80 s; last sign of life: predict train, 61 s ago" in report
    assert "a.py:1 in f: g()" in report


def test_where_no_call_is_under_way_the_driver_is_described() -> None:
    lines = describe(["A"], {"A": sign()}, {"A": 1.0}, [], threading.current_thread(), state)
    assert "test_where_no_call_is_under_way_the_driver_is_described" in "\n".join(lines)


class Board:
    """What a worker publishes, kept."""

    def __init__(self) -> None:
        self.signs: list[Sign] = []
        self.publish = self

    def remote(self, worker: str, sign: Sign) -> None:
        assert worker == "Group rank 3"
        self.signs.append(sign)


class Worker(signs.SignsOfLife):
    _group_name, _rank = "Group", 3

    def block(self, seconds: float) -> None:
        signs.mark("chunk step", 4)
        time.sleep(seconds)

    async def wait(self, seconds: float) -> None:
        await self.inner(seconds)

    async def inner(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@contextmanager
def loop_in_a_thread() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_a_worker_describes_itself_while_its_thread_is_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signs, "PERIOD_S", 0.05)
    monkeypatch.setattr(signs, "_address", lambda: ("node", "10.0.0.1"))
    worker, board = Worker(), Board()
    with loop_in_a_thread() as loop:
        asyncio.run_coroutine_threadsafe(worker.give_signs(board), loop).result()

        loop.call_soon_threadsafe(worker.block, 1.0)
        time.sleep(0.6)
        blocked = board.signs[-1]
        assert "in block: time.sleep(seconds)" in blocked.stack[-1]
        assert blocked.last == "chunk step 4"
        assert 0.3 < blocked.age < 1.0
        time.sleep(0.6)

        waiting = asyncio.run_coroutine_threadsafe(worker.wait(1.0), loop)
        time.sleep(0.6)
        suspended = board.signs[-1]
        assert [line.partition(" in ")[2] for line in suspended.stack] == [
            "wait: await self.inner(seconds)",
            "inner: await asyncio.sleep(seconds)",
        ]
        assert suspended.marks == blocked.marks
        assert suspended.heartbeat > blocked.heartbeat
        waiting.result()


def test_an_end_told_by_another_thread_is_the_reason() -> None:
    """As the watch does while RLinf's runner waits for a worker."""
    release = threading.Event()
    waiter = threading.Thread(target=release.wait, daemon=True)
    waiter.start()
    reason: PhyaiError = StallError("nothing moves")

    def tell_and_wait(guard: shutdown.RayGuard) -> None:
        threading.Timer(0.3, guard.end, (reason,)).start()
        waiter.join(timeout=30)

    try:
        with pytest.raises(StallError) as raised, shutdown.RayGuard() as guard:
            tell_and_wait(guard)
    finally:
        release.set()
    assert raised.value is reason
