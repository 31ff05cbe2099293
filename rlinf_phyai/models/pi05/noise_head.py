# SPDX-License-Identifier: Apache-2.0
"""The learned noise of flow-noise: a small MLP on the expert's output gives each action element a standard deviation.

``ln var = min + (max - min) (tanh(mlp(h)) + 1) / 2``, with the bounds of ln var as buffers of the model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rlinf_phyai.models.pi05.weights import PI05Weights


def noise_std(weights: PI05Weights, expert_output: Tensor) -> Tensor:
    """Standard deviations float32 [B, H, D] from the expert's output float32 [B, H, width]."""
    x = expert_output
    for weight, bias in weights.noise_head:  # tanh also closes the last layer: it bounds ln var
        x = torch.tanh(F.linear(x, weight, bias))
    low, high = weights.noise_logvar
    return torch.exp(0.5 * (low + (high - low) * (x + 1.0) / 2.0))
