# SPDX-License-Identifier: Apache-2.0
"""The critic, exactly as the actor computes it, including the actor's padded prefix.

The actor's prefix has ``num_cameras`` image blocks and ``tokenizer_max_length`` prompt positions. Its masked rows (masked cameras,
prompt padding) see every key with equal weight, so their attention output is the mean of V over *all* rows, and they enter the
mean that the critic reads. All prompt padding of a sample is one and the same row at every layer, and so are the masked cameras
among each other; one row and one image block stand for them, with multiplicities.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rlinf_phyai.kernels import Kernels
from rlinf_phyai.models.pi05.cache import KeyValueCache
from rlinf_phyai.models.pi05.prefix import embed_prompt, mlp
from rlinf_phyai.models.pi05.tables import DerivedTables
from rlinf_phyai.models.pi05.weights import PI05Weights

_PAD_ID = 0


def critic(weights: PI05Weights, pooled: Tensor) -> Tensor:
    """Value head: float32 [B, width] -> [B]; linear layers with ReLU between."""
    x = pooled
    for i, (weight, bias) in enumerate(weights.value_head):
        x = F.linear(x, weight, bias)
        if i + 1 < len(weights.value_head):
            x = F.relu(x)
    return x[:, 0]


def value_from_expert(weights: PI05Weights, expert_outputs: list[Tensor]) -> Tensor:
    """Critic after the expert, one value per denoise step: N tensors float32 [B, H, width] -> [B, N]."""
    c = weights.config
    horizon = c.action_chunk if c.chunk_critic_input else c.action_horizon
    return torch.stack([critic(weights, output[:, :horizon].mean(dim=1)) for output in expert_outputs], dim=1)


def fill_cache_and_value(
    kernels: Kernels,
    weights: PI05Weights,
    tables: DerivedTables,
    x: Tensor,
    lengths: Tensor,
    cache: KeyValueCache,
    cameras: int,
) -> Tensor:
    """Runs the whole prefix, fills the cache and returns the critic's value.

    Args:
        x: embeddings [B, L, width] of the used cameras and the prompt (overwritten).
        lengths: int32 [B], valid tokens. cache: filled at slots 0..L-1. cameras: used cameras.

    Returns:
        float32 [B, 1].
    """
    c, config = weights.config.prefix, weights.config
    batch, length, width = x.shape
    tokens = config.vision.num_tokens
    masked_cameras = config.num_cameras - cameras
    total = config.num_cameras * tokens + config.tokenizer_max_length
    padding = (cameras * tokens + config.tokenizer_max_length - lengths).float()  # padded prompt positions [B]

    valid = (torch.arange(length, device=x.device)[None] < lengths[:, None]).unsqueeze(-1)
    share = torch.tensor(1.0 / total, dtype=torch.float32, device="cpu")  # a probability in the actor's attention
    weight = float(share.to(weights.params_dtype))
    norms, main = weights.prefix_norms, batch * length
    # One residual stream: the real rows of all samples, then the extra rows of all samples (the padded row is the last of each).
    rows = torch.cat((x.view(main, width), _extra_rows(weights, tables, batch, masked_cameras)))
    h = kernels.rms_norm(rows, norms[0], c.norm_eps)
    for i, layer in enumerate(weights.prefix_layers):
        qkv = kernels.linear(h[:main], layer.qkv).view(batch, length, -1)
        q = kernels.rope_cache(qkv, tables.rotary.cos, tables.rotary.sin, None, cache.k[i], cache.v[i], c.num_heads)
        attended = kernels.attention(q, cache.k[i], cache.v[i], lengths, c.attention_scale)

        extra_v = kernels.linear(h[main:], layer.v).view(batch, -1, layer.v.shape[0])
        value_sum = torch.where(valid, cache.v[i][:, :length].flatten(2), 0).sum(dim=1, dtype=torch.float32)
        value_sum = value_sum + masked_cameras * extra_v[:, :-1].sum(dim=1, dtype=torch.float32)
        value_sum = value_sum + padding[:, None] * extra_v[:, -1].float()
        mean_v = (weight * value_sum).to(weights.params_dtype).view(batch, c.num_kv_heads, 1, c.head_dim)
        heads = mean_v.expand(-1, -1, c.num_heads // c.num_kv_heads, -1).reshape(batch, -1)
        if i + 1 == c.depth:  # masked cameras are not pooled: their rows end with the last layer's V
            rows = torch.cat((rows[:main], rows[main:].view(batch, -1, width)[:, -1]))

        y = torch.empty_like(rows)
        torch.mm(attended.reshape(main, -1), layer.o.t(), out=y[:main])
        y[main:].view(batch, -1, width).copy_(kernels.linear(heads, layer.o)[:, None])
        y = mlp(kernels, weights, tables, i, rows, y)
        h = kernels.add_rms_norm(rows, y, norms[2 * i + 2], c.norm_eps)
    pooled = _pool(config.value_mode, h[:main].view(batch, length, width), h[main:], lengths, padding, valid)
    return critic(weights, pooled)[:, None]


def _extra_rows(weights: PI05Weights, tables: DerivedTables, batch: int, masked_cameras: int) -> Tensor:
    """Embeddings [B * E, width] of one masked camera, if there is any, and of one padded prompt position per sample."""
    pad = embed_prompt(weights, torch.full((1,), _PAD_ID, dtype=torch.int64, device=weights.device))
    if masked_cameras and tables.masked_tokens is not None:
        pad = torch.cat((tables.masked_tokens, pad))
    return pad.repeat(batch, 1)


def _pool(mode: str | None, output: Tensor, padded: Tensor, lengths: Tensor, padding: Tensor, valid: Tensor) -> Tensor:
    """Critic input float32 [B, width] from the final-norm rows [B, L, width] and the padded row [B, width]."""
    if mode == "first_token":
        return output[:, 0].float()
    if mode == "last_token":
        last = output[torch.arange(output.shape[0], device=output.device), lengths.long() - 1]
        return torch.where(padding[:, None] > 0, padded, last).float()
    total = torch.where(valid, output, 0).sum(dim=1, dtype=torch.float32) + padding[:, None] * padded.float()
    return (total / (lengths + padding)[:, None]).to(output.dtype).float()
