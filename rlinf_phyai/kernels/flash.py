# SPDX-License-Identifier: Apache-2.0
"""Attention through the fused kernels that torch ships: FlashAttention 2 and cuDNN.

All of them take device lengths, so they can be captured in a CUDA graph and never wait for the host.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from rlinf_phyai.kernels.devices import missing_cuda

__all__ = ["attention", "attention_cudnn", "unsupported_reason", "vision_attention", "vision_attention_cudnn"]


def unsupported_reason(device: torch.device) -> str | None:
    """Why FlashAttention cannot run on ``device``, or None."""
    return missing_cuda(device, "FlashAttention needs", 8)


@lru_cache(maxsize=4096)  # never evicts in practice: captured graphs keep reading these tensors
def _boundaries(batch: int, length: int, device: torch.device) -> Tensor:
    """int32 [batch + 1]: where each sample's rows begin in a packed view of a rectangular batch."""
    return torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)


def attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """See :func:`rlinf_phyai.kernels.torch_ops.attention`; FlashAttention 2 with a key count per sample."""
    batch, length, heads, head_dim = q.shape
    slots, kv_heads = k.shape[1], k.shape[2]
    out = torch.ops.aten._flash_attention_forward(
        q.view(batch * length, heads, head_dim),
        k.view(batch * slots, kv_heads, head_dim),
        v.view(batch * slots, kv_heads, head_dim),
        _boundaries(batch, length, q.device),
        _boundaries(batch, slots, q.device),
        length,
        slots,
        0.0,
        False,
        False,
        scale=scale,
        seqused_k=lengths,
    )[0]
    return out.view(batch, length, heads, head_dim)


def attention_cudnn(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """The same through cuDNN with an additive mask over the slots; masked slots must hold finite values."""
    slots = k.shape[1]
    masked = torch.arange(slots, device=q.device)[None] >= lengths[:, None]
    bias = torch.zeros(masked.shape, dtype=q.dtype, device=q.device).masked_fill_(masked, -torch.inf)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=bias[:, None, None],
            scale=scale,
            enable_gqa=True,
        )
    return out.transpose(1, 2)


def vision_attention(qkv: Tensor, scale: float) -> Tensor:
    """See :func:`rlinf_phyai.kernels.torch_ops.vision_attention`; FlashAttention 2."""
    q, k, v = qkv.unbind(2)
    out = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, False, False, scale=scale
    )[0]
    return out.flatten(2)


def vision_attention_cudnn(qkv: Tensor, scale: float) -> Tensor:
    """The same through cuDNN."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, scale=scale)
    return out.transpose(1, 2).flatten(2)
