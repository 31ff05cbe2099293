# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run on disk: written under another name until they are whole, and looked at before they are read.

RLinf writes a checkpoint in place, file after file, over minutes at full size. A run that ends meanwhile (disk full, a
worker that dies, Ctrl-C) would leave a folder that looks like a checkpoint and is none.

Layout, all RLinf's: ``<log_path>/<experiment>/checkpoints/global_step_<N>/actor/`` with ``dcp_checkpoint`` (model,
optimizer and scheduler, in shards) and ``model_state_dict/full_weights.pt`` (the model alone).
"""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlinf_phyai.errors import CheckpointError

PARTIAL = ".partial"
"""Suffix of the folder while it is written."""
_PROBE_BYTES = 1_000_000


def folder_of_step(log_path: str | Path, experiment: str, step: int) -> Path:
    """Where RLinf keeps the checkpoint of a training step."""
    return Path(log_path) / experiment / "checkpoints" / f"global_step_{step}"


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """Write a checkpoint: yields a folder beside ``folder`` that gets its name once it is whole, or is removed.

    Raises:
        CheckpointError: the block ended without an error and yet parts are missing; ``folder`` is as it was.
    """
    partial = folder.with_name(folder.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "actor").mkdir(parents=True)
    try:
        yield partial
        missing = missing_parts(partial / "actor")
        if missing:
            raise CheckpointError(
                f"the checkpoint {folder} was saved and is not whole: {'; '.join(missing)}. Actors on several nodes need a "
                "runner.logger.log_path that all of them share"
            )
        _replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _replace(new: Path, folder: Path) -> None:
    """Rename ``new`` to ``folder``; an older checkpoint of that name goes when the new one is there."""
    old = folder.with_name(f"{folder.name}.old")
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(folder, old)
    os.rename(new, folder)
    shutil.rmtree(old, ignore_errors=True)


def missing_parts(actor: Path) -> list[str]:
    """What a checkpoint folder ``.../actor`` lacks to be resumed from; empty for a whole one. Reads no weights.

    Judged by content, so that checkpoints of RLinf's own program are accepted too.
    """
    shards = actor / "dcp_checkpoint"
    problems = _missing_shards(shards if shards.is_dir() else actor)
    weights = actor / "model_state_dict" / "full_weights.pt"
    if weights.parent.is_dir() and not (weights.is_file() and zipfile.is_zipfile(weights)):
        problems.append(f"{weights} is {'cut off' if weights.is_file() else 'missing'}")
    return problems


def _missing_shards(folder: Path) -> list[str]:
    index = folder / ".metadata"
    if not index.is_file():
        return [f"{index} is missing, which is written last"]
    try:
        sizes = _shard_sizes(folder)
    except Exception as error:  # a pickle that was cut off may raise anything
        return [f"{index} cannot be read ({type(error).__name__}: {error})"]
    problems = []
    for name, size in sorted(sizes.items()):
        file = folder / name
        found = file.stat().st_size if file.is_file() else None
        if found is None:
            problems.append(f"{file} is missing")
        elif found < size:
            problems.append(f"{file} has {found} of at least {size} bytes")
    return problems


def _shard_sizes(folder: Path) -> dict[str, int]:
    """The bytes that the index of a distributed checkpoint says its files have at least."""
    from torch.distributed.checkpoint import FileSystemReader

    stored: dict[Any, Any] = FileSystemReader(str(folder)).read_metadata().storage_data or {}
    sizes: dict[str, int] = {}
    for part in stored.values():
        sizes[part.relative_path] = max(sizes.get(part.relative_path, 0), part.offset + part.length)
    return sizes


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Around code that writes to ``folder``: says so where the disk is why it failed.

    torch's writers answer to a full disk with an internal error ("unexpected pos 704 vs 598").

    Raises:
        CheckpointError: instead of the block's error, if a file of 1 MB cannot be written there either.
    """
    try:
        yield
    except BaseException as error:  # torch's CheckpointException is no Exception
        reason = _unwritable(folder)
        if reason is None:
            raise
        free = shutil.disk_usage(folder).free
        raise CheckpointError(
            f"the checkpoint cannot be written to {folder}: {reason} ({free / 1e9:.3g} GB free). Make room and continue from "
            "the checkpoint before"
        ) from error


def _unwritable(folder: Path) -> str | None:
    probe = folder / ".probe"
    try:
        with probe.open("wb") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    finally:
        probe.unlink(missing_ok=True)
    return None


def size(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
