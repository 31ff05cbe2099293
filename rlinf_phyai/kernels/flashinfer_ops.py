# SPDX-License-Identifier: Apache-2.0
"""Kernels of the optional package FlashInfer. They are compiled on first use (tens of seconds, then cached on disk).

Attention is planned with host lengths, which a CUDA graph cannot follow: the plan assumes full rows, so this backend takes
batches whose samples all have the same number of tokens and is not part of the default policy.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rlinf_phyai.kernels.devices import missing_cuda

__all__ = ["FlashInferPrefill", "gated_gelu", "rms_norm", "unsupported_reason"]


def unsupported_reason(device: torch.device) -> str | None:
    """Why FlashInfer cannot run on ``device``, or None."""
    if reason := missing_cuda(device, "FlashInfer needs"):
        return reason
    try:
        import flashinfer  # noqa: F401
    except ImportError as error:
        return f"the package flashinfer-python cannot be imported ({error}); install rlinf-phyai[flashinfer]"
    return None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See :func:`rlinf_phyai.kernels.torch_ops.rms_norm`. FlashInfer reads the weight in x's type: it is rounded first."""
    import flashinfer

    return flashinfer.norm.gemma_rmsnorm(x.view(-1, x.shape[-1]), weight.to(x.dtype), eps).view(x.shape)


def gated_gelu(gate_up: Tensor) -> Tensor:
    """See :func:`rlinf_phyai.kernels.torch_ops.gated_gelu`; the GELU is not rounded before the product."""
    import flashinfer

    return flashinfer.activation.gelu_tanh_and_mul(gate_up)


class FlashInferPrefill:
    """Ragged prefill attention planned for one shape (``backend``: ``fa2`` or ``fa3``)."""

    def __init__(self, batch: int, length: int, slots: int, heads: int, kv_heads: int, head_dim: int, scale: float,
                 lengths: list[int], device: torch.device, backend: str) -> None:  # fmt: skip
        import flashinfer

        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
        self._wrapper: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
        # One page per sample: a page is the sample's row of the cache and the last page's length its valid keys.
        rows = torch.arange(batch + 1, dtype=torch.int32)
        self._wrapper.plan(
            rows * length, rows, rows[:batch], torch.tensor(lengths, dtype=torch.int32), heads, kv_heads, head_dim, slots,
            causal=False, sm_scale=scale, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        )  # fmt: skip

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, L, heads, hd]; k, v [B, S, kv_heads, hd] -> [B, L, heads, hd]."""
        return self._wrapper.run(q.view(-1, *q.shape[2:]), (k, v)).view(q.shape)


@lru_cache(maxsize=1)
def version() -> str:
    """FlashInfer's version, for benchmark records."""
    import flashinfer

    return str(flashinfer.__version__)
