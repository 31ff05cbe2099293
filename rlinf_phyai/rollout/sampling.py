# SPDX-License-Identifier: Apache-2.0
"""The controller's side of sampling: which denoise step is stochastic, how strong its noise is, and the noise.

Source of the formulas: flow matching turned into an SDE as RLinf's actor does it. With ``t_i = 1 - i/N`` and
``t~_i = t_i``, except ``t~_i = t_1`` where ``t_i = 1``::

    flow_sde     sigma_i = noise_level * sqrt(t_i / (1 - t~_i))
    flow_cps     sigma_i = sin(pi / 2 * noise_level)
    flow_noise   no sigma: the model's noise head scales the noise

Non-joint sampling (the default) makes one step per batch stochastic, drawn uniformly; joint sampling makes all of them
stochastic; evaluation none. The engine reads the choice from the zeros of ``sigmas``, or from ``stochastic_steps``.

Every random number of a rollout worker comes from the two generators here (one for training, one for evaluation, so
that evaluating does not change the training that follows), seeded from ``(seed, rank, purpose, global step)``.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Mode = Literal["train", "eval"]

_PURPOSES: tuple[Mode, ...] = ("train", "eval")
EVALUATION = -1
"""Value of ``denoise_inds`` where no step is stochastic."""


@dataclass(frozen=True)
class NoiseAnnealing:
    """A noise level that moves linearly from ``start`` at global step 0 to ``end`` at global step ``steps``, and stays."""

    start: float
    end: float
    steps: int

    def level(self, global_step: int) -> float:
        """The noise level at a global step."""
        return self.start + (self.end - self.start) * min(global_step, self.steps) / self.steps


@dataclass(frozen=True)
class SamplingOptions:
    """How training samples.

    Attributes:
        num_steps: denoise steps N.
        noise_level: scale of every sigma; must be positive, or all log-probabilities would be 0. (Not read by flow_noise.)
        joint_logprob: all steps stochastic instead of one per batch.
        ignore_last: never choose the last step.
        trains: whether training samples are drawn at all; a run that only evaluates needs no noise level.
        noise_method: flow_sde, flow_cps or flow_noise.
        annealing: replaces ``noise_level`` by one that depends on the global step.
    """

    num_steps: int
    noise_level: float
    joint_logprob: bool = False
    ignore_last: bool = False
    trains: bool = True
    noise_method: str = "flow_sde"
    annealing: NoiseAnnealing | None = None

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"num_steps is {self.num_steps}; at least 1 denoise step is needed")
        if not self.trains:
            return
        if self.noise_method != "flow_noise":
            self._check_levels()
        if self.ignore_last and self.num_steps == 1 and not self.joint_logprob:
            raise ValueError("ignore_last leaves no step to choose with num_steps 1; turn it off or use more steps")

    def _check_levels(self) -> None:
        levels = [self.noise_level] if self.annealing is None else [self.annealing.start, self.annealing.end]
        if not all(level > 0 for level in levels):
            raise ValueError(
                f"noise_level is {' to '.join(map(str, levels))}; sampling for training needs a positive noise level (0.5"
                " is usual), or every log-probability is 0"
            )
        if self.noise_method == "flow_cps" and (max(levels) > 1 or self.num_steps == 1):
            raise ValueError(
                f"flow_cps with noise_level {max(levels)} and num_steps {self.num_steps}; it shares noise out, so the level"
                " is at most 1, and its last step has none, so 2 denoise steps are needed"
            )

    def level(self, global_step: int) -> float:
        """The noise level at a global step."""
        return self.noise_level if self.annealing is None else self.annealing.level(global_step)


@dataclass(frozen=True)
class SamplingPlan:
    """The random choices for one batch.

    Attributes:
        noise: float32 ``[B, H, D]``, start of the denoising, standard normal.
        sigmas: float32 ``[B, N]`` on the CPU, 0 on deterministic steps; None with flow_noise.
        step_noise: float32 ``[B, N, H, D]``, standard normal; zeros where no step is stochastic.
        stochastic_steps: bool ``[B, N]`` on the CPU with flow_noise, else None.
        denoise_inds: int64 ``[B, N]`` on the CPU: the stochastic step repeated, ``0..N-1`` (joint), or -1 (evaluation).
    """

    noise: Tensor
    sigmas: Tensor | None
    step_noise: Tensor
    stochastic_steps: Tensor | None
    denoise_inds: Tensor


def flow_sde_sigmas(num_steps: int, noise_level: float) -> Tensor:
    """``sigma_i`` of the module's docstring: float32 ``[N]`` on the CPU, each operation rounded to float32."""
    steps = torch.linspace(1, 1 / num_steps, num_steps, dtype=torch.float32, device="cpu")
    times = torch.cat([steps, steps.new_zeros(1)])
    guarded = torch.where(times == 1, times[1], times)
    return (times.new_tensor(noise_level) * torch.sqrt(times / (1 - guarded)))[:-1]


def flow_cps_sigmas(num_steps: int, noise_level: float) -> Tensor:
    """The same for flow_cps: one value for all steps."""
    level = torch.tensor(noise_level, dtype=torch.float32, device="cpu")
    return torch.sin(math.pi * level / 2).repeat(num_steps)


class FlowSampler:
    """Draws sampling plans.

    Args:
        options: see :class:`SamplingOptions`.
        action_shape: ``(H, D)``.
        seed: of the run; with the worker's rank it fixes every draw.
        rank: of the rollout worker.
        device: where noise is drawn.
    """

    def __init__(
        self,
        options: SamplingOptions,
        action_shape: tuple[int, int],
        seed: int,
        rank: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.options = options
        self._action_shape = action_shape
        self._seed, self._rank = seed, rank
        self._noise = {mode: torch.Generator(device=device) for mode in _PURPOSES}
        self._choice = random.Random()
        self._global_step: int | None = None
        self.set_global_step(0)

    def set_global_step(self, step: int) -> None:
        """Starts the random numbers of a training step; calling again with the same step changes nothing.

        The numbers of a step do not depend on earlier steps, so a resumed run continues with those it would have drawn.
        """
        if step == self._global_step:
            return
        self._global_step = step
        options = self.options
        # Where the noise head scales the noise, a sigma only marks the step.
        scale = {"flow_sde": flow_sde_sigmas, "flow_cps": flow_cps_sigmas}.get(options.noise_method)
        steps = options.num_steps
        self._sigmas = torch.ones(steps) if scale is None else scale(steps, options.level(step))
        for purpose, mode in enumerate(_PURPOSES):
            entropy = np.random.SeedSequence([self._seed % 2**32, self._rank, purpose, step])
            first, second = (int(word) for word in entropy.generate_state(2, np.uint64))
            self._noise[mode].manual_seed(first % 2**63)
            if mode == "train":
                self._choice.seed(second)

    def plan(self, batch: int, mode: Mode) -> SamplingPlan:
        """Draws the choices for ``batch`` observations.

        Raises:
            ValueError: an unknown mode, an empty batch, or training samples in a run that only evaluates.
        """
        if mode not in _PURPOSES:
            raise ValueError(f"mode is {mode!r}; allowed: 'train', 'eval'")
        if mode == "train" and not self.options.trains:
            raise ValueError(
                "this sampler was set up for evaluation only (runner.only_eval); it draws no training samples"
            )
        if batch < 1:
            raise ValueError(f"batch is {batch}; at least 1 observation is needed")
        steps = self.options.num_steps
        generator = self._noise[mode]
        f32, device = torch.float32, generator.device
        noise = torch.randn(batch, *self._action_shape, generator=generator, dtype=f32, device=device)
        step_shape = (batch, steps, *self._action_shape)
        if mode == "eval":
            return self._planned(
                noise,
                torch.zeros(steps, dtype=f32),
                torch.zeros(step_shape, dtype=f32, device=device),
                torch.full((steps,), EVALUATION, dtype=torch.int64),
            )
        if self.options.joint_logprob:
            sigmas, chosen = self._sigmas, torch.arange(steps)
        else:
            step = self._choice.randrange(steps - 1 if self.options.ignore_last else steps)
            sigmas, chosen = torch.zeros(steps, dtype=f32), torch.full((steps,), step, dtype=torch.int64)
            sigmas[step] = self._sigmas[step]
        step_noise = torch.randn(step_shape, generator=generator, dtype=f32, device=device)
        return self._planned(noise, sigmas, step_noise, chosen)

    def _planned(self, noise: Tensor, sigmas: Tensor, step_noise: Tensor, chosen: Tensor) -> SamplingPlan:
        """The plan of a batch from one sample's ``sigmas`` [N] and ``chosen`` [N]."""
        learned = self.options.noise_method == "flow_noise"
        rows = sigmas.repeat(len(noise), 1)
        return SamplingPlan(
            noise,
            None if learned else rows,
            step_noise,
            rows > 0 if learned else None,
            chosen.repeat(len(noise), 1),
        )
