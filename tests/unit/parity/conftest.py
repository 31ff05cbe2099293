# SPDX-License-Identifier: Apache-2.0
"""Shared models of the parity tests (built once), and a table of the largest deviations at the end of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_phyai.engine import DeviceConfig, Engine, EngineArgs, EngineConfig, RuntimeConfig
from rlinf_phyai.models.pi05 import PI05Args

from .reference import REFERENCE_SIZES, Reference

pytest.importorskip("rlinf", reason="parity needs RLinf's policy class")

MAX_BATCH = 5
_measured: dict[str, dict[str, float]] = {}


def cpu_engine(directory: Path, **args: Any) -> Engine:
    """A float32 CPU engine of a checkpoint."""
    return Engine(
        EngineArgs(
            plugin="pi05",
            plugin_args=PI05Args(checkpoint_dir=directory, max_batch_size=MAX_BATCH, capture_rollout=True, **args),
            config=EngineConfig(
                device=DeviceConfig(target="cpu", params_dtype=torch.float32),
                runtime=RuntimeConfig(progress=False, check_finite=True),
            ),
        )
    )


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """At these sizes a second thread doubles the processor time and saves little; on a busy machine it only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def vlm_reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """RLinf's policy with the critic after the VLM."""
    return Reference(tmp_path_factory.mktemp("vlm"), REFERENCE_SIZES, seed=1)


@pytest.fixture(scope="session")
def expert_reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """RLinf's policy with the critic after the action expert."""
    return Reference(tmp_path_factory.mktemp("expert"), REFERENCE_SIZES.but(value_after_vlm=False), seed=2)


@pytest.fixture(scope="session")
def noise_reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """RLinf's policy with the noise head of flow-noise."""
    return Reference(tmp_path_factory.mktemp("noise"), REFERENCE_SIZES.but(noise_head=True), seed=3)


@pytest.fixture(scope="session")
def engines(vlm_reference: Reference, expert_reference: Reference) -> Iterator[Callable[..., Engine]]:
    """``engines(value_mode, **args)``: an engine on the matching reference's checkpoint, built once per argument set."""
    built: dict[Any, Engine] = {}

    def get(value_mode: str, **args: Any) -> Engine:
        key = (value_mode, *sorted(args.items()))
        if key not in built:
            reference = expert_reference if value_mode == "expert" else vlm_reference
            built[key] = cpu_engine(reference.directory, value_mode=value_mode, **args)
        return built[key]

    yield get
    for engine in built.values():
        engine.close()


@pytest.fixture
def measure(request: pytest.FixtureRequest) -> Callable[[dict[str, float]], dict[str, float]]:
    """Keeps a test's deviations for the table at the end."""

    def keep(values: dict[str, float]) -> dict[str, float]:
        _measured[request.node.name] = values
        return values

    return keep


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not _measured:
        return
    terminalreporter.section("largest deviation from RLinf's policy, float32 on the CPU")
    columns = sorted({name for values in _measured.values() for name in values})
    width = max(len(name) for name in _measured)
    terminalreporter.write_line(" " * width + "".join(f"{name:>12}" for name in columns))
    for test, values in _measured.items():
        cells = "".join(f"{values[name]:12.1e}" if name in values else " " * 12 for name in columns)
        terminalreporter.write_line(f"{test:<{width}}{cells}")
