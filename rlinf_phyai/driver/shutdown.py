# SPDX-License-Identifier: Apache-2.0
"""Ends a run without leaving processes: on success, failure, Ctrl-C and SIGTERM alike.

RLinf reports a failed worker to the driver with SIGUSR1 and cleans up through Ray's dashboard, which may not run. Here
signals become exceptions in the main thread, and leaving the ``with`` block shuts Ray down and waits until the
processes that Ray started on this node are gone, the simulators' own subprocesses included.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType

import psutil

from rlinf_phyai.errors import PhyaiError

_GRACE_S = 10.0  # for processes to end by themselves after Ray's shutdown
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


class WorkerFailedError(PhyaiError, RuntimeError):
    """A worker raised or died; its traceback is in the output above."""


class Interrupted(BaseException):
    """The run was told to stop by a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


class RayGuard:
    """Context manager around everything that uses Ray in the driver.

    Call :meth:`install` again once RLinf has started its cluster: it and Ray set handlers of their own. Set ``explain``
    to a function that says, while Ray still runs, which calls to workers failed.
    """

    explain: Callable[[], list[str]] = staticmethod(list)

    def __enter__(self) -> "RayGuard":
        self._reason: BaseException | None = None
        self._told: PhyaiError | None = None
        self._patient = self._worker_failed = False
        self._before = {process.pid for process in psutil.Process().children()}
        self._previous = {number: signal.getsignal(number) for number in _INTERRUPTS}
        self.install()
        return self

    def install(self) -> None:
        """Turn SIGINT, SIGTERM and SIGUSR1 into exceptions."""
        for number in (*_INTERRUPTS, signal.SIGUSR1):
            signal.signal(number, self._on_signal)

    def end(self, reason: PhyaiError) -> None:
        """From another thread: raise ``reason`` in the main thread, whatever it waits for."""
        self._told = reason
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1 and self._told is not None:
            self._reason = self._told
        elif number == signal.SIGUSR1:
            self._worker_failed = True
            if self._patient:
                return
            self._reason = _worker_failed()
        else:
            self._reason = Interrupted(number)
        raise self._reason

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        """Inside this block a failed worker raises at the end only, and not if something else did.

        Raises:
            WorkerFailedError: a worker failed meanwhile.
        """
        self._patient = True
        try:
            yield
        finally:
            self._patient = False
        if self._worker_failed:
            raise _worker_failed()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # From here on the end is on its way: a second Ctrl-C must not cut it short, nor workers that fail while dying.
        # SIGUSR1 stays ignored for good: RLinf's threads that still wait for a worker send it when Ray is gone.
        for number in (*_INTERRUPTS, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        try:
            self._explain_failure()
            self._stop_ray()
        finally:
            for number, handler in self._previous.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        if self._reason is not None and error is not self._reason:
            raise self._reason from error  # Ray's compiled code turns what a signal handler raises into a SystemError

    def _explain_failure(self) -> None:
        if isinstance(self._reason, WorkerFailedError):
            with contextlib.suppress(Exception):  # Ray itself may be what broke, and must be shut down in any case
                self._reason.args = ("\n".join([*self._reason.args, *self.explain()]),)

    def _stop_ray(self) -> None:
        import ray

        processes = self._ray_processes()
        for process in processes:  # a stopped one cannot end by itself, and the others would wait for it
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_STOPPED:
                    process.kill()
        if ray.is_initialized():
            ray.shutdown()
        _, alive = psutil.wait_procs(processes, timeout=_GRACE_S)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        _, alive = psutil.wait_procs(alive, timeout=_GRACE_S)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _ray_processes(self) -> list[psutil.Process]:
        """Ray's services that this driver started, and everything below them."""
        import ray

        package = os.path.dirname(ray.__file__)  # their programs lie in it
        found: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(os.getpid()).children():
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    if child.pid not in self._before and any(package in part for part in child.cmdline()):
                        found.extend([*child.children(recursive=True), child])
        return found


def _worker_failed() -> WorkerFailedError:
    return WorkerFailedError("A worker failed; its traceback is in the output above.")
