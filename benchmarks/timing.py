# SPDX-License-Identifier: Apache-2.0
"""Timing shared by the benchmarks: single calls, CUDA graph replays over rotating inputs, and the card's own ceilings."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


def time_ms(function: Callable[[], Any], repeats: int = 20, warm_up: int = 3) -> dict[str, float]:
    """Milliseconds of one call: median, mean, min and max over ``repeats``, by CUDA events (host clock on CPU)."""
    cuda = torch.cuda.is_available()
    for _ in range(warm_up):
        function()
    samples = []
    for _ in range(repeats):
        if cuda:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            start.record()
            function()
            end.record()
            torch.cuda.synchronize()
            samples.append(start.elapsed_time(end))
        else:
            begin = time.perf_counter()
            function()
            samples.append((time.perf_counter() - begin) * 1e3)
    return {
        "median": statistics.median(samples),
        "mean": statistics.fmean(samples),
        "std": statistics.pstdev(samples),
        "min": min(samples),
        "max": max(samples),
    }


def graph_of(function: Callable[[], Any]) -> Callable[[], None]:
    """The function as a CUDA graph replay."""
    return _captured(function).replay


def _captured(function: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def time_graph(calls: Sequence[Callable[[], object]], target_ms: float = 20.0, rounds: int = 5) -> float:
    """Median milliseconds of one call.

    ``calls`` do the same work on different buffers, so that repeated runs read memory and not the cache. All of them go into
    one CUDA graph, which is replayed until ``target_ms`` have passed, ``rounds`` times.
    """

    def all_of_them() -> None:
        for call in calls:
            call()

    graph = _captured(all_of_them)
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


def matmul_tflops(target_ms: float = 15.0, rounds: int = 5) -> float:
    """bf16 matmul rate of a large square product: the practical peak."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / time_graph([lambda: a @ b], target_ms, rounds) / 1e9


def copy_tbs() -> float:
    """Device copy bandwidth, bytes read plus written."""
    source = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    # a kernel, not copy_: in a graph that becomes a memcpy node, which the slower copy engine serves
    ms = time_graph([lambda: torch.neg(source, out=target)], target_ms=30.0)
    return 2 * 2 * source.numel() / ms / 1e9


def measure_ceilings() -> Ceilings:
    """Runs all probes on random data."""
    return Ceilings(matmul_tflops(), matmul_tflops(target_ms=700.0, rounds=3), copy_tbs())
