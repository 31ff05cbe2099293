# SPDX-License-Identifier: Apache-2.0
"""One PI0.5 step: from a checked request through buckets and static buffers to the output.

On a GPU a request is padded to a bucket (batch size, prompt length); each bucket has its own static input buffers and, with CUDA
graphs on, its own graph. The eager path runs the same program on the same buffers, so both give the same bits. On a CPU the bucket is
the request itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlinf_phyai.errors import RequestError
from rlinf_phyai.kernels import Kernels
from rlinf_phyai.models.pi05.cache import KeyValueCache
from rlinf_phyai.models.pi05.expert import append_state, velocity
from rlinf_phyai.models.pi05.prefix import embed_prompt, fill_cache
from rlinf_phyai.models.pi05.requests import CheckedRequest, PI05RolloutOutput
from rlinf_phyai.models.pi05.sampler import sample, sample_ode, transition_of
from rlinf_phyai.models.pi05.tables import DenoiseSchedule, DerivedTables
from rlinf_phyai.models.pi05.value import fill_cache_and_value, value_from_expert
from rlinf_phyai.models.pi05.vision import embed_images
from rlinf_phyai.models.pi05.weights import PI05Weights

RunProgram = Callable[[Hashable, Callable[[], Any], Any], Any]
"""(key, program, keep_alive) -> outputs: replays a graph or just calls the program."""

_BATCH_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_BATCH_STEP = 64  # above the last bucket
_PROMPT_STEP = 8
_MAX_BUFFERS = 32


def batch_bucket(batch: int, max_batch_size: int) -> int:
    """Smallest bucket that holds ``batch``, never above ``max_batch_size``."""
    fitting = next((b for b in _BATCH_BUCKETS if b >= batch), -(-batch // _BATCH_STEP) * _BATCH_STEP)
    return min(fitting, max_batch_size)


def prompt_bucket(length: int, max_length: int) -> int:
    """Prompt length rounded up to a multiple of 8, never above ``max_length``."""
    return min(-(-length // _PROMPT_STEP) * _PROMPT_STEP, max_length)


@dataclass(frozen=True)
class Shape:
    """Sizes of one program. ``num_steps`` 0 = prefix only."""

    batch: int
    cameras: int
    prompt: int
    num_steps: int
    stochastic: bool
    value: bool


class Buffers:
    """Static inputs of one shape; rows above the actual batch hold whatever valid input was there last."""

    def __init__(self, shape: Shape, weights: PI05Weights) -> None:
        c, device = weights.config, weights.device
        size = c.vision.image_size
        actions = (c.action_horizon, c.action_dim)
        f32 = torch.float32
        self.pixels = torch.zeros(shape.batch, shape.cameras, 3, size, size, dtype=f32, device=device)
        self.input_ids = torch.zeros(shape.batch, shape.prompt, dtype=torch.int64, device=device)
        self.lengths = torch.full(
            (shape.batch,), shape.cameras * c.vision.num_tokens + 1, dtype=torch.int32, device=device
        )
        self.state = torch.zeros(shape.batch, c.action_dim, dtype=f32, device=device)
        self.noise = torch.zeros(shape.batch, *actions, dtype=f32, device=device)
        self.sigmas = torch.zeros(shape.batch, shape.num_steps, dtype=f32, device=device)
        self.step_noise = torch.zeros(shape.batch, shape.num_steps, *actions, dtype=f32, device=device)

    def fill(self, request: CheckedRequest, image_tokens: int, generator: torch.Generator, shape: Shape) -> None:
        """Copies a request in and draws the noise that it leaves out."""
        b = request.batch
        self.pixels[:b].copy_(request.pixels)
        columns = min(self.input_ids.shape[1], request.input_ids.shape[1])
        self.input_ids[:b].zero_()
        self.input_ids[:b, :columns].copy_(request.input_ids[:, :columns])
        self.lengths[:b].copy_(request.lang_lens + image_tokens)
        if request.state is not None:
            self.state[:b].copy_(request.state)
        if shape.num_steps:
            _copy_or_draw(self.noise[:b], request.noise, generator)
        if shape.stochastic:
            assert request.sigmas is not None
            self.sigmas[:b].copy_(request.sigmas)
            _copy_or_draw(self.step_noise[:b], request.step_noise, generator)


def _copy_or_draw(target: Tensor, given: Tensor | None, generator: torch.Generator) -> None:
    if given is None:
        target.normal_(generator=generator)
    else:
        target.copy_(given)


class PI05Scheduler:
    """Runs programs for one set of weights; knows nothing of weight updates or threads (see ``engine.Engine``)."""

    def __init__(
        self,
        kernels: Kernels,
        weights: PI05Weights,
        tables: DerivedTables,
        max_batch_size: int,
        generator: torch.Generator,
    ) -> None:
        self.kernels, self.weights, self.tables = kernels, weights, tables
        self.config = weights.config
        self.max_batch_size = max_batch_size
        self.generator = generator
        self._buffers: OrderedDict[Shape, Buffers] = OrderedDict()

    def clear(self) -> None:
        """Drops the static buffers; graphs that read them must be gone before."""
        self._buffers.clear()

    def step(self, request: CheckedRequest, run: RunProgram) -> Tensor:
        """Deterministic (ODE) actions [B, H, D]."""
        return self._execute(self.shape_of(request), request, run)["actions"]

    def shape_of(self, request: CheckedRequest) -> Shape:
        """Sizes of the program that :meth:`step` runs for a request."""
        return self._shape(request, num_steps=self.config.num_steps, stochastic=False, value=False)

    def rollout(self, request: CheckedRequest, compute_value: bool, run: RunProgram) -> PI05RolloutOutput:
        """Sampled actions with chain, log-probabilities and, when asked, values."""
        assert request.sigmas is not None
        value = compute_value and self.config.value_mode is not None
        shape = self._shape(request, num_steps=request.sigmas.shape[1], stochastic=True, value=value)
        outputs = self._execute(shape, request, run)
        return PI05RolloutOutput(outputs["actions"], outputs["chains"], outputs["log_probs"], outputs.get("values"))

    def value(self, request: CheckedRequest, run: RunProgram) -> Tensor:
        """Critic after the VLM [B, 1], by the prefix alone."""
        if not self.config.critic_after_vlm:
            raise RequestError(
                f"engine.value needs a critic after the VLM, but value_mode is {self.config.value_mode!r}; use rollout_step."
            )
        shape = self._shape(request, num_steps=0, stochastic=False, value=True)
        return self._execute(shape, request, run)["values"]

    def _shape(self, request: CheckedRequest, num_steps: int, stochastic: bool, value: bool) -> Shape:
        batch, prompt = request.batch, request.max_lang
        if self.weights.device.type == "cuda":
            batch = batch_bucket(batch, self.max_batch_size)
            prompt = prompt_bucket(prompt, self.config.tokenizer_max_length)
        return Shape(batch, request.cameras, prompt, num_steps, stochastic, value)

    def _execute(self, shape: Shape, request: CheckedRequest, run: RunProgram) -> dict[str, Tensor]:
        buffers = self._buffers.get(shape)
        if buffers is None:
            buffers = self._buffers[shape] = Buffers(shape, self.weights)
            while len(self._buffers) > _MAX_BUFFERS:
                self._buffers.popitem(last=False)
        self._buffers.move_to_end(shape)
        image_tokens = shape.cameras * self.config.vision.num_tokens
        buffers.fill(request, image_tokens, self.generator, shape)
        schedule = self.tables.schedule(shape.num_steps) if shape.num_steps else None
        # The key holds the very objects whose memory a graph reads, so a replaced buffer or schedule means a new capture.
        outputs = run(
            (shape, id(buffers), id(schedule)), lambda: self.program(shape, buffers, schedule), (buffers, schedule)
        )
        return {name: tensor[: request.batch].clone() for name, tensor in outputs.items()}

    def program(self, shape: Shape, buffers: Buffers, schedule: DenoiseSchedule | None) -> dict[str, Tensor]:
        """All the work of one step on static buffers."""
        cache, values = self._prefix(shape, buffers)
        if schedule is None:
            assert values is not None
            return {"values": values}

        lengths, model = buffers.lengths, (self.kernels, self.weights, self.tables.rotary, schedule)
        if not self.config.pi05:
            lengths = append_state(*model, buffers.state, lengths, cache)

        def field(step: int, x: Tensor) -> tuple[Tensor, Tensor]:
            return velocity(*model, step, x, lengths, cache)

        if not shape.stochastic:
            return {"actions": sample_ode(field, schedule.times, buffers.noise)}
        transition = transition_of(
            self.config.noise_method, self.kernels, self.weights, buffers.step_noise, buffers.sigmas
        )
        trajectory = sample(field, transition, schedule.times, buffers.noise)
        outputs = {
            "actions": trajectory.chains[:, -1],
            "chains": trajectory.chains,
            "log_probs": trajectory.log_probs,
        }
        if shape.value and values is None:
            values = value_from_expert(self.weights, trajectory.expert_outputs)
        if values is not None:
            outputs["values"] = values
        return outputs

    def _prefix(self, shape: Shape, buffers: Buffers) -> tuple[KeyValueCache, Tensor | None]:
        images = embed_images(self.kernels, self.weights, buffers.pixels.flatten(0, 1))
        x = torch.cat(
            (images.view(shape.batch, -1, images.shape[-1]), embed_prompt(self.weights, buffers.input_ids)), dim=1
        )
        cache = KeyValueCache(self.config, shape.batch, x.shape[1], self.weights.device, self.weights.params_dtype)
        if shape.value and self.config.critic_after_vlm:
            return cache, fill_cache_and_value(
                self.kernels, self.weights, self.tables, x, buffers.lengths, cache, shape.cameras
            )
        fill_cache(self.kernels, self.weights, self.tables, x, buffers.lengths, cache)
        return cache, None
