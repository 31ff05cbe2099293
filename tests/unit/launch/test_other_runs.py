# SPDX-License-Identifier: Apache-2.0
"""A run among others: its log folder, its Ray cluster."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from rlinf_phyai.driver.cluster import ADDRESS, ray_cluster
from rlinf_phyai.driver.log_dir import claimed
from rlinf_phyai.errors import PhyaiError


def enter(block: AbstractContextManager[None]) -> None:
    with block:
        pass


def test_a_log_folder_belongs_to_one_run(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "run"
    with claimed(folder):
        with pytest.raises(PhyaiError, match=rf"another run is writing \(process {os.getpid()} on .*\); give this run"):
            enter(claimed(folder))
        enter(claimed(tmp_path / "logs" / "other"))
    enter(claimed(folder))  # released with the block


def test_a_log_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "logs", Path("/proc/nowhere/logs")):
        with pytest.raises(
            PhyaiError, match=rf"runner.logger.log_path is {folder}, where nothing can be written \(.+\)"
        ):
            enter(claimed(folder))


def test_launchers_of_the_same_second_get_folders_of_their_own(tmp_path: Path, repository: Path) -> None:
    """With a clock that stands still; the program is one that only prints its arguments."""
    (tmp_path / "date").write_text("#!/bin/sh\necho 20300101-000000\n")
    (tmp_path / "date").chmod(0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "bin" / "python").chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(tmp_path),
        "LOG_ROOT": str(tmp_path / "logs"),
    }
    config = "libero_spatial_ppo_openpi_pi05_phyai_tiny"
    command = ["bash", str(repository / "examples" / "embodiment" / "run_embodiment.sh"), config]
    runs = [subprocess.run(command, env=environment, capture_output=True, text=True, check=True) for _ in range(3)]
    used = [re.search(r"^Logs: (.*)$", run.stdout, re.MULTILINE) for run in runs]
    assert [Path(found.group(1)).name for found in used if found] == [
        f"20300101-000000-{config}{suffix}" for suffix in ("", "-2", "-3")
    ]
    assert all((tmp_path / "logs" / f"20300101-000000-{config}{suffix}" / "run.log").is_file() for suffix in ("", "-2"))

    environment["LOG_ROOT"] = "/proc/nowhere"
    refused = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "/proc/nowhere" in refused.stderr


def test_one_node_starts_its_own_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own rule for ``address="auto"``, which is what RLinf asks for, then finds no other cluster."""
    from ray._private.services import canonicalize_bootstrap_address

    monkeypatch.delenv(ADDRESS, raising=False)
    with ray_cluster(1, print):
        assert canonicalize_bootstrap_address("auto") is None  # start one
    assert ADDRESS not in os.environ
    with ray_cluster(2, print):
        assert ADDRESS not in os.environ  # join the cluster that the user started


def test_users_ray_address_is_kept_and_must_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv(ADDRESS, address)
        with ray_cluster(1, print):
            assert os.environ[ADDRESS] == address
    assert os.environ[ADDRESS] == address
    with pytest.raises(PhyaiError, match=f"RAY_ADDRESS is {address}, where no Ray cluster answers .*unset RAY_ADDRESS"):
        enter(ray_cluster(1, print))  # nothing listens there any more
    monkeypatch.setenv(ADDRESS, "auto")
    enter(ray_cluster(1, print))


def test_a_ray_of_another_version_is_refused_in_our_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESS, "auto")
    mismatch = RuntimeError("Version mismatch: The cluster was started with: Ray: 2.9.0")  # as ray.init raises it
    with (
        pytest.raises(
            PhyaiError, match="RAY_ADDRESS is auto, whose Ray does not fit this environment: Version mismatch"
        ),
        ray_cluster(1, print),
    ):
        raise mismatch
