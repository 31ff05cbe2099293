# SPDX-License-Identifier: Apache-2.0
"""Reference kernels in plain torch: they run anywhere and define what every other backend must compute.

``x`` has the parameters' type (bfloat16 or float32). Where the actor's eager model rounds an intermediate to that type, so do
these functions, because a value that is rounded at other places is a different value to the importance weight.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""Largest finite value of :data:`FP8`."""
FP8_FLOOR = 1e-12
"""Smallest magnitude that a row is scaled by, so that a row of zeros stays zeros."""


class Quantized(NamedTuple):
    """A matrix in 8 bits: row i is ``values[i] * scale[i]``. values FP8 [M, K], scale float32 [M, 1]."""

    values: Tensor
    scale: Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: x [..., K], weight [N, K], bias [N] -> [..., N]."""
    return F.linear(x, weight, bias)


def suffix_linear(x: Tensor, weight: Tensor) -> Tensor:
    """The same for the expert's few rows: x [M, K] with M = batch x horizon, weight [N, K] -> [M, N]."""
    return F.linear(x, weight)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """tanh-GELU of ``x @ weight.T + bias``."""
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def linear_gated_gelu(x: Tensor, weight: Tensor) -> Tensor:
    """:func:`gated_gelu` of ``x @ weight.T``: x [M, K], weight [2F, K] -> [M, F]."""
    return gated_gelu(linear(x, weight))


def quantize_rows(x: Tensor) -> Quantized:
    """Each row [M, K] scaled so that its largest magnitude becomes 448, then rounded to the nearest FP8 value."""
    top = x.float().abs().amax(dim=1, keepdim=True).clamp_min(FP8_FLOOR)
    return Quantized((x.float() * (FP8_MAX / top)).to(FP8), top * (1.0 / FP8_MAX))


def linear_fp8(x: Quantized, weight: Quantized, dtype: torch.dtype) -> Tensor:
    """:func:`linear` of two quantised matrices: x [M, K], weight [N, K] -> [M, N], products summed in float32, rounded once."""
    product = F.linear(x.values.float(), weight.values.float())
    return (product * x.scale * weight.scale.T).to(dtype)


def linear_gated_gelu_fp8(x: Quantized, weight: Quantized, dtype: torch.dtype) -> Quantized:
    """:func:`linear_gated_gelu` of quantised matrices, its result in ``dtype`` quantised again: [M, K], [2F, K] -> [M, F]."""
    return quantize_rows(gated_gelu(linear_fp8(x, weight, dtype)))


def add_rms_norm_fp8(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Quantized:
    """:func:`add_rms_norm` with a quantised result."""
    return quantize_rows(add_rms_norm(x, y, weight, eps))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * (1 + weight)`` in float32, rounded once. x [..., D], weight float32 [D]."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * (1.0 + weight)).to(x.dtype)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds y to the residual x in place, then :func:`rms_norm` of it."""
    x.add_(y)
    return rms_norm(x, weight, eps)


def ada_rms_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """RMS norm modulated by ``(1 + scale)`` and ``shift`` (float32 [D]), rounded once. x [..., D]."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * (1.0 + scale) + shift).to(x.dtype)


def add_ada_rms_norm(x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """Adds ``y * gate`` (gate [D] in x's type, product rounded) to x in place, then :func:`ada_rms_norm` of it."""
    x.add_(y * gate)
    return ada_rms_norm(x, scale, shift, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last dimension, statistics in float32. weight and bias [D] in x's type."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def add_layer_norm(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Adds y to the residual x in place, then :func:`layer_norm` of it."""
    x.add_(y)
    return layer_norm(x, weight, bias, eps)


def gated_gelu(gate_up: Tensor) -> Tensor:
    """tanh-GELU of the first half (rounded) times the second half. gate_up [..., 2F] -> [..., F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the half-split form. x [B, L, heads, hd]; cos, sin [B or 1, L, 1, hd]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rope_cache(
    qkv: Tensor, cos: Tensor, sin: Tensor, starts: Tensor | None, k_cache: Tensor, v_cache: Tensor, num_q_heads: int
) -> Tensor:
    """Rotates q and k and writes k and v into the cache.

    Args:
        qkv: [B, L, (num_q_heads + 2 * kv_heads) * hd], heads of q, then k, then v.
        cos, sin: [P, hd / 2] tables in qkv's type, row = position.
        starts: int32 [B], position (and cache slot) of the first of the L tokens; None = 0 for all.
        k_cache, v_cache: [B, S, kv_heads, hd]; slot ``starts[b] + l`` is written.
        num_q_heads: may be 0 when qkv holds k and v only.

    Returns:
        Rotated q [B, L, num_q_heads, hd].
    """
    batch, length, _ = qkv.shape
    kv_heads, head_dim = k_cache.shape[2], k_cache.shape[3]
    q, k, v = qkv.view(batch, length, -1, head_dim).split((num_q_heads, kv_heads, kv_heads), dim=2)
    steps = torch.arange(length, device=qkv.device)
    slots = steps[None] if starts is None else starts.long()[:, None] + steps
    cos_rows = torch.cat((cos, cos), dim=-1)[slots].unsqueeze(2)
    sin_rows = torch.cat((sin, sin), dim=-1)[slots].unsqueeze(2)
    rows = torch.arange(batch, device=qkv.device)[:, None]
    k_cache[rows, slots] = _rotate(k, cos_rows, sin_rows)
    v_cache[rows, slots] = v
    return _rotate(q, cos_rows, sin_rows)


def attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """Bidirectional attention of q over the first ``lengths[b]`` keys.

    Args:
        q: [B, L, q_heads, hd]; k, v: [B, S, kv_heads, hd]; lengths: int32 [B], 1 <= lengths <= S.

    Returns:
        [B, L, q_heads, hd]. Softmax in float32, probabilities rounded to q's type.
    """
    batch, length, q_heads, head_dim = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    groups = q_heads // kv_heads
    queries = (
        q.view(batch, length, kv_heads, groups, head_dim).permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, head_dim)
    )
    scores = torch.matmul(queries, k.permute(0, 2, 3, 1)) * scale
    masked = torch.arange(keys, device=q.device)[None] >= lengths[:, None]
    probabilities = torch.softmax(scores.float().masked_fill(masked[:, None, None], -torch.inf), dim=-1).to(q.dtype)
    out = torch.matmul(probabilities, v.transpose(1, 2))
    return (
        out.view(batch, kv_heads, groups, length, head_dim)
        .permute(0, 3, 1, 2, 4)
        .reshape(batch, length, q_heads, head_dim)
    )


suffix_attention = attention


def vision_attention(qkv: Tensor, scale: float) -> Tensor:
    """Full attention inside each image. qkv [n, T, 3, heads, hd] -> [n, T, heads * hd]."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(q, k, v, scale=scale)
    return out.transpose(1, 2).flatten(2)


def denoise_update(
    x: Tensor, velocity: Tensor, noise: Tensor, sigma: Tensor, time: float, delta: float
) -> tuple[Tensor, Tensor]:
    """One flow-SDE transition and its log-probability, all float32 (formula: ``models/pi05/sampler.py``).

    Args:
        x, velocity, noise: [B, H, D]; sigma: [B], 0 = deterministic (ODE) step.
        time, delta: the step's start time and length, float32 values.

    Returns:
        x' [B, H, D] and the per-element log-probability [B, H, D], exactly 0 where sigma is 0.
    """
    sigma = sigma[:, None, None]
    std = math.sqrt(delta) * sigma
    x0 = x - velocity * time
    x1 = x + velocity * (1.0 - time)
    mean = x0 * (1.0 - (time - delta)) + x1 * ((time - delta) - sigma.square() * delta / (2.0 * time))
    return gaussian_step(mean, std, noise)


def gaussian_step(mean: Tensor, std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """``x' = mean + std * noise`` and its log-density per element, exactly 0 where std is 0. std broadcasts to [B, H, D]."""
    new = mean + noise * std
    safe = torch.where(std > 0, std, 1.0)
    log_prob = -torch.log(safe) - _HALF_LOG_2PI - 0.5 * ((new - mean) / safe).square()
    return new, torch.where(std > 0, log_prob, 0.0)
