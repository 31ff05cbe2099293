# SPDX-License-Identifier: Apache-2.0
"""One layer of the action expert as a chain of single operations: the reference of the fused ``triton_expert``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlinf_phyai.kernels import torch_ops


def expert_layer(
    x: Tensor,
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    before_attention: tuple[Tensor, Tensor, Tensor],
    before_mlp: tuple[Tensor, Tensor, Tensor],
    rotary: tuple[Tensor, Tensor],
    starts: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_q_heads: int,
    scale: float,
    eps: float,
    counters: Tensor | None = None,
    kernels: Any = torch_ops,
) -> None:
    """Attention and MLP block of one expert layer, in place on the residual stream.

    Args:
        x: [B * L, width], updated.
        weights: q|k|v [.., width], o [width, heads * hd], gate|up [2F, width], down [width, F].
        before_attention, before_mlp: AdaRMSNorm scale and shift (float32 [width]) and the gate of the block's residual
            ([width], x's type).
        rotary: cos, sin [P, hd / 2].
        starts: int32 [B], valid prefix tokens; the suffix's keys and values are written behind them.
        k_cache, v_cache: this layer's [B, S, kv_heads, hd], prefix filled.
        counters: scratch of the fused form, not used here.
        kernels: where the single operations come from.
    """
    rows, batch = x.shape[0], starts.shape[0]
    length = rows // batch
    h = kernels.ada_rms_norm(x, before_attention[0], before_attention[1], eps)
    qkv = kernels.suffix_linear(h, weights[0]).view(batch, length, -1)
    q = kernels.rope_cache(qkv, *rotary, starts, k_cache, v_cache, num_q_heads)
    attended = kernels.suffix_attention(q, k_cache, v_cache, starts + length, scale).reshape(rows, -1)
    y = kernels.suffix_linear(attended, weights[1])
    h = kernels.add_ada_rms_norm(x, y, before_attention[2], before_mlp[0], before_mlp[1], eps)
    y = kernels.suffix_linear(kernels.gated_gelu(kernels.suffix_linear(h, weights[2])), weights[3])
    x.add_(y * before_mlp[2])
