# SPDX-License-Identifier: Apache-2.0
"""Memory stays flat over predictions and weight syncs; the measurement is the benchmark's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.leak import Cycles, measure_cycles, slope

# A cycle handles about 1 MB of weights in buckets and 0.4 MB of pixels per observation; a cycle that kept any tensor of it
# would show in their number, which must not move at all. The resident size does move by tens of MB: the engine keeps the
# input buffers of the 32 latest shapes, 2 to 7 MB each. Its bound is what no such swing reaches over that many cycles, and
# far below one observation per cycle.
BOUNDS = [pytest.param(300, 100 * 1024), pytest.param(2000, 32 * 1024, marks=pytest.mark.long)]


@pytest.fixture
def cycles(checkpoint: Path) -> Iterator[Cycles]:
    cycles = Cycles(checkpoint)
    yield cycles
    cycles.policy.engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("count, bytes_per_cycle", BOUNDS)
def test_memory_is_flat(cycles: Cycles, count: int, bytes_per_cycle: int) -> None:
    samples = measure_cycles(cycles, count, 100)
    for one in samples:
        print(one)
    assert len(samples) == count // 100 + 1
    assert {one.tensors for one in samples[1:]} == {samples[0].tensors}
    assert abs(slope(samples, "objects")) < 0.1
    assert slope(samples, "rss") < bytes_per_cycle


@pytest.mark.slow
def test_the_measurement_sees_one_kept_tensor_per_cycle(cycles: Cycles) -> None:
    kept: list[Any] = []
    samples = measure_cycles(cycles, 60, 20, lambda result: kept.append(result["forward_inputs"]["chains"]))
    assert slope(samples, "tensors") == pytest.approx(1.0)
