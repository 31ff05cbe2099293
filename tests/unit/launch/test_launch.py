# SPDX-License-Identifier: Apache-2.0
"""Pieces of the launcher that need no Ray."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from omegaconf import OmegaConf

from rlinf_phyai import environment
from rlinf_phyai.driver import launch, program, shutdown
from rlinf_phyai.errors import PhyaiError
from rlinf_phyai.evaluation.config import for_evaluation


def test_relative_config_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert program.absolute_config_path(["--config-path", "mine", "a=b"]) == [
        "--config-path",
        str(tmp_path / "mine"),
        "a=b",
    ]
    assert program.absolute_config_path(["--config-path=mine"]) == [f"--config-path={tmp_path / 'mine'}"]
    for untouched in (["--config-path=pkg://mine"], ["--config-name", "mine"], ["--config-path"], ["path=mine"]):
        assert program.absolute_config_path(untouched) == untouched


def test_paths_of_the_config_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    cfg = OmegaConf.create(
        {
            "runner": {"logger": {"log_path": "logs"}, "ckpt_path": None},
            "actor": {"model": {"model_path": "model"}},
            "rollout": {"model": {"model_path": "missing"}},
        }
    )
    launch.absolute_paths(cfg)
    assert cfg.runner.logger.log_path == str(tmp_path / "logs")
    assert cfg.actor.model.model_path == str(tmp_path / "model")
    assert cfg.rollout.model.model_path == "missing"  # left for the validation to name as the user wrote it
    assert cfg.runner.ckpt_path is None


def test_the_home_folder_in_paths_of_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell expands it in a file, and RLinf does not: it would look for the model in a folder named ~."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    cfg = OmegaConf.create(
        {"runner": {"logger": {"log_path": "~/logs"}}, "actor": {"model": {"model_path": "~/model"}}}
    )
    launch.absolute_paths(cfg)
    assert cfg.runner.logger.log_path == str(tmp_path / "logs")
    assert cfg.actor.model.model_path == str(tmp_path / "model")


def test_environment_defaults_do_not_override() -> None:
    variables = {"MUJOCO_GL": "osmesa"}
    environment.set_defaults(variables)
    assert variables["MUJOCO_GL"] == "osmesa"
    assert variables["JAX_PLATFORMS"] == "cpu"
    variables["PYTHONWARNINGS"] = "error"
    for _ in range(2):
        environment.set_defaults(variables)
        assert variables["PYTHONWARNINGS"] == f"error,{environment.PTRACER}"


def test_the_resolved_config_lies_in_the_log_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = OmegaConf.create({"runner": {"logger": {"log_path": str(tmp_path)}}, "a": 3, "b": "${a}"})
    launch.write_config(cfg)
    assert OmegaConf.load(tmp_path / "config.yaml") == OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))
    assert capsys.readouterr().out == f"[rlinf-phyai] config: {tmp_path / 'config.yaml'}\n"


def test_a_step_is_a_table_or_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from rlinf_phyai.driver import runner

    made = object.__new__(runner.PhyaiRunner)
    made.log_queue = queue.Queue()
    made.metric_logger = SimpleNamespace(log_path="logs")
    metrics = {"time/step": 76.52, "env/success_once": 0.25, "train/actor/unknown": 3.0}
    made.print_metrics_table_async(0, 2, 0.0, metrics)
    function, arguments = made.log_queue.get()
    assert function.__name__ == "print_metrics_table"  # RLinf's
    assert arguments[3] is metrics
    monkeypatch.setenv(runner.STEP_TABLE, "0")
    made.print_metrics_table_async(0, 2, 0.0, metrics)
    function, arguments = made.log_queue.get()
    function(*arguments)
    assert capsys.readouterr().out == "[rlinf-phyai] step 1 of 2: 76.5 s, success 0.25\n"


def test_own_errors_become_messages(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(cfg: object) -> None:
        raise PhyaiError("the reason")

    with pytest.raises(SystemExit) as exit_:
        program.run_as_program(refuse, OmegaConf.create({"a": 1}))
    assert exit_.value.code == 1
    assert "[rlinf-phyai] stopped: the reason" in capsys.readouterr().out


def test_evaluation_takes_the_actors_model() -> None:
    cfg = OmegaConf.create(
        {
            "runner": {"task_type": "embodied"},
            "actor": {
                "model": {
                    "model_path": "a",
                    "num_action_chunks": 5,
                    "openpi": {"chunk": "${actor.model.num_action_chunks}"},
                }
            },
            "rollout": {"model": {"model_path": "b"}},
        }
    )
    for_evaluation(cfg)
    assert cfg.runner.task_type == "embodied_eval"
    assert cfg.runner.only_eval
    assert OmegaConf.to_container(cfg.rollout.model, resolve=True) == {
        "model_path": "b",
        "num_action_chunks": 5,
        "openpi": {"chunk": 5},
    }


@pytest.mark.parametrize(
    "number, error",
    [
        (signal.SIGINT, shutdown.Interrupted),
        (signal.SIGTERM, shutdown.Interrupted),
        (signal.SIGUSR1, shutdown.WorkerFailedError),
    ],
)
def test_signals_become_exceptions_while_waiting(number: signal.Signals, error: type[BaseException]) -> None:
    """Also while the main thread waits for another one, as RLinf's runner does; and handlers come back afterwards."""
    before = signal.getsignal(number)
    release = threading.Event()
    waiter = threading.Thread(target=release.wait, daemon=True)
    waiter.start()
    threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
    started = time.monotonic()
    try:
        with pytest.raises(error), shutdown.RayGuard():
            waiter.join(timeout=30)
    finally:
        release.set()
    assert time.monotonic() - started < 15
    assert signal.getsignal(number) is (signal.SIG_IGN if number == signal.SIGUSR1 else before)


def test_a_signals_reason_wins_over_what_compiled_code_makes_of_it() -> None:
    def compiled() -> None:
        try:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(5)
        except BaseException as error:
            raise SystemError("returned a result with an exception set") from error

    with pytest.raises(shutdown.WorkerFailedError), shutdown.RayGuard():
        compiled()


@pytest.mark.parametrize("better", [None, PhyaiError("the reason")])
def test_a_patient_guard_lets_a_better_reason_through(better: PhyaiError | None) -> None:
    """A worker's failure waits until the workers were asked, and is not forgotten when they tell nothing."""
    reached = []

    def ask(guard: shutdown.RayGuard) -> None:
        with guard.patient():
            os.kill(os.getpid(), signal.SIGUSR1)
            reached.append("after the failure")
            if better:
                raise better
        reached.append("after the block")

    with pytest.raises(PhyaiError) as raised, shutdown.RayGuard() as guard:
        ask(guard)
    assert reached == ["after the failure"]
    assert raised.value is better if better else isinstance(raised.value, shutdown.WorkerFailedError)


def test_rays_processes_are_told_from_others() -> None:
    """A child that has nothing to do with Ray is none of the guard's business."""
    with shutdown.RayGuard() as guard:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        assert guard._ray_processes() == []
    assert child.poll() is None
    child.kill()
    child.wait()


def test_a_stopped_process_of_rays_is_killed_without_waiting_for_it() -> None:
    import ray

    with shutdown.RayGuard():
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", os.path.dirname(ray.__file__)])
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)  # until it is stopped
        started = time.monotonic()
    assert not psutil.pid_exists(child.pid)  # the guard waited for it
    assert time.monotonic() - started < shutdown._GRACE_S


def test_start_progress_reports_each_group() -> None:
    from rlinf_phyai.driver.runner import StartProgress

    class Handle:
        finished = False

        def done(self) -> bool:
            return self.finished

    class Group:
        def __init__(self) -> None:
            self.handle = Handle()

        def init_worker(self) -> Handle:
            return self.handle

    quick, slow = Group(), Group()
    lines: list[str] = []
    with StartProgress({"quick": quick, "slow": slow}, every=0.3, write=lines.append):
        assert quick.init_worker() is quick.handle
        assert slow.init_worker() is slow.handle
        quick.handle.finished = True
        time.sleep(1.2)
        slow.handle.finished = True
    assert lines[0].startswith("[rlinf-phyai] quick workers ready")
    assert any("waiting for slow" in line for line in lines)
    assert lines[-1].startswith("[rlinf-phyai] slow workers ready")
    assert quick.init_worker.__self__ is quick  # type: ignore[attr-defined]
