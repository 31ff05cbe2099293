# SPDX-License-Identifier: Apache-2.0
"""Ray starts, a worker runs what it should, and there is room in memory and on disk."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rlinf_phyai.doctor.finding import Broken, Check, Doubtful
from rlinf_phyai.doctor.software import OVERLAY_FIX

SHARED_MEMORY = Path("/dev/shm")
LOW_SHARED_MEMORY = 2 * 2**30
LOW_DISK = 30 * 10**9
_TIMEOUT = 180


def ray_and_worker() -> str:
    """In a process of its own (:mod:`.ray_probe`): it can hang, and it must not touch a running cluster."""
    command = [sys.executable, "-m", "rlinf_phyai.doctor.ray_probe"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired as error:
        raise Broken(f"Ray did not start and run one worker within {_TIMEOUT} s", _RAY_FIX) from error
    report = _last_json(result.stdout)
    if report is None:
        lines = result.stderr.strip().splitlines()
        raise Broken(f"Ray does not start: {lines[-1][:300] if lines else f'exit code {result.returncode}'}", _RAY_FIX)
    if report["overlay"]["problem"]:
        raise Broken(f"inside a worker: {report['overlay']['problem']}", OVERLAY_FIX)
    if not report["registered"]:
        cause = (report["failure"] or "no reason given").strip().splitlines()[-1]
        raise Broken(f"the plugin does not register inside a worker: {cause}", "repair what the message names")
    return f"ray {report['ray']}; a worker registers the plugin and has {report['overlay']['found']}"


_RAY_FIX = "look into /tmp/ray/session_latest/logs; check free memory, RAY_TMPDIR (a short path) and the host name"


def _last_json(text: str) -> dict[str, Any] | None:
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    return None


def shared_memory() -> str:
    """Ray's object store lies there, and NCCL's buffers between the GPUs of a node."""
    if not SHARED_MEMORY.is_dir():
        raise Broken(f"{SHARED_MEMORY} does not exist", "mount a tmpfs there")
    usage = shutil.disk_usage(SHARED_MEMORY)
    text = f"{usage.free / 2**30:.1f} GiB free of {usage.total / 2**30:.1f} GiB in {SHARED_MEMORY}"
    if usage.free < LOW_SHARED_MEMORY:
        raise Doubtful(
            f"{text}: Ray falls back to slow files and NCCL may fail", "in a container: --shm-size=16g, or --ipc=host"
        )
    return text


def disk() -> str:
    """The current folder, where logs and checkpoints go, and Ray's folder for temporary files."""
    found = []
    for name, folder in (
        ("here", Path.cwd()),
        ("temporary files", Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())),
    ):
        free = shutil.disk_usage(folder).free
        found.append(f"{free / 1e9:.0f} GB free {name} ({folder})")
        if free < LOW_DISK:
            raise Doubtful(
                f"{found[-1]}: a full-size checkpoint of a run takes about 12 GB",
                "free some space, start the run from another folder (LOG_ROOT), or set RAY_TMPDIR",
            )
    return ", ".join(found)


CHECKS = (
    Check("shared memory", shared_memory),
    Check("disk", disk, "start from a folder that exists"),
    Check("Ray and a worker", ray_and_worker, _RAY_FIX),
)
