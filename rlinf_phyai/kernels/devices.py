# SPDX-License-Identifier: Apache-2.0
"""Which devices a kernel runs on."""

from __future__ import annotations

import torch


def missing_cuda(device: torch.device, needs: str, capability: int = 0, note: str = "") -> str | None:
    """Why ``device`` is no CUDA device of at least compute capability ``capability``.0, or None.

    Args:
        needs: begins the sentence, such as ``FlashAttention needs``.
        note: follows the capability, such as `` (Hopper)``.
    """
    if device.type != "cuda":
        return f"{needs} a CUDA device, not {device}"
    major, minor = torch.cuda.get_device_capability(device)
    return (
        None
        if major >= capability
        else f"{needs} compute capability {capability}.0{note}, this GPU has {major}.{minor}"
    )
