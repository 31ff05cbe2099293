# SPDX-License-Identifier: Apache-2.0
"""One run of the training program in a process of its own: started, watched, ended in time, read back.

Runs at the same time must not meet. RLinf connects to any Ray that it finds on the machine; ``RAY_ADDRESS=local`` makes a
Ray of its own instead, and ``RAY_TMPDIR`` keeps its sockets and its record of the last cluster apart. Ray chooses free
ports by itself. A run is bound to a GPU by RLinf's placement: RLinf counts all GPUs of the machine and sets
``CUDA_VISIBLE_DEVICES`` of its workers itself, so that variable would bind nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from rlinf_phyai.run_summary import Series, read_scalars

_REPOSITORY = Path(__file__).resolve().parents[1]
CONFIG_DIR = _REPOSITORY / "examples" / "embodiment" / "config"
_GRACE_S = 45.0  # for the program to shut Ray down after the time limit

# Lines of the program that end a phase of its start.
_MILESTONES = {
    "ray_started": re.compile(r"is running on a cluster with"),
    "workers_confirmed": re.compile(r"every worker confirmed"),
    "rollout_ready": re.compile(r"\] rollout workers ready"),
    "env_ready": re.compile(r"\] env workers ready"),
    "actor_ready": re.compile(r"\] actor workers ready"),
}


@dataclass
class TrainingRun:
    """What a run left. ``status`` is ``ok``, ``failed`` or ``time limit``; what was measured until then stays."""

    backend: str
    status: str
    exit_code: int | None
    seconds: float
    milestones: dict[str, float] = field(default_factory=dict)  # seconds after the launch
    gpu: int | None = None
    gpu_memory_peak_gib: float | None = None
    scalars: dict[str, Series] = field(default_factory=dict)
    last_lines: list[str] = field(default_factory=list)  # of the output, where the run did not end well

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def train(
    backend: str, config: str, overrides: Sequence[str], log_dir: Path, timeout_s: float, gpu: int | None = None
) -> TrainingRun:
    """Trains ``config`` with a rollout backend and waits for the end.

    Args:
        overrides: Hydra overrides, after those that name backend and log folder.
        log_dir: for ``run.log`` and TensorBoard's events; emptied first.
        timeout_s: then the run is interrupted, as by Ctrl-C.
        gpu: where all workers go; None leaves the config's placement.
    """
    shutil.rmtree(log_dir, ignore_errors=True)
    log_dir.mkdir(parents=True)
    given = [f"rollout.rollout_backend={backend}", f"runner.logger.log_path={log_dir}", *overrides]
    if gpu is not None:  # the config's key names three components at once and cannot be overridden one by one
        everything = ",".join(f"{component}:{gpu}" for component in ("actor", "env", "rollout"))
        given += ["~cluster.component_placement", f"+cluster.component_placement={{{everything}}}"]
    command = [
        sys.executable,
        "-m",
        "rlinf_phyai.train",
        "--config-path",
        str(CONFIG_DIR),
        "--config-name",
        config,
        *given,
    ]
    ray_folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # short: Ray's socket paths have at most 107 characters
    python_path = f"{_REPOSITORY}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    variables = {"RAY_ADDRESS": "local", "RAY_TMPDIR": ray_folder, "PYTHONUNBUFFERED": "1", "PYTHONPATH": python_path}
    memory = _MemoryWatch(gpu)
    started = time.time()
    process = subprocess.Popen(
        command,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    reader = _Reader(process.stdout, log_dir / "run.log", backend, started)
    try:
        in_time = _wait(process, timeout_s)
    finally:
        if process.poll() is None:  # Ctrl-C of the benchmark itself
            _end(process)
        reader.join(timeout=10)
        shutil.rmtree(ray_folder, ignore_errors=True)
    seconds = time.time() - started
    status = "time limit" if not in_time else "ok" if process.returncode == 0 else "failed"
    try:
        scalars, first_step = read_scalars(log_dir), _first_step(log_dir)
    except FileNotFoundError:  # it ended before the first step
        scalars, first_step = {}, None
    milestones = dict(reader.milestones)
    if first_step is not None:
        milestones["first_step"] = first_step - started
    return TrainingRun(
        backend, status, process.returncode, seconds, milestones, gpu, memory.stop(), scalars,
        [] if status == "ok" else reader.tail,
    )  # fmt: skip


def _first_step(log_dir: Path) -> float | None:
    """Clock time at which the first training step began: its event, less its duration."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    file = min(log_dir.rglob("events.out.tfevents.*"), key=lambda file: file.stat().st_mtime)
    events = EventAccumulator(str(file), size_guidance={"scalars": 0})
    events.Reload()
    if "time/step" not in events.Tags()["scalars"]:
        return None
    first = events.Scalars("time/step")[0]
    return float(first.wall_time - first.value)


def _wait(process: subprocess.Popen[str], timeout_s: float) -> bool:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        _end(process)
        return False
    return True


def _end(process: subprocess.Popen[str]) -> None:
    """Interrupt; what lives after a grace period is killed, with everything below it."""
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in below:
        if child.is_running():
            child.kill()


class _Reader(threading.Thread):
    """Writes the program's output to a file, notes when milestones pass, and repeats our own lines on the console."""

    def __init__(self, stream: IO[str], file: Path, name: str, started: float) -> None:
        super().__init__(daemon=True)
        self._stream, self._file, self._prefix, self._launched = stream, file, name, started
        self.milestones: dict[str, float] = {}
        self.tail: list[str] = []
        self.start()

    def run(self) -> None:
        with self._file.open("w", buffering=1) as file:
            for line in self._stream:
                file.write(line)
                self.tail = [*self.tail[-39:], line.rstrip()]
                now = time.time() - self._launched
                for name, pattern in _MILESTONES.items():
                    if name not in self.milestones and pattern.search(line):
                        self.milestones[name] = now
                if line.startswith("[rlinf-phyai]"):
                    print(f"{self._prefix} {now:6.1f} s  {line.rstrip()}", flush=True)


class _MemoryWatch(threading.Thread):
    """Peak of the memory in use on a GPU (GPU 0 where none is named), by nvidia-smi once a second."""

    def __init__(self, gpu: int | None) -> None:
        super().__init__(daemon=True)
        self._gpu, self._peak = gpu or 0, 0.0
        self._ended = threading.Event()
        if shutil.which("nvidia-smi"):
            self.start()

    def run(self) -> None:
        query = ["nvidia-smi", "-i", str(self._gpu), "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not self._ended.wait(1.0):
            answer = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
            if answer.isdigit():
                self._peak = max(self._peak, int(answer) / 1024)

    def stop(self) -> float | None:
        """GiB; None without nvidia-smi."""
        self._ended.set()
        return self._peak or None
