# SPDX-License-Identifier: Apache-2.0
"""Random observations of LIBERO's shape, for the engine and for the actor alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlinf_phyai.models.pi05 import PI05RolloutRequest

PROMPT_LENGTHS = (18, 20, 22, 24)  # tokens of LIBERO-Spatial's task sentences with BOS and the closing newline


@dataclass(frozen=True)
class Observations:
    """pixels [B, 2, 3, 224, 224], ids int64 [B, 200], lens int64 [B], noise [B, H, D], step noise [B, N, H, D], sigmas [B, N]."""

    pixels: Tensor
    ids: Tensor
    lens: Tensor
    noise: Tensor
    step_noise: Tensor
    sigmas: Tensor

    def request(self, compute_value: bool = False) -> PI05RolloutRequest:
        """The engine's request; prompt lengths live on the host, as the policy has them."""
        return PI05RolloutRequest(
            self.pixels, self.ids, self.lens.cpu(), self.noise, None, self.sigmas, self.step_noise, compute_value
        )

    def openpi(self) -> Any:
        """The same as the actor's observation, third camera black and masked."""
        from openpi.models import model as openpi_model

        batch, device = self.pixels.shape[0], self.pixels.device
        black = torch.full_like(self.pixels[:, 0], -1.0)
        names = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
        images = (self.pixels[:, 0], self.pixels[:, 1], black)
        return openpi_model.Observation.from_dict(
            {
                "image": dict(zip(names, images, strict=True)),
                "image_mask": {n: torch.full((batch,), i < 2, device=device) for i, n in enumerate(names)},
                "state": torch.zeros(batch, 32, device=device),
                "tokenized_prompt": self.ids,
                "tokenized_prompt_mask": torch.arange(200, device=device)[None] < self.lens[:, None],
            }
        )


def make_observations(
    batch: int, num_steps: int = 3, sde_step: int = 0, seed: int = 0, device: str = "cuda"
) -> Observations:
    """Random observations from an explicit seed; ``sde_step`` is the stochastic step (noise level 0.5)."""
    generator = torch.Generator().manual_seed(seed)
    pixels = (
        (torch.rand(batch, 2, 3, 14, 14, generator=generator) * 2 - 1).repeat_interleave(16, 3).repeat_interleave(16, 4)
    )
    pixels = (pixels + 0.2 * torch.randn(pixels.shape, generator=generator)).clamp(-1, 1)
    lens = torch.tensor([PROMPT_LENGTHS[i % len(PROMPT_LENGTHS)] for i in range(batch)])
    ids = torch.randint(1, 257_000, (batch, 200), generator=generator)
    ids = torch.where(torch.arange(200)[None] < lens[:, None], ids, 0)
    times = [1 - i / num_steps for i in range(num_steps)]
    guarded = times[1] if num_steps > 1 and sde_step == 0 else times[sde_step]
    sigmas = torch.zeros(batch, num_steps)
    sigmas[:, sde_step] = 0.5 * (times[sde_step] / (1 - guarded)) ** 0.5 if num_steps > 1 else 0.5
    noise = torch.randn(batch, 10, 32, generator=generator)
    step_noise = torch.randn(batch, num_steps, 10, 32, generator=generator)
    return Observations(*(t.to(device) for t in (pixels, ids, lens, noise, step_noise, sigmas)))
