# SPDX-License-Identifier: Apache-2.0
"""When a run counts as standing still, without Ray and without waiting."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rlinf_phyai import signs
from rlinf_phyai.calls import Pending
from rlinf_phyai.driver import shutdown, stall
from rlinf_phyai.driver.stall import DEFAULT_S, StallClock, StallError, clock_for
from rlinf_phyai.driver.stall_report import describe
from rlinf_phyai.errors import PhyaiError
from rlinf_phyai.signs import Sign

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

    def next(self, line: str) -> Sign:
        """The next sign with a frame that shows ``line``."""
        deadline, seen = time.monotonic() + 60, len(self.signs)
        while time.monotonic() < deadline:
            for sign in self.signs[seen:]:
                if any(line in one for one in sign.stack):
                    return sign
            time.sleep(0.02)
        pytest.fail(f"no sign with {line!r}; the last one is {self.signs[-1:]}")


class Worker(signs.SignsOfLife):
    _group_name, _rank = "Group", 3

    def block(self, release: threading.Event) -> None:
        signs.mark("chunk step", 4)
        while not release.is_set():
            time.sleep(0.01)

    async def wait(self, release: asyncio.Event) -> None:
        await self.inner(release)

    async def inner(self, release: asyncio.Event) -> None:
        await release.wait()


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[asyncio.AbstractEventLoop]:
    """It runs in a thread of its own, as in a Ray worker, and signs come quickly."""
    monkeypatch.setattr(signs, "PERIOD_S", 0.05)
    monkeypatch.setattr(signs, "_address", lambda: ("node", "10.0.0.1"))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def board(loop: asyncio.AbstractEventLoop) -> Board:
    """Where a worker publishes whose calls run in ``loop``."""
    board = Board()
    asyncio.run_coroutine_threadsafe(Worker().give_signs(board), loop).result()
    return board


def test_a_worker_describes_itself_while_its_thread_is_blocked(loop: asyncio.AbstractEventLoop, board: Board) -> None:
    release = threading.Event()
    loop.call_soon_threadsafe(Worker().block, release)
    first = board.next("in block: time.sleep(0.01)")
    time.sleep(0.2)
    second = board.next("in block: time.sleep(0.01)")
    release.set()
    assert second.last == "chunk step 4"
    assert second.age >= 0.2
    assert second.marks == first.marks
    assert second.heartbeat > first.heartbeat
    assert not second.waits


def test_a_worker_says_where_a_suspended_call_awaits(loop: asyncio.AbstractEventLoop, board: Board) -> None:
    release = asyncio.Event()
    waiting = asyncio.run_coroutine_threadsafe(Worker().wait(release), loop)
    suspended = board.next("in inner: await release.wait()")
    assert "in wait: await self.inner(release)" in suspended.stack[-2]
    assert not suspended.waits
    loop.call_soon_threadsafe(release.set)
    waiting.result()


def test_a_worker_says_that_it_waits_for_another(loop: asyncio.AbstractEventLoop, board: Board) -> None:
    """In what RLinf's channels return, by its two ways to wait."""
    from rlinf.scheduler.collective.async_work import AsyncFuncWork

    message = AsyncFuncWork(lambda: None)
    suspended = asyncio.run_coroutine_threadsafe(message.async_wait(), loop)
    assert board.next("in async_wait: ").waits
    loop.call_soon_threadsafe(message.wait)
    blocked = board.next("in wait: self._done.wait()")
    assert blocked.waits
    assert not any("async_wait" in line for line in blocked.stack)  # the call that runs, not the suspended one
    message._done.set_result(True)
    suspended.result()


class Answers:
    """A board's handle; ``ray.get`` is its own function here, since no Ray runs."""

    def __init__(self) -> None:
        self.read = self
        self.error: Exception | None = None

    def remote(self) -> Answers:
        return self

    def get(self, reference: object, timeout: float) -> dict[str, Sign]:
        if self.error is not None:
            raise self.error
        return {}


class NoCalls:
    def progress(self) -> int:
        return 0

    def pending(self) -> list[Pending]:
        raise ConnectionError("what is under way cannot be asked")


def test_whatever_goes_wrong_in_a_look_the_watch_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch that ended with its own error would leave a hanging run waiting for ever."""
    import ray

    board, said, ended = Answers(), list[str](), list[StallError]()
    monkeypatch.setattr(signs, "PERIOD_S", 0.02)
    monkeypatch.setattr(ray, "get", board.get)
    board.error = ConnectionError("gone")
    watch = stall._Watch(board, ["A"], NoCalls(), 0.5, said.append, ended.append)  # type: ignore[arg-type]
    watch.start()
    time.sleep(0.2)
    board.error = None
    deadline = time.monotonic() + 30
    while not ended and time.monotonic() < deadline:
        time.sleep(0.02)
    watch.stop()
    assert len([line for line in said if "ConnectionError('gone')" in line]) == 1
    (error,) = ended
    assert "what the workers do cannot be told: ConnectionError('what is under way" in str(error)


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
