# SPDX-License-Identifier: Apache-2.0
"""What other packages say at their start is left out by its exact words, in a process and in those it spawns; all else is shown."""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf_phyai import notices
from rlinf_phyai.environment import PTRACER

IMPORTS = """
import logging, warnings
logging.basicConfig(level=logging.INFO)
warnings.simplefilter("default")
{before}
import gym
import robosuite.macros
import OpenGL.acceleratesupport
logging.info("Loaded norm stats from /somewhere")
logging.info("another line of the root logger")
logging.getLogger("robosuite_logs").warning("a real warning of robosuite")
logging.getLogger("OpenGL.acceleratesupport").info("something else")
warnings.warn("a real warning", DeprecationWarning)
"""
KNOWN = (
    notices.GYM,
    "No private macro file found!",
    "It is recommended to use a private macro file",
    "To setup, run",
    "The 'warn' method is deprecated",
    "No OpenGL_accelerate module loaded",
    "Loaded norm stats from",
)
REAL = ("another line of the root logger", "a real warning of robosuite", "something else", "a real warning")


def said(before: str) -> str:
    command = [sys.executable, "-c", IMPORTS.format(before=before)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"MUJOCO_GL": "egl"})
    return result.stdout + result.stderr


def test_known_notices_are_left_out_and_nothing_else() -> None:
    unfiltered = said("")
    for text in KNOWN + REAL:
        assert text in unfiltered, "the package says this no longer: take it off the list"
    filtered = said("from rlinf_phyai import notices; notices.leave_out(); notices.leave_out()")
    assert [text for text in KNOWN if text in filtered] == []
    assert [text for text in REAL if text not in filtered] == []


@pytest.mark.parametrize("name", notices.LOGGED)
def test_a_line_whose_arguments_do_not_fit_is_no_error_of_its_caller(name: str) -> None:
    """logging reports it on stderr and goes on; so must it be where a filter reads the line first."""
    code = (
        "import logging; from rlinf_phyai import notices; notices.leave_out(); logging.basicConfig()\n"
        f"logging.getLogger(None if {name!r} == 'root' else {name!r}).warning('%d steps', 'many'); print('went on')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout == "went on\n"
    assert "--- Logging error ---" in result.stderr


@pytest.mark.parametrize("level, shown", [("INFO", True), ("WARNING", False)])
def test_placements_keep_to_rlinfs_level(level: str, shown: bool) -> None:
    """The loggers of RLinf's placement strategies set INFO themselves."""
    code = (
        "from rlinf_phyai import notices; notices.leave_out()\n"
        "from rlinf.scheduler import NodePlacementStrategy\n"
        "logger = NodePlacementStrategy([0])._logger; logger.info('placed'); logger.warning('doubtful')"
    )
    environment = os.environ | {notices.RLINF_LEVEL: level}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    said = result.stdout + result.stderr
    assert ("placed" in said) == shown
    assert "doubtful" in said


def _import_gym() -> None:
    import gym  # noqa: F401


def test_a_spawned_process_leaves_them_out_before_its_target_is_imported(capfd: pytest.CaptureFixture[str]) -> None:
    for target in (_import_gym, functools.partial(notices.run, notices.LeaveOut(), _import_gym)):
        process = multiprocessing.get_context("spawn").Process(target=target)
        process.start()
        process.join()
        assert process.exitcode == 0
        error = capfd.readouterr().err
        assert (notices.GYM in error) == (target is _import_gym)
    stream = pickle.dumps((notices.run, (notices.LeaveOut(), _import_gym)))
    assert stream.index(b"leave_out") < stream.index(b"_import_gym")


def test_rlinfs_simulators_start_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The processes of RLinf's LIBERO environments, built as a worker builds them."""
    from rlinf.envs.libero import venv

    from rlinf_phyai.env.simulators import watched_simulators

    capfd.readouterr()  # this process has just imported gym itself
    with watched_simulators(60.0, "test"):
        simulator = venv.ReconfigureSubprocEnvWorker(functools.partial(_environment, str(tmp_path / "started")))
    try:
        simulator.process.join(60)
        assert (tmp_path / "started").exists()
    finally:
        simulator.process.kill()
    assert notices.GYM not in capfd.readouterr().err


def _environment(mark: str) -> None:
    Path(mark).touch()
    sys.exit(0)


def test_the_warning_about_debuggers_is_filtered_by_the_interpreter() -> None:
    code = "import warnings; warnings.warn('prctl(PR_SET_PTRACER, ANY) failed!'); warnings.warn('another')"
    environment = os.environ | {"PYTHONWARNINGS": PTRACER}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert "prctl" not in result.stderr.replace(code, "")
    assert "UserWarning: another" in result.stderr
