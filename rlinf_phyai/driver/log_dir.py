# SPDX-License-Identifier: Apache-2.0
"""One run, one log folder: two runs in one folder would mix their curves and overwrite each other's checkpoints."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlinf_phyai.errors import PhyaiError

_KEY = "runner.logger.log_path"
_LOCK = "run.lock"


@contextmanager
def claimed(log_path: str | Path) -> Iterator[None]:
    """Hold the log folder for the length of the block; it is made where it does not exist.

    The lock ends with the process, so a run that was killed does not bar its successor.

    Raises:
        PhyaiError: nothing can be written there, or another run holds it.
    """
    folder = Path(log_path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / _LOCK).open("a+")
    except OSError as error:
        raise PhyaiError(
            f"{_KEY} is {folder}, where nothing can be written ({error.strerror}); choose a folder that can be written to"
        ) from error
    with lock:
        _lock(lock.fileno(), folder)
        os.ftruncate(lock.fileno(), 0)
        with suppress(OSError):  # a full disk: the lock holds without its owner's name
            os.write(lock.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = (folder / _LOCK).read_text().strip() or "another process"
        raise PhyaiError(
            f"{_KEY} is {folder}, where another run is writing ({owner}); give this run a folder of its own"
        ) from None
    except OSError:
        return  # a file system without locks: better unguarded than refused
