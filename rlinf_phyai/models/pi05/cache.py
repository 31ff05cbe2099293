# SPDX-License-Identifier: Apache-2.0
"""Keys and values of the prefix, layer by layer, with room for the suffix behind each sample's last valid token."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf_phyai.models.pi05.configuration import PI05Config

_COUNTERS = 8192


class KeyValueCache:
    """k, v: [layers, B, slots, kv_heads, head_dim]. Slot = position: valid tokens of a sample are contiguous from 0."""

    def __init__(
        self, config: PI05Config, batch: int, prefix_tokens: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        c = config.prefix
        shape = (c.depth, batch, prefix_tokens + config.suffix_length, c.num_kv_heads, c.head_dim)
        self.k: Tensor = torch.empty(shape, dtype=dtype, device=device)
        self.v: Tensor = torch.empty(shape, dtype=dtype, device=device)
        # Samples with shorter prompts never write the last slots. They are masked, but 0 * NaN would still be NaN.
        self.k[:, :, prefix_tokens:] = 0
        self.v[:, :, prefix_tokens:] = 0
        # Scratch of split kernels, which leave it as zeros.
        self.counters = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
