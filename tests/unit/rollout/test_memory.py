# SPDX-License-Identifier: Apache-2.0
"""Memory stays flat over predictions and weight syncs; the measurement is the benchmark's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.leak import Cycles, measure_cycles, slope

# What one cycle handles: about 1.5 MB of weights in buckets, 0.4 MB of pixels per observation, and a result of which
# the smallest part, the denoising chain, has 5 KiB. A cycle that kept any of its tensors would show in their number.
# The resident size also moves with the allocator's fragments, so its bound is the smaller the more cycles there are.
DRIFT_BYTES = 8 * 2**20


@pytest.fixture
def cycles(checkpoint: Path) -> Iterator[Cycles]:
    cycles = Cycles(checkpoint)
    yield cycles
    cycles.policy.engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("count", [300, pytest.param(2000, marks=pytest.mark.long)])
def test_memory_is_flat(cycles: Cycles, count: int) -> None:
    samples = measure_cycles(cycles, count, 100)
    for one in samples:
        print(one)
    assert len(samples) == count // 100 + 1
    assert {one.tensors for one in samples[1:]} == {samples[0].tensors}
    assert abs(slope(samples, "objects")) < 0.1
    assert slope(samples, "rss") * count < DRIFT_BYTES


@pytest.mark.slow
def test_the_measurement_sees_one_kept_tensor_per_cycle(cycles: Cycles) -> None:
    kept: list[Any] = []
    samples = measure_cycles(cycles, 60, 20, lambda result: kept.append(result["forward_inputs"]["chains"]))
    assert slope(samples, "tensors") == pytest.approx(1.0)
