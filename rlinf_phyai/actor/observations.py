# SPDX-License-Identifier: Apache-2.0
"""Replayed observations without the per-sample CPU transforms.

RLinf's actor reruns openpi's input transform on every stored observation: a PIL resize of three images per sample on
the CPU, once in the rescoring and again in every update epoch. For LIBERO with PI0.5 all that the model reads of its
result are the resized images (the state enters no computation, the prompt is replaced by the stored tokens), and
PIL's resize can be reproduced bit for bit on the device that holds the images.
"""

from __future__ import annotations

from typing import Any

import torch

from rlinf_phyai.models.pi05.resize import PilBilinearResize

SUPPORTED_CONFIGS = ("pi05_libero",)
_IMAGE_SIZE = 224
CAMERAS = {"base_0_rgb": "observation/image", "left_wrist_0_rgb": "observation/wrist_image"}
_MASKED_CAMERA = "right_wrist_0_rgb"


class ReplayTransform:
    """Input transform for stored LIBERO observations, on their own device.

    Args:
        action_dim: width of the model's (unused) state.
    """

    def __init__(self, action_dim: int) -> None:
        self._action_dim = action_dim
        self._resize = PilBilinearResize(_IMAGE_SIZE, _IMAGE_SIZE)
        # A table, because a division on a GPU rounds differently from the actor's on the CPU.
        self._table = torch.arange(256, dtype=torch.uint8).to(torch.float32) / 255.0 * 2.0 - 1.0

    def images(self, forward_inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """uint8 ``[B, H, W, 3]`` cameras -> uint8 ``[B, 224, 224, 3]`` by openpi's camera name, the masked one zero.

        Raises:
            KeyError: a camera is missing from ``forward_inputs``.
        """
        resized = {
            name: self._resize(forward_inputs[key]).permute(0, 2, 3, 1).contiguous() for name, key in CAMERAS.items()
        }
        resized[_MASKED_CAMERA] = torch.zeros_like(resized["base_0_rgb"])
        return resized

    def __call__(self, forward_inputs: dict[str, Any]) -> dict[str, Any]:
        """What openpi's transform returns, with float images ``[B, 3, 224, 224]`` in [-1, 1]."""
        resized = self.images(forward_inputs)
        batch, device = resized[_MASKED_CAMERA].shape[0], resized[_MASKED_CAMERA].device
        if self._table.device != device:  # once: every copy from the host waits for the GPU
            self._table = self._table.to(device)
        images = {name: self._to_unit_range(resized[name]) for name in CAMERAS}
        images[_MASKED_CAMERA] = self._to_unit_range(resized[_MASKED_CAMERA][:1]).expand(batch, -1, -1, -1)
        used = torch.ones(batch, dtype=torch.bool, device=device)
        return {
            "image": images,
            "image_mask": {name: used if name in CAMERAS else ~used for name in images},
            "state": torch.zeros(batch, self._action_dim, device=device),
            "tokenized_prompt": forward_inputs["tokenized_prompt"],
            "tokenized_prompt_mask": forward_inputs["tokenized_prompt_mask"],
        }

    def _to_unit_range(self, image: torch.Tensor) -> torch.Tensor:
        """uint8 NHWC -> float32 NCHW in [-1, 1]."""
        return self._table[image.permute(0, 3, 1, 2).int()]
