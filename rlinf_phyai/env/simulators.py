# SPDX-License-Identifier: Apache-2.0
"""Simulator processes that must answer.

RLinf runs each simulator in a process of its own, sends it one command at a time and waits for the answer without a
limit: a simulator that hangs in its renderer stops the whole run without a word. Here the wait has a limit, and an
answer that will not come is an error that names the process, the command and what became of it.

One command is building a scene, a reset or a single step of one simulator: its duration does not grow with the number
of environments or the length of an episode.
"""

from __future__ import annotations

import functools
import itertools
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, ClassVar

import psutil
from rlinf.envs.libero import venv

from rlinf_phyai import notices
from rlinf_phyai.errors import PhyaiError
from rlinf_phyai.signs import mark

OPTION = "rollout.phyai.simulator_timeout"
_EXIT_CODE_WAIT_S = 2.0  # from the end of a pipe to the end of its process


class SimulatorError(PhyaiError, EOFError):
    """A simulator process died or does not answer. (An ``EOFError``, as RLinf's clean-up expects of a closed pipe.)"""


class WatchedPipe:
    """The parent's end of the pipe to one simulator process; ``recv`` gives up after ``timeout`` seconds.

    Args:
        connection: RLinf's pipe.
        owner: RLinf's handle of the simulator; its ``process`` is read when something is wrong.
        name: for messages.
        timeout: seconds from a command to its answer.
    """

    def __init__(self, connection: Connection, owner: Any, name: str, timeout: float) -> None:
        self._connection = connection
        self._owner = owner
        self._name = name
        self._timeout = timeout
        self._command, self._sent = "start", time.monotonic()

    def send(self, message: Any) -> None:
        """Send ``[command, data]``.

        Raises:
            SimulatorError: the process is gone.
        """
        self._command, self._sent = str(message[0]), time.monotonic()
        try:
            self._connection.send(message)
        except OSError as error:
            raise self._died() from error

    def recv(self) -> Any:
        """The answer to the last command.

        Raises:
            SimulatorError: the process is gone, or silent for too long; then it is killed.
        """
        left = self._timeout - (time.monotonic() - self._sent)
        try:
            if not self._connection.poll(max(left, 0.0)):
                raise self._hangs()
            answer = self._connection.recv()
        except SimulatorError:
            raise
        except (EOFError, OSError) as error:
            raise self._died() from error
        mark(self._command, "of", self._name)
        return answer

    def close(self) -> None:
        self._connection.close()

    def fileno(self) -> int:
        return self._connection.fileno()

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._connection,)  # the simulator's process gets the pipe and closes it

    def _hangs(self) -> SimulatorError:
        process = self._owner.process
        try:
            status = psutil.Process(process.pid).status()
        except psutil.NoSuchProcess:
            return self._died()
        process.kill()  # also ends a stopped one; RLinf's clean-up would wait for it
        return SimulatorError(
            f"{self._name} (process {process.pid}, {status}) did not answer the command {self._command!r} within "
            f"{self._timeout:g} s and was killed. If one simulator may need longer for a single command, raise {OPTION}."
        )

    def _died(self) -> SimulatorError:
        process = self._owner.process
        process.join(_EXIT_CODE_WAIT_S)
        code = process.exitcode
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                how += " (by hand, or by the kernel when memory ran out: see dmesg)"
        else:
            how = f"ended with exit code {code}; its own output is above"
        return SimulatorError(f"{self._name} (process {process.pid}) {how}, during the command {self._command!r}.")


def _itself(connection: Connection) -> Connection:
    return connection


class WatchedSimulator(venv.ReconfigureSubprocEnvWorker):
    """RLinf's handle of one simulator process, its pipe watched from the first command on."""

    timeout: ClassVar[float]
    owner_name: ClassVar[str]
    numbers: ClassVar[Iterator[int]]

    @property
    def parent_remote(self) -> WatchedPipe:
        """The pipe to the process."""
        return self._pipe

    @parent_remote.setter
    def parent_remote(self, connection: Connection) -> None:
        name = f"simulator {next(self.numbers)} of {self.owner_name}"
        self._pipe = WatchedPipe(connection, self, name, self.timeout)

    @property
    def process(self) -> Any:
        """The process."""
        return self._process

    @process.setter
    def process(self, process: Any) -> None:
        # Not started yet: RLinf assigns it first. The new process unpickles this from left to right.
        process._target = functools.partial(notices.run, notices.LeaveOut(), process._target)
        self._process = process


@contextmanager
def watched_simulators(timeout: float, owner: str) -> Iterator[None]:
    """Simulators that RLinf's LIBERO environments start inside this block are :class:`WatchedSimulator`.

    Args:
        timeout: seconds for one command of one simulator.
        owner: the worker's name for messages.
    """
    numbers = itertools.count()
    watched = type(
        "WatchedSimulator", (WatchedSimulator,), {"timeout": timeout, "owner_name": owner, "numbers": numbers}
    )
    original = venv.ReconfigureSubprocEnvWorker
    venv.ReconfigureSubprocEnvWorker = watched  # RLinf looks the class up by this name for every simulator
    try:
        yield
    finally:
        venv.ReconfigureSubprocEnvWorker = original
