# SPDX-License-Identifier: Apache-2.0
"""RLinf's own simulator handles and processes, with a simulator that hangs or dies on request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from rlinf.envs.libero import venv

from rlinf_phyai.env.simulators import SimulatorError, WatchedPipe, watched_simulators

TIMEOUT_S = 600.0  # of the first command, in which the process imports LIBERO; the test lowers it afterwards


def make_simulator() -> Callable[[], Any]:
    class Simulator:  # local: it travels to the process by value
        action_space = "actions"

        def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
            import os
            import signal
            import sys

            what = int(action[0])
            if what == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            elif what == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            elif what == 3:
                sys.exit(7)
            return np.zeros(1), 0.5, False, {}

        def close(self) -> None:
            pass

    return Simulator


@pytest.fixture
def simulators() -> Iterator[Any]:
    """Three simulator processes in RLinf's vector environment; closing it must work in whatever state they are."""
    original = venv.ReconfigureSubprocEnvWorker
    with watched_simulators(TIMEOUT_S, "EnvGroup rank 0"):
        env = venv.ReconfigureSubprocEnv([make_simulator() for _ in range(3)])
    assert venv.ReconfigureSubprocEnvWorker is original
    yield env
    env.close()


def step(env: Any, *actions: int) -> Any:
    return env.step(np.array(actions)[:, None])


@pytest.mark.slow
def test_simulators_that_answer_hang_and_die(simulators: Any) -> None:
    _, rewards, _, _ = step(simulators, 0, 0, 0)
    assert rewards.tolist() == [0.5, 0.5, 0.5]

    pipe = simulators.workers[1].parent_remote
    assert isinstance(pipe, WatchedPipe)
    pipe._timeout = 1.0
    started = time.monotonic()
    with pytest.raises(SimulatorError) as error:
        step(simulators, 0, 1, 0)
    assert time.monotonic() - started < 20
    process = simulators.workers[1].process
    assert str(error.value) == (
        f"simulator 1 of EnvGroup rank 0 (process {process.pid}, stopped) did not answer the command 'step' within 1 s and "
        "was killed. If one simulator may need longer for a single command, raise rollout.phyai.simulator_timeout."
    )
    process.join(10)
    assert not process.is_alive()
    with pytest.raises(SimulatorError, match=r"simulator 1 .* was killed by SIGKILL"):
        simulators.workers[1].step(np.zeros(1))  # whoever goes on hears that it is gone

    with pytest.raises(SimulatorError, match=r"simulator 0 of .* was killed by SIGKILL .*, during the command 'step'"):
        simulators.workers[0].step(np.array([2]))
    simulators.workers[2].parent_remote.recv()  # its answer to the step in which the other one hung
    with pytest.raises(SimulatorError, match=r"simulator 2 of .* ended with exit code 7; its own output is above"):
        simulators.workers[2].step(np.array([3]))
