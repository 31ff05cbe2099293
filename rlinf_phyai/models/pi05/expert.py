# SPDX-License-Identifier: Apache-2.0
"""The action expert: one evaluation of the velocity field on the cached prefix.

PI0.5 conditions every norm on the time (AdaRMS). PI0 mixes the time into the action tokens by an MLP and puts a state token before
them; that token sees the prefix and itself only and depends on neither time nor actions, so it is one more cached token.
"""

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
    x = F.linear(noisy_actions, *weights.action_in)
    if not weights.config.pi05:
        x = F.silu(F.linear(x, weights.action_time_in[0][:, : c.width]) + schedule.time_term[step])
        x = F.linear(x, *weights.action_time_out)
    x = x.to(weights.params_dtype).view(batch * horizon, c.width)
    modulation = schedule.modulation[step]
    _run_layers(kernels, weights, rotary, modulation, schedule.gates[step], x, lengths, cache)
    h = kernels.ada_rms_norm(x, modulation[-1, 0], modulation[-1, 1], c.norm_eps)
    output = h.float().view(batch, horizon, c.width)
    return F.linear(output, *weights.action_out), output


def append_state(
    kernels: Kernels,
    weights: PI05Weights,
    rotary: RotaryTable,
    schedule: DenoiseSchedule,
    state: Tensor,
    lengths: Tensor,
    cache: KeyValueCache,
) -> Tensor:
    """Runs PI0's state token float32 [B, D] behind the prefix; returns the new lengths int32 [B] of the cache."""
    x = F.linear(state, *weights.state).to(weights.params_dtype)
    _run_layers(kernels, weights, rotary, schedule.modulation[0], schedule.gates[0], x, lengths, cache)
    return lengths + 1


def _run_layers(
    kernels: Kernels,
    weights: PI05Weights,
    rotary: RotaryTable,
    modulation: Tensor,
    gates: Tensor,
    x: Tensor,
    lengths: Tensor,
    cache: KeyValueCache,
) -> None:
    """All layers, in place on x [B * L, width]; keys and values go behind the first ``lengths`` slots."""
    c = weights.config.expert
    for i, layer in enumerate(weights.expert_layers):
        norm, post = modulation[2 * i], modulation[2 * i + 1]
        kernels.expert_layer(
            x,
            (layer.qkv, layer.o, layer.gate_up, layer.down),
            (norm[0], norm[1], gates[2 * i]),
            (post[0], post[1], gates[2 * i + 1]),
            (rotary.cos, rotary.sin),
            lengths,
            cache.k[i],
            cache.v[i],
            c.num_heads,
            c.attention_scale,
            c.norm_eps,
            cache.counters,
            kernels=kernels,
        )
