# SPDX-License-Identifier: Apache-2.0
"""Gemma-2B prefix over the real tokens of an observation: used cameras, then the prompt.

A batch is rectangular: prompts shorter than the bucket leave padded rows at the end, whose keys no valid row attends to
(``lengths``). The masked camera and the actor's padding up to 200 tokens are not computed here; the critic that needs them adds
them in ``value.py``.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

from rlinf_phyai.kernels import Kernels
from rlinf_phyai.models.pi05 import fp8
from rlinf_phyai.models.pi05.cache import KeyValueCache
from rlinf_phyai.models.pi05.tables import DerivedTables
from rlinf_phyai.models.pi05.weights import PI05Weights


def embed_prompt(weights: PI05Weights, input_ids: Tensor) -> Tensor:
    """Scaled token embeddings: ids int64 [..., L] -> [..., L, width]."""
    return F.embedding(input_ids, weights.embedding) * math.sqrt(weights.config.prefix.width)


def mlp(kernels: Kernels, weights: PI05Weights, tables: DerivedTables, i: int, x: Tensor, y: Tensor) -> Tensor:
    """Adds the attention's output y to the residual x [M, width] in place; returns the MLP of layer i [M, width]."""
    layer, norm, eps = weights.prefix_layers[i], weights.prefix_norms[2 * i + 1], weights.config.prefix.norm_eps
    if tables.fp8_prefix is not None:
        return fp8.mlp(kernels, tables.fp8_prefix.layers[i], x, y, norm, eps)
    h = kernels.add_rms_norm(x, y, norm, eps)
    return kernels.linear(kernels.linear_gated_gelu(h, layer.gate_up), layer.down)


def fill_cache(
    kernels: Kernels, weights: PI05Weights, tables: DerivedTables, x: Tensor, lengths: Tensor, cache: KeyValueCache
) -> None:
    """Runs the prefix as far as the keys and values of the last layer; its output is not needed.

    Args:
        x: embeddings [B, L, width], used as the residual stream (overwritten).
        lengths: int32 [B], valid tokens of each sample.
        cache: filled at slots 0..L-1.
    """
    c = weights.config.prefix
    batch, length, width = x.shape
    rows = x.view(batch * length, width)
    h = kernels.rms_norm(rows, weights.prefix_norms[0], c.norm_eps)
    for i, layer in enumerate(weights.prefix_layers):
        last = i + 1 == c.depth
        q_heads = 0 if last else c.num_heads
        qkv = kernels.linear(h, layer.kv if last else layer.qkv).view(batch, length, -1)
        q = kernels.rope_cache(qkv, tables.rotary.cos, tables.rotary.sin, None, cache.k[i], cache.v[i], q_heads)
        if last:
            return
        attended = kernels.attention(q, cache.k[i], cache.v[i], lengths, c.attention_scale)
        y = kernels.linear(attended.reshape(rows.shape[0], -1), layer.o)
        y = mlp(kernels, weights, tables, i, rows, y)
        h = kernels.add_rms_norm(rows, y, weights.prefix_norms[2 * i + 2], c.norm_eps)
