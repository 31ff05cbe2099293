# SPDX-License-Identifier: Apache-2.0
"""Offloading at full size: the memory is there for another process, and comes back with the same bits. Prints what it costs."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.inputs import make_observations
from rlinf_phyai.engine import DeviceConfig, Engine, EngineArgs, EngineConfig, RuntimeConfig
from rlinf_phyai.models.pi05 import PI05Args, PI05RolloutOutput
from rlinf_phyai.models.pi05.random_checkpoint import make_random_checkpoint

GIB = 2**30
STEPS = 3


@pytest.fixture(scope="module")
def full_engine() -> Iterator[Engine]:
    """PI0.5 with random weights in bfloat16, graphs captured for 8 observations."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        make_random_checkpoint(folder, device="cuda")
        torch.cuda.empty_cache()
        args = PI05Args(folder, 8, capture_rollout=True, num_steps=STEPS)
        runtime = RuntimeConfig(kernel_policy="rlinf_bf16", progress=False)
        engine = Engine(EngineArgs("pi05", args, EngineConfig(DeviceConfig("cuda", torch.bfloat16), runtime)))
    with engine:
        yield engine


def sampled(output: PI05RolloutOutput) -> list[torch.Tensor]:
    return [output.actions, output.chains, output.log_probs]


def timed(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def test_offload_frees_the_device_and_reload_restores_every_bit(
    full_engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = [make_observations(batch, STEPS).request() for batch in (8, 3)]
    before = [sampled(full_engine.rollout_step(request)) for request in requests]
    graphs = set(full_engine.captured_graphs())
    assert len(graphs) >= 2
    weights = sum(t.numel() * t.element_size() for t in full_engine._model.weights.storages.values())
    assert weights > 6 * GIB

    lines = []
    for cycle in range(3):
        allocated, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
        offload = timed(full_engine.offload)
        left, freed = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0] - free
        # What stays is small: tables, cuBLAS workspaces, the requests and results of this test.
        assert left < 0.3 * GIB, f"{left / GIB:.2f} of {allocated / GIB:.2f} GiB still allocated"
        # Segments of torch's allocator that a small tensor still lives in stay taken: 0.5 GiB on an H200.
        assert freed > 0.9 * weights, f"other processes see only {freed / GIB:.2f} GiB more"
        taken = torch.empty(weights, dtype=torch.uint8, device="cuda")  # an actor would take it now
        taken.fill_(1)
        del taken
        torch.cuda.empty_cache()
        reload = timed(full_engine.reload)
        first = timed(lambda: full_engine.rollout_step(requests[0]))
        usual = timed(lambda: full_engine.rollout_step(requests[0]))
        for request, wanted in zip(requests, before, strict=True):
            for found, expected in zip(sampled(full_engine.rollout_step(request)), wanted, strict=True):
                assert torch.equal(found, expected)
        lines.append(
            f"cycle {cycle}: {freed / GIB:.2f} GiB freed ({left / GIB:.3f} left), offload {offload:.2f} s, reload {reload:.2f} s, "
            f"first step with its capture {1e3 * first:.0f} ms, usual step {1e3 * usual:.1f} ms"
        )
    assert len(full_engine.captured_graphs()) == len(requests)
    with capsys.disabled():
        print("", *lines, sep="\n")


def test_without_room_the_engine_stays_offloaded(full_engine: Engine) -> None:
    request = make_observations(2, STEPS).request()
    before = sampled(full_engine.rollout_step(request))
    full_engine.offload()
    taken = torch.empty(torch.cuda.mem_get_info()[0] - 2 * GIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        full_engine.reload()
    assert full_engine.offloaded
    del taken
    torch.cuda.empty_cache()
    full_engine.reload()
    for found, expected in zip(sampled(full_engine.rollout_step(request)), before, strict=True):
        assert torch.equal(found, expected)
