# SPDX-License-Identifier: Apache-2.0
"""Where the time of a piece of work goes: spans of chosen calls, on the GPU's clock."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from rlinf.workers.actor import fsdp_actor_worker


class Stages:
    """Times the calls of wrapped functions; what a nested one takes is not counted for the outer one.

    By CUDA events, so the spans are those of the GPU's queue, its idle gaps included; by the host's clock without CUDA.
    """

    def __init__(self) -> None:
        self._spans: list[tuple[str, Any, Any, str | None]] = []
        self._open: list[str] = []
        self._undo = ExitStack()

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        """Count the calls of ``owner.attribute`` as stage ``name`` until the block is left."""
        original: Callable[..., Any] = getattr(owner, attribute)

        def timed(*args: Any, **kwargs: Any) -> Any:
            outer = self._open[-1] if self._open else None
            self._open.append(name)
            begin = _now()
            try:
                return original(*args, **kwargs)
            finally:
                self._open.pop()
                self._spans.append((name, begin, _now(), outer))

        own = attribute in vars(owner)
        setattr(owner, attribute, timed)
        if own:
            self._undo.callback(setattr, owner, attribute, original)
        else:
            self._undo.callback(delattr, owner, attribute)

    def take(self) -> dict[str, float]:
        """Milliseconds by stage since the last call."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        total: dict[str, float] = defaultdict(float)
        for name, begin, end, outer in self._spans:
            span = begin.elapsed_time(end) if isinstance(begin, torch.cuda.Event) else (end - begin) * 1e3
            total[name] += span
            if outer is not None:
                total[outer] -= span
        self._spans.clear()
        return dict(total)


def _now() -> Any:
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def actor_stages(actor: Any, model: Any) -> Stages:
    """The stages of an actor's rescoring and training; ``model`` is what FSDP wrapped."""
    stages = Stages()
    stages.wrap(model, "default_forward", "rest of the forward")
    stages.wrap(model, "input_transform", "transforms")
    stages.wrap(model, "_preprocess_observation", "transforms")
    stages.wrap(model, "_build_prefix_cache", "prefix")
    stages.wrap(model, "embed_prefix", "vision")
    stages.wrap(model, "get_suffix_out", "expert")
    stages.wrap(model, "get_value_from_vlm", "value head")
    stages.wrap(torch.Tensor, "backward", "backward")
    stages.wrap(actor, "optimizer_step", "optimizer")
    stages.wrap(fsdp_actor_worker, "clear_memory", "garbage collection, once a step")
    return stages
