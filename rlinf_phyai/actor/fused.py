# SPDX-License-Identifier: Apache-2.0
"""The frozen prefix through the engine's kernels.

What :mod:`rlinf_phyai.actor.prefix` computes with the actor's own modules, this module computes with fused kernels: stacked
products, norms fused with the residual addition, GELU and product inside one kernel, attention that reads lengths instead of a
mask. The kernels round where the eager modules round. Only a prefix without gradients can run this way. Rescoring and training
both do, so PPO's ratio before the first step stays exactly 1, and the engine's prefix is the same code.

Inside the block of :func:`~rlinf_phyai.actor.prefix.forwards` layers and norms compute other functions, but are still called
as modules: that is what makes FSDP gather their weights. Stacking the weights of a layer costs a copy per call, well below a
hundredth of the products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from rlinf_phyai.actor.prefix import PaddedLayout, forwards, masked_rows_attention, pool
from rlinf_phyai.kernels import Kernels


def fused_vision(vision_tower: Any, kernels: Kernels) -> Any:
    """A context in which SigLIP's encoder layers run on the kernels (no gradients)."""
    return forwards((layer, _encoder_layer(kernels)) for layer in vision_tower.vision_model.encoder.layers)


def _encoder_layer(kernels: Kernels) -> Callable[..., tuple[Tensor]]:
    def forward(self: Any, hidden: Tensor, *unused: Any, **also_unused: Any) -> tuple[Tensor]:
        images, tokens, width = hidden.shape
        x = hidden.contiguous().view(images * tokens, width)
        a = self.self_attn
        h = kernels.layer_norm(x, self.layer_norm1.weight, self.layer_norm1.bias, self.layer_norm1.eps)
        projections = (a.q_proj, a.k_proj, a.v_proj)
        qkv = kernels.linear(h, torch.cat([p.weight for p in projections]), torch.cat([p.bias for p in projections]))
        attended = kernels.vision_attention(qkv.view(images, tokens, 3, a.num_heads, a.head_dim), a.scale)
        y = kernels.linear(attended.reshape(x.shape), a.out_proj.weight, a.out_proj.bias)
        norm, mlp = self.layer_norm2, self.mlp
        h = kernels.add_layer_norm(x, y, norm.weight, norm.bias, norm.eps)
        h = kernels.linear_gelu(h, mlp.fc1.weight, mlp.fc1.bias)
        return (x.add_(kernels.linear(h, mlp.fc2.weight, mlp.fc2.bias)).view(hidden.shape),)

    return forward


@dataclass(frozen=True)
class _Batch:
    """What every layer needs of a micro-batch: valid rows of each sample, rotary tables, and the padded layout."""

    size: int
    lengths: Tensor
    cos: Tensor
    sin: Tensor
    layout: PaddedLayout | None


def run_fused_prefix(
    language_model: Any,
    kernels: Kernels,
    embs: Tensor,
    valid: Tensor,
    masked: Tensor | None,
    layout: PaddedLayout | None,
) -> tuple[DynamicCache, Tensor | None]:
    """As :func:`rlinf_phyai.actor.prefix.run_prefix`, with its arguments and results; no gradients.

    Real and masked rows go through separate calls here too, so that leaving out the masked ones changes no bit of the real ones.
    """
    layers = language_model.layers
    dtype = layers[0].self_attn.q_proj.weight.dtype
    size, length, width = embs.shape
    rows = (embs.to(dtype) if dtype == torch.bfloat16 else embs).contiguous().view(-1, width)
    cos, sin = language_model.rotary_emb(rows, torch.arange(length, device=rows.device)[None])
    half = cos.shape[-1] // 2
    batch = _Batch(
        size, valid.sum(dim=1, dtype=torch.int32), cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous(), layout
    )
    extra = None if masked is None else masked.to(rows.dtype).repeat(size, 1, 1).view(-1, width)
    cache = DynamicCache()
    norms = [norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    replaced = [(norm, _norm(kernels)) for norm in (*norms, language_model.norm)]
    replaced += [(layer, _decoder_layer(kernels, batch, layer is layers[-1])) for layer in layers]
    with forwards(replaced):
        for index, layer in enumerate(layers):
            key, value = layer(rows, needed=extra is not None)
            cache.update(key.transpose(1, 2), value.transpose(1, 2), index)
            if extra is not None:
                extra = layer(extra, real_values=value)
        if extra is None:
            return cache, None
        assert layout is not None
        hidden, padded = language_model.norm(rows), language_model.norm(extra)
    return cache, pool(hidden.view(size, length, width), padded, layout)


def _norm(kernels: Kernels) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor, y: Tensor | None = None) -> Tensor:
        """RMS norm of x, or of x + y (which x becomes)."""
        if y is None:
            return kernels.rms_norm(x, self.weight, self.eps)
        return kernels.add_rms_norm(x, y, self.weight, self.eps)

    return forward


def _decoder_layer(kernels: Kernels, batch: _Batch, last: bool) -> Callable[..., Any]:
    def forward(self: Any, x: Tensor, needed: bool = True, real_values: Tensor | None = None) -> Any:
        if real_values is not None:
            return masked_rows(self, x, real_values)
        return real_rows(self, x, needed)

    def real_rows(self: Any, x: Tensor, needed: bool) -> tuple[Tensor, Tensor]:
        """Keys and values ``[B, L, heads, hd]``; x becomes the layer's output unless that is not ``needed``."""
        a = self.self_attn
        h = self.input_layernorm(x)
        q, k, v = a.q_proj.weight, a.k_proj.weight, a.v_proj.weight
        heads, kv_heads = q.shape[0] // a.head_dim, k.shape[0] // a.head_dim
        if not last:
            qkv = kernels.linear(h, torch.cat((q, k, v)))
        else:  # the same product for the keys and values, whether or not the queries are needed
            qkv = kernels.linear(h, torch.cat((k, v)))
            if needed:
                qkv = torch.cat((kernels.linear(h, q), qkv), dim=1)
            else:
                heads = 0
        length = x.shape[0] // batch.size
        key, value = (x.new_empty(batch.size, length, kv_heads, a.head_dim) for _ in range(2))
        query = kernels.rope_cache(qkv.view(batch.size, length, -1), batch.cos, batch.sin, None, key, value, heads)
        if heads:
            attended = kernels.attention(query, key, value, batch.lengths, a.scaling)
            mlp(self, x, kernels.linear(attended.reshape(x.shape[0], -1), a.o_proj.weight))
        return key, value

    def masked_rows(self: Any, x: Tensor, real_values: Tensor) -> Tensor:
        """Output of the masked rows ``[B * E, width]``; of the last layer that of each sample's padded prompt row only."""
        assert batch.layout is not None
        a = self.self_attn
        value = kernels.linear(self.input_layernorm(x), a.v_proj.weight).view(batch.size, -1, *real_values.shape[2:])
        mean = masked_rows_attention(value.transpose(1, 2), real_values.transpose(1, 2), batch.layout)
        groups = a.q_proj.weight.shape[0] // a.v_proj.weight.shape[0]
        y = kernels.linear(mean.repeat_interleave(groups, dim=1).flatten(1), a.o_proj.weight)
        x = x.view(batch.size, -1, x.shape[-1])
        if last:
            x = x[:, -1:]
        y = y[:, None].expand_as(x).reshape(-1, x.shape[-1])
        return mlp(self, x.reshape(y.shape), y)

    def mlp(self: Any, x: Tensor, y: Tensor) -> Tensor:
        """Adds attention output y and the MLP's output to x in place."""
        h = self.post_attention_layernorm(x, y)
        m = self.mlp
        h = kernels.linear_gated_gelu(h, torch.cat((m.gate_proj.weight, m.up_proj.weight)))
        return x.add_(kernels.linear(h, m.down_proj.weight))

    return forward
