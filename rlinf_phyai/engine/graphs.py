# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: captured on first use, replayed afterwards, bounded in number, sharing one memory pool."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from rlinf_phyai.signs import mark

Program = Callable[[], Any]
"""Launches all work on static buffers and returns the output tensors."""

_WARM_UP_RUNS = 2  # compiles kernels and creates library handles outside the capture


@dataclass
class CapturedGraph:
    """A captured program, its outputs, and whatever must stay alive as long as it does."""

    graph: torch.cuda.CUDAGraph
    outputs: Any
    keep_alive: Any


class GraphCache:
    """Least-recently-used cache of captured programs.

    All graphs share one memory pool: they never run at the same time, and a caller copies what it keeps before the next replay.
    """

    def __init__(self, max_graphs: int) -> None:
        self._graphs: OrderedDict[Hashable, CapturedGraph] = OrderedDict()
        self._max_graphs = max_graphs
        self._pool: Any = None
        self._side: torch.cuda.Stream | None = None  # one for all warm-ups: cuBLAS keeps a workspace per stream

    def __len__(self) -> int:
        return len(self._graphs)

    def graphs(self) -> dict[Hashable, CapturedGraph]:
        """The captured graphs by key, least recently used first."""
        return dict(self._graphs)

    def run(self, key: Hashable, program: Program, keep_alive: Any = None) -> Any:
        """Replays the graph of ``key``, capturing ``program`` first when there is none. Returns its static outputs."""
        found = self._graphs.get(key)
        if found is None:
            found = self._capture(program, keep_alive)
            self._graphs[key] = found
            while len(self._graphs) > self._max_graphs:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        found.graph.replay()
        return found.outputs

    def _capture(self, program: Program, keep_alive: Any) -> CapturedGraph:
        mark("CUDA graph")
        current = torch.cuda.current_stream()
        side = self._side = self._side or torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_RUNS):
                program()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = program()
        return CapturedGraph(graph, outputs, keep_alive)

    def clear(self) -> None:
        """Drops every graph."""
        self._graphs.clear()
        self._pool = None
