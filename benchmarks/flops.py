# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of one step, counted from the shapes (multiply and add = 2)."""

from __future__ import annotations

from rlinf_phyai.models.pi05 import PI05Config
from rlinf_phyai.models.pi05.configuration import GemmaConfig


def _gemma_layer(c: GemmaConfig, rows: int) -> int:
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    return 2 * rows * (c.width * (q + 2 * kv) + q * c.width + 3 * c.width * c.mlp_dim)


def stage_flops(config: PI05Config, batch: int, cameras: int, prompt: int, num_steps: int) -> dict[str, int]:
    """FLOPs per stage of a batch; the last prefix layer counts only its keys and values."""
    v, p, e = config.vision, config.prefix, config.expert
    image_rows = batch * cameras * v.num_tokens
    vision = 2 * image_rows * (3 * v.patch_size**2 * v.hidden_size + v.hidden_size * p.width)
    vision += v.num_layers * 2 * image_rows * (4 * v.hidden_size**2 + 2 * v.hidden_size * v.intermediate_size)
    vision += v.num_layers * 4 * image_rows * v.num_tokens * v.hidden_size
    length = cameras * v.num_tokens + prompt
    rows = batch * length
    attention = 4 * rows * length * p.num_heads * p.head_dim
    prefix = (p.depth - 1) * (_gemma_layer(p, rows) + attention) + 2 * rows * p.width * 2 * p.num_kv_heads * p.head_dim
    suffix_rows = batch * config.action_horizon
    suffix_attention = 4 * suffix_rows * (length + config.action_horizon) * e.num_heads * e.head_dim
    expert = num_steps * e.depth * (_gemma_layer(e, suffix_rows) + suffix_attention)
    return {"vision": vision, "prefix": prefix, "expert": expert}
