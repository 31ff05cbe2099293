# SPDX-License-Identifier: Apache-2.0
"""The action expert: one evaluation of the velocity field on the cached prefix."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from rlinf_phyai.kernels import Kernels
from rlinf_phyai.models.pi05.cache import KeyValueCache
from rlinf_phyai.models.pi05.tables import DenoiseSchedule, RotaryTable
from rlinf_phyai.models.pi05.weights import PI05Weights


def velocity(
    kernels: Kernels,
    weights: PI05Weights,
    rotary: RotaryTable,
    schedule: DenoiseSchedule,
    step: int,
    noisy_actions: Tensor,
    lengths: Tensor,
    cache: KeyValueCache,
) -> tuple[Tensor, Tensor]:
    """Velocity at denoise step ``step``.

    Args:
        noisy_actions: float32 [B, H, D].
        lengths: int32 [B], valid prefix tokens; the suffix's keys and values go to the slots behind them.

    Returns:
        velocity float32 [B, H, D] and the expert's output float32 [B, H, width].
    """
    c = weights.config.expert
    batch, horizon, _ = noisy_actions.shape
    x = F.linear(noisy_actions, *weights.action_in).to(weights.params_dtype).view(batch * horizon, c.width)
    modulation, gates = schedule.modulation[step], schedule.gates[step]
    keys = lengths + horizon
    h = kernels.ada_rms_norm(x, modulation[0, 0], modulation[0, 1], c.norm_eps)
    for i, layer in enumerate(weights.expert_layers):
        qkv = kernels.suffix_linear(h, layer.qkv).view(batch, horizon, -1)
        q = kernels.rope_cache(qkv, rotary.cos, rotary.sin, lengths, cache.k[i], cache.v[i], c.num_heads)
        attended = kernels.suffix_attention(q, cache.k[i], cache.v[i], keys, c.attention_scale)
        y = kernels.suffix_linear(attended.reshape(batch * horizon, -1), layer.o)
        post = modulation[2 * i + 1]
        h = kernels.add_ada_rms_norm(x, y, gates[2 * i], post[0], post[1], c.norm_eps)
        y = kernels.suffix_linear(kernels.gated_gelu(kernels.suffix_linear(h, layer.gate_up)), layer.down)
        following = modulation[2 * i + 2]
        h = kernels.add_ada_rms_norm(x, y, gates[2 * i + 1], following[0], following[1], c.norm_eps)
    output = h.float().view(batch, horizon, c.width)
    return F.linear(output, *weights.action_out), output
