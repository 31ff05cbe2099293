# SPDX-License-Identifier: Apache-2.0
"""Rescore a step's actions in the very micro-batches that training will use.

Floating-point results depend on which samples share a batch. PPO's ratio before the first optimizer step is exactly 1
only if the old log-prob comes from the same computation on the same batch, so the rescoring walks the batches that
``EmbodiedFSDPActor.run_training`` will build: the permutation of the ``T * B`` samples seeded with ``actor.seed +
rank``, cut into blocks of ``actor.micro_batch_size``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

Score = Callable[[dict[str, Any]], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class BatchPlan:
    """How a step's samples are cut into micro-batches on one rank.

    Attributes:
        steps, envs: ``T`` chunk steps and ``B`` trajectories of this rank; sample ``i`` is step ``i // B`` of
            trajectory ``i % B``.
        micro_batch_size: ``actor.micro_batch_size``.
        seed: ``actor.seed + rank``.
    """

    steps: int
    envs: int
    micro_batch_size: int
    seed: int

    @classmethod
    def of(
        cls, *, steps: int, envs: int, micro_batch_size: int, global_batch_size: int, world_size: int, seed: int
    ) -> BatchPlan:
        """Check the batch arithmetic that training asserts, before any work is done.

        Raises:
            ValueError: the samples of this rank do not fill whole global batches; names the keys.
        """
        per_rank = global_batch_size // world_size
        if per_rank < 1 or global_batch_size % world_size or per_rank % micro_batch_size:
            raise ValueError(
                f"actor.global_batch_size ({global_batch_size}) must be a multiple of actor.micro_batch_size "
                f"({micro_batch_size}) times the number of actor ranks ({world_size})."
            )
        if (steps * envs) % per_rank:
            raise ValueError(
                f"{steps} chunk steps x {envs} trajectories = {steps * envs} samples per actor rank do not divide "
                f"into batches of {per_rank} (actor.global_batch_size {global_batch_size} / {world_size} ranks). "
                "Change actor.global_batch_size, env.train.total_num_envs, env.train.rollout_epoch or "
                "env.train.max_steps_per_rollout_epoch."
            )
        return cls(steps=steps, envs=envs, micro_batch_size=micro_batch_size, seed=seed)

    def micro_batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield ``(step, env)`` index vectors, int64 ``[micro_batch_size]``, in training's order."""
        order = torch.randperm(self.steps * self.envs, generator=torch.Generator().manual_seed(self.seed))
        for samples in order.split(self.micro_batch_size):
            yield samples // self.envs, samples % self.envs


def take(inputs: Mapping[str, Any], step: torch.Tensor, env: torch.Tensor) -> dict[str, Any]:
    """Pick samples from a nested dict of ``[T, B, ...]`` tensors; only the picked samples are copied.

    (Flattening first would copy everything: the raw images of a step are about 10 GB.)
    """
    return _each(inputs, lambda tensor: tensor[step, env])


def longest(mask: torch.Tensor, plan: BatchPlan) -> list[int]:
    """Tokens of the longest prompt of each micro-batch, from their mask bool ``[T, B, L]``."""
    lengths = mask.sum(dim=-1)
    return [int(lengths[index].max()) for index in plan.micro_batches()]


def load(
    inputs: Mapping[str, Any],
    plan: BatchPlan,
    device: torch.device | str | int = "cpu",
    *,
    epochs: int = 1,
    wanted: Callable[[int], bool] = lambda index: True,
) -> Iterator[dict[str, Any]]:
    """Yield the samples of each micro-batch; a thread gathers those of the next one while this one is computed.

    Args:
        inputs: nested dict of ``[T, B, ...]`` tensors on the CPU.
        plan: micro-batches, walked ``epochs`` times.
        device: where the samples will go; for a GPU they are gathered in pinned memory.
        wanted: of the number of a micro-batch, counted on over the epochs; for others the dict is empty.
    """
    target = torch.device(device)

    def gather(step: torch.Tensor, env: torch.Tensor) -> dict[str, Any]:
        return _pinned(take(inputs, step, env)) if target.type == "cuda" else take(inputs, step, env)

    def enter_device() -> None:
        if target.type == "cuda":  # a thread of its own starts on GPU 0
            torch.cuda.set_device(target)

    queue: deque[Future[dict[str, Any]]] = deque()
    with ThreadPoolExecutor(1, "micro-batches", enter_device) as thread:
        walk = (indices for _ in range(epochs) for indices in plan.micro_batches())
        for index, (step, env) in enumerate(walk):
            queue.append(thread.submit(gather, step, env) if wanted(index) else thread.submit(dict))
            if index:
                yield queue.popleft().result()
        while queue:
            yield queue.popleft().result()


def rescore(
    forward_inputs: Mapping[str, Any],
    plan: BatchPlan,
    score: Score,
    *,
    logprob_shape: torch.Size,
    device: torch.device | str | int = "cpu",
) -> dict[str, torch.Tensor]:
    """Score every sample of a step.

    Args:
        forward_inputs: nested dict of ``[T, B, ...]`` tensors on the CPU.
        plan: micro-batches to use.
        score: maps a micro-batch of inputs to tensors ``[b, ...]``, ``logprobs`` ``[b, c, d]`` among them; called under
            no_grad, with the same keys every time.
        logprob_shape: ``[T, B, c, d]``, the shape the rollout reported.
        device: where ``score`` computes (see :func:`load`).

    Returns:
        for each key a float32 CPU tensor ``[T, B, ...]``.

    Raises:
        ValueError: the log-probs' shape differs from ``logprob_shape`` (both are named).
    """
    parts: list[dict[str, torch.Tensor]] = []
    with torch.no_grad():
        for inputs in load(forward_inputs, plan, device):
            scores = score(inputs)
            expected = (plan.micro_batch_size, *logprob_shape[2:])
            if tuple(scores["logprobs"].shape) != expected:
                raise ValueError(
                    f"the actor scored log-probs of shape {tuple(scores['logprobs'].shape)} per micro-batch, the "
                    f"rollout reported {expected}: check actor.model.num_action_chunks and actor.model.action_dim."
                )
            # Results stay where they are until the end: a copy here would make every micro-batch wait for the GPU.
            parts.append({key: value.float() for key, value in scores.items()})
    step, env = (torch.cat(index) for index in zip(*plan.micro_batches(), strict=True))
    results: dict[str, torch.Tensor] = {}
    for key in parts[0]:
        flat = torch.cat([part[key] for part in parts]).cpu()
        results[key] = torch.full((plan.steps, plan.envs, *flat.shape[1:]), torch.nan)
        results[key][step, env] = flat
    return results


def upload(inputs: Mapping[str, Any], device: torch.device | str | int) -> dict[str, Any]:
    """Move a nested dict of CPU tensors to ``device``; towards a GPU through pinned memory, without waiting for it."""
    if torch.device(device).type == "cuda":
        return _each(inputs, lambda tensor: tensor.pin_memory().to(device, non_blocking=True))
    return _each(inputs, lambda tensor: tensor.to(device))


def _pinned(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return _each(inputs, torch.Tensor.pin_memory)


def _each(inputs: Mapping[str, Any], change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """``change`` applied to every tensor of a nested dict; the rest is kept."""
    changed: dict[str, Any] = {}
    for key, value in inputs.items():
        if isinstance(value, torch.Tensor):
            changed[key] = change(value)
        else:
            changed[key] = _each(value, change) if isinstance(value, Mapping) else value
    return changed
