# SPDX-License-Identifier: Apache-2.0
"""Memory stays flat over predictions and weight syncs; the measurement is the benchmark's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.leak import PERIOD, Cycles, measure_cycles, slope

# A cycle handles about 1 MB of weights in buckets and 0.4 MB of pixels per observation, and what it keeps of them shows in
# the number of tensors, which must not move at all. The heap in use shows what native code keeps beside; between samples
# with the same buffers it may differ by what Python's own caches and a growing list hold. The resident size is no measure:
# it moves by tens of MB with what the allocator keeps back.
BYTES_PER_CYCLE = 1024


@pytest.fixture(scope="module")
def cycles(checkpoint: Path) -> Iterator[Cycles]:
    cycles = Cycles(checkpoint)
    cycles.fill_caches()
    yield cycles
    cycles.policy.engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("periods", [3, pytest.param(20, marks=pytest.mark.long)])
def test_memory_is_flat(cycles: Cycles, periods: int) -> None:
    samples = measure_cycles(cycles, periods * PERIOD)
    for one in samples:
        print(one)
    assert {one.tensors for one in samples[1:]} == {samples[0].tensors}
    assert abs(slope(samples, "objects")) < 0.1
    assert slope(samples, "heap") < BYTES_PER_CYCLE


@pytest.mark.slow
def test_the_measurement_sees_one_kept_tensor_per_cycle(cycles: Cycles) -> None:
    kept: list[Any] = []
    samples = measure_cycles(
        cycles, PERIOD, PERIOD // 2, lambda result: kept.append(result["forward_inputs"]["chains"])
    )
    assert slope(samples, "tensors") == pytest.approx(1.0)
    assert slope(samples, "heap") > BYTES_PER_CYCLE
