# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is whole or it is not there; what is not whole is said."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

from rlinf_phyai import checkpoints
from rlinf_phyai.errors import CheckpointError


def save(actor: Path) -> None:
    """What RLinf's actor writes, with its own calls of torch; two files of shards, as two ranks would leave."""
    writer = dcp.FileSystemWriter(actor / "dcp_checkpoint", thread_count=2, single_file_per_rank=False)
    state = {name: torch.full((64, 64), float(n)) for n, name in enumerate(("first", "second"))}
    dcp.save(state, storage_writer=writer, no_dist=True)
    weights = actor / "model_state_dict" / "full_weights.pt"
    weights.parent.mkdir()
    torch.save(state, weights)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    folder = checkpoints.folder_of_step(tmp_path, "experiment", 3)
    assert folder == tmp_path / "experiment" / "checkpoints" / "global_step_3"
    with checkpoints.written_whole(folder) as partial:
        assert partial.name == "global_step_3.partial"
        assert not folder.exists()
        save(partial / "actor")
    return folder


def test_a_whole_checkpoint_gets_its_name(whole: Path) -> None:
    assert checkpoints.missing_parts(whole / "actor") == []
    assert [folder.name for folder in whole.parent.iterdir()] == ["global_step_3"]
    assert checkpoints.size(whole) > 4 * 64 * 64 * 4


def test_checkpoints_whose_shards_lie_in_the_folder_itself(whole: Path) -> None:
    """RLinf loads these too."""
    assert checkpoints.missing_parts(whole / "actor" / "dcp_checkpoint") == []


@pytest.mark.parametrize(
    "file, damage, said",
    [
        ("dcp_checkpoint/.metadata", "remove", ".metadata is missing, which is written last"),
        ("dcp_checkpoint/.metadata", "cut", ".metadata cannot be read"),
        ("dcp_checkpoint/__0_1.distcp", "remove", "__0_1.distcp is missing"),
        ("dcp_checkpoint/__0_0.distcp", "cut", "__0_0.distcp has 1000 of at least 1"),
        ("model_state_dict/full_weights.pt", "remove", "full_weights.pt is missing"),
        ("model_state_dict/full_weights.pt", "cut", "full_weights.pt is cut off"),
    ],
)
def test_every_missing_part_is_named(whole: Path, file: str, damage: str, said: str) -> None:
    path = whole / "actor" / file
    path.unlink() if damage == "remove" else path.write_bytes(
        path.read_bytes()[: 1000 if path.stat().st_size > 1500 else 20]
    )
    (problem,) = checkpoints.missing_parts(whole / "actor")
    assert said in problem


def test_an_error_leaves_the_older_checkpoint_alone(whole: Path) -> None:
    def full_disk(actor: Path) -> None:
        raise OSError(28, "No space left on device")

    def rank_on_another_disk(actor: Path) -> None:
        (actor / "model_state_dict" / "full_weights.pt").unlink()

    def save_again(then: Callable[[Path], None]) -> None:
        with checkpoints.written_whole(whole) as partial:
            save(partial / "actor")
            then(partial / "actor")

    before = (whole / "actor" / "model_state_dict" / "full_weights.pt").read_bytes()
    with pytest.raises(OSError, match="No space left"):
        save_again(full_disk)
    with pytest.raises(CheckpointError, match=r"is not whole: .*full_weights\.pt is missing"):
        save_again(rank_on_another_disk)
    assert [folder.name for folder in whole.parent.iterdir()] == ["global_step_3"]
    assert (whole / "actor" / "model_state_dict" / "full_weights.pt").read_bytes() == before


def test_a_full_disk_is_called_a_full_disk(tmp_path: Path) -> None:
    """torch's own writer and its own error, in a process that may write small files only."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with (
            pytest.raises(CheckpointError, match=r"cannot be written to .*: File too large"),
            checkpoints.explained(tmp_path),
        ):
            save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_step_that_is_saved_again_replaces_the_older(whole: Path) -> None:
    (whole / "mark").touch()
    whole.with_name("global_step_3.partial").mkdir()  # left by a run that was killed
    with checkpoints.written_whole(whole) as partial:
        save(partial / "actor")
    assert [path.name for path in whole.iterdir()] == ["actor"]
    assert [folder.name for folder in whole.parent.iterdir()] == ["global_step_3"]
