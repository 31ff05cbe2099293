# SPDX-License-Identifier: Apache-2.0
"""A run in which nothing moves any more is reported, and ended.

A worker that raises or dies ends the run by itself. One that hangs (a deadlock, a kernel that never ends, a collective
whose peer is lost, a stopped process) would leave the driver waiting for ever. So a thread of the driver looks at the
workers' signs of life and at the calls that it made. A call made, a call returned, a mark of any worker is progress; CPU
time is not, since a worker that spins uses it too. Without progress it prints what every worker does, and later ends the
run with that as the reason.

The limits are wide because a healthy run has long phases without a mark: compiling kernels, writing a checkpoint to a slow
disk, starting simulators on a crowded machine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from rlinf_phyai import signs
from rlinf_phyai.calls import CallLog
from rlinf_phyai.driver.stall_report import describe
from rlinf_phyai.errors import PhyaiError
from rlinf_phyai.signs import Board, Sign

OPTION = "rollout.phyai.stall_timeout"
DEFAULT_S = 3600.0
WARN_FRACTION = 1 / 6
_LONGEST_LOOK_S = 3 * signs.PERIOD_S
_ANSWER_S = 10.0  # for the board

Verdict = Literal["moves", "still", "warn", "end"]


class StallError(PhyaiError, RuntimeError):
    """No worker made progress for too long."""


class StallClock:
    """Decides when a run stands still for too long.

    Time counts between two looks only, and at most ``longest_look`` of it: while the driver itself was suspended it saw
    nothing.

    Args:
        end_after: seconds without progress until the end; None: never.
        warn_after: seconds without progress until the warning.
        longest_look: seconds between two looks that are counted at most.
    """

    def __init__(self, end_after: float | None, warn_after: float, longest_look: float = _LONGEST_LOOK_S) -> None:
        self._end_after, self._warn_after, self._longest_look = end_after, warn_after, longest_look
        self._progress: Hashable = object()
        self._looked = float("-inf")
        self._warned = False
        self.still = 0.0
        """Seconds without progress."""

    def look(self, now: float, progress: Hashable) -> Verdict:
        """One look.

        Args:
            now: seconds of any monotonic clock.
            progress: a value that is another one whenever something moved.

        Returns:
            ``moves``, or ``still``; ``warn`` once in every standstill; ``end`` once the limit is reached.
        """
        elapsed, self._looked = min(now - self._looked, self._longest_look), now
        if progress != self._progress:
            self._progress, self.still, self._warned = progress, 0.0, False
            return "moves"
        self.still += elapsed
        if self._end_after is not None and self.still >= self._end_after:
            return "end"
        if self.still >= self._warn_after and not self._warned:
            self._warned = True
            return "warn"
        return "still"


def clock_for(timeout: float | None) -> StallClock:
    """The clock for a value of ``rollout.phyai.stall_timeout``; with None it warns as with the default."""
    return StallClock(timeout, (DEFAULT_S if timeout is None else timeout) * WARN_FRACTION)


class _Watch:
    """The thread that looks."""

    def __init__(
        self,
        board: Any,
        workers: Sequence[str],
        calls: CallLog,
        timeout: float | None,
        say: Callable[[str], None],
        end: Callable[[StallError], None],
    ) -> None:
        self._board, self._workers, self._calls = board, workers, calls
        self._timeout, self._say, self._end = timeout, say, end
        self._clock = clock_for(timeout)
        self._heard: dict[str, tuple[int, float]] = {}  # the latest heartbeat, and when it was first seen
        self._latest: dict[str, Sign] = {}
        self._blind = False
        self._driver = threading.current_thread()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(signs.PERIOD_S):
            if not self._read():
                continue
            now = time.monotonic()
            for worker, sign in self._latest.items():
                if worker not in self._heard or self._heard[worker][0] != sign.heartbeat:
                    self._heard[worker] = (sign.heartbeat, now)
            progress = (self._calls.progress(), frozenset((name, sign.marks) for name, sign in self._latest.items()))
            verdict = self._clock.look(now, progress)
            if verdict in ("warn", "end"):
                report = self._report(now)
                if verdict == "end":
                    self._end(StallError(report))
                    return
                self._say(f"warning: {report}")

    def _read(self) -> bool:
        """Whether the board answers. Where it does not, nothing is known, and no time counts.

        Ray starts a board that died again. The new one is empty, so what the old one said is kept here.
        """
        import ray

        try:
            self._latest |= ray.get(self._board.read.remote(), timeout=_ANSWER_S)
        except Exception as error:  # whatever it is, the next look may succeed
            if not self._blind and not self._stop.is_set():
                self._say(f"warning: whether the workers make progress cannot be seen at the moment: {error!r}")
            self._blind = True
            return False
        self._blind = False
        return True

    def _report(self, now: float) -> str:
        still = self._clock.still
        if self._timeout is None:
            outlook = f"The run goes on waiting ({OPTION}: null)."
        elif still >= self._timeout:
            outlook = f"The run was ended ({OPTION}: {self._timeout:g})."
        else:
            outlook = f"At {self._timeout:g} s the run ends ({OPTION})."
        silent = {worker: now - self._heard[worker][1] if worker in self._heard else None for worker in self._workers}
        try:
            lines = describe(self._workers, self._latest, silent, self._calls.pending(), self._driver)
        except Exception as error:  # a description that fails must not keep a hanging run alive
            lines = [f"- what the workers do cannot be told: {error!r}"]
        return "\n".join([f"no worker made progress for {still:.0f} s. {outlook}", *lines])


@contextmanager
def watched(
    cfg: DictConfig,
    groups: Mapping[str, Any],
    calls: CallLog,
    say: Callable[[str], None],
    end: Callable[[StallError], None],
) -> Iterator[None]:
    """While the block runs, the workers of these launched RLinf groups are watched.

    Args:
        cfg: of the run; ``rollout.phyai.stall_timeout`` is read.
        groups: by component; their workers are :class:`~rlinf_phyai.signs.SignsOfLife`.
        calls: the driver's calls to them.
        say: prints a warning.
        end: ends the run for this reason; called from another thread, once at most.
    """
    import ray

    timeout = OmegaConf.select(cfg, OPTION, default=DEFAULT_S)
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    board = ray.remote(Board).options(num_cpus=0, max_restarts=-1, scheduling_strategy=here).remote()
    workers = [
        f"{group.worker_group_name} rank {info.rank}" for group in groups.values() for info in group.worker_info_list
    ]
    for handle in [group.give_signs(board) for group in groups.values()]:
        handle.wait()
    watch = _Watch(board, workers, calls, None if timeout is None else float(timeout), say, end)
    watch.start()
    try:
        yield
    finally:
        watch.stop()
