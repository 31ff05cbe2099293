# SPDX-License-Identifier: Apache-2.0
"""GPU timing shared by the benchmarks: CUDA graph replays over rotating inputs, and the card's own ceilings."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


def time_graph(calls: Sequence[Callable[[], object]], target_ms: float = 20.0, rounds: int = 5) -> float:
    """Median milliseconds of one call.

    ``calls`` do the same work on different buffers, so that repeated runs read memory and not the cache. All of them go into
    one CUDA graph, which is replayed until ``target_ms`` have passed, ``rounds`` times.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    once = _elapsed(graph, 1)
    repeats = max(1, min(2000, int(target_ms / max(once, 1e-3))))
    times = [_elapsed(graph, repeats) / (repeats * len(calls)) for _ in range(rounds)]
    return statistics.median(times)


def _elapsed(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        graph.replay()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop))


@dataclass(frozen=True)
class Ceilings:
    """Measured peaks of this card: bf16 matmul 8192^3 in TFLOP/s (a burst, and 2 s of it) and copy in TB/s (read + write)."""

    matmul: float
    matmul_sustained: float
    copy: float


def measure_ceilings() -> Ceilings:
    """Runs both probes on random data."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    burst = time_graph([lambda: a @ b], target_ms=15.0)
    sustained = time_graph([lambda: a @ b], target_ms=700.0, rounds=3)
    source = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    # a kernel, not copy_: in a graph that becomes a memcpy node, which the slower copy engine serves
    copy = time_graph([lambda: torch.neg(source, out=target)], target_ms=30.0)
    flops = 2 * 8192**3
    return Ceilings(flops / burst / 1e9, flops / sustained / 1e9, 2 * 2 * source.numel() / copy / 1e9)
