# SPDX-License-Identifier: Apache-2.0
"""The parts of one ``step`` as separate programs, for latency measurements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlinf_phyai.models.pi05.cache import KeyValueCache
from rlinf_phyai.models.pi05.expert import append_state, velocity
from rlinf_phyai.models.pi05.prefix import embed_prompt, fill_cache
from rlinf_phyai.models.pi05.requests import CheckedRequest
from rlinf_phyai.models.pi05.sampler import sample_ode
from rlinf_phyai.models.pi05.scheduler import Buffers, PI05Scheduler, RunProgram
from rlinf_phyai.models.pi05.vision import embed_images


def stage_programs(scheduler: PI05Scheduler, request: CheckedRequest, run: RunProgram) -> dict[str, Callable[[], Any]]:
    """``vision``, ``prefix`` and ``denoise`` of a request, each repeatable on what the stage before it left.

    Every stage runs once here, in order, so that its inputs exist (and, with CUDA graphs, its graph is captured). The last
    stage's result are the actions [B, H, D] of the request.
    """
    kernels, weights, tables, config = scheduler.kernels, scheduler.weights, scheduler.tables, scheduler.config
    shape = scheduler.shape_of(request)
    buffers = Buffers(shape, weights)
    buffers.fill(request, shape.cameras * config.vision.num_tokens, scheduler.generator, shape)
    schedule = tables.schedule(shape.num_steps)
    keep_alive = (buffers, schedule)
    programs: dict[str, Callable[[], Any]] = {}

    def add(name: str, program: Callable[[], Any]) -> Any:
        programs[name] = lambda: run((name, id(buffers)), program, keep_alive)
        return programs[name]()

    images: Tensor = add("vision", lambda: embed_images(kernels, weights, buffers.pixels.flatten(0, 1)))

    def prefix() -> KeyValueCache:
        prompt = embed_prompt(weights, buffers.input_ids)
        x = torch.cat((images.view(shape.batch, -1, images.shape[-1]), prompt), dim=1)
        cache = KeyValueCache(config, shape.batch, x.shape[1], weights.device, weights.params_dtype)
        fill_cache(kernels, weights, tables, x, buffers.lengths, cache)
        return cache

    cache: KeyValueCache = add("prefix", prefix)

    model = (kernels, weights, tables.rotary, schedule)

    def denoise() -> Tensor:
        lengths = buffers.lengths if config.pi05 else append_state(*model, buffers.state, buffers.lengths, cache)
        field = lambda step, x: velocity(*model, step, x, lengths, cache)  # noqa: E731
        return sample_ode(field, schedule.times, buffers.noise)[: request.batch]

    add("denoise", denoise)
    return programs
