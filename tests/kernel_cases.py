# SPDX-License-Identifier: Apache-2.0
"""Inputs for every kernel: the interpreter checks them on the CPU at small sizes, the GPU tests at small and real ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sizes:
    """Batch, tokens, query heads, KV heads, head width, model width, MLP width, cache slots."""

    batch: int = 3
    length: int = 5
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    width: int = 48
    hidden: int = 24
    slots: int = 90


TINY = Sizes()
ONE = Sizes(batch=1, length=10)
REAL_SUFFIX = Sizes(batch=5, length=10, q_heads=8, kv_heads=1, head_dim=256, width=1024, hidden=4096, slots=546)
REAL_PREFIX = Sizes(batch=2, length=536, q_heads=8, kv_heads=1, head_dim=256, width=2048, hidden=16384, slots=546)
REAL_VISION = Sizes(batch=2, length=256, q_heads=16, kv_heads=16, head_dim=72, width=1152, hidden=4304, slots=256)


class Draw:
    """Random tensors of one device and type."""

    def __init__(self, sizes: Sizes, device: str, dtype: torch.dtype, seed: int = 0) -> None:
        self.s, self.device, self.dtype = sizes, device, dtype
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randn(*shape, generator=self._generator) * scale
        return values.to(self.device, dtype or self.dtype)

    def f32(self, *shape: int) -> Tensor:
        return self(*shape, dtype=torch.float32)

    def starts(self, room: int) -> Tensor:
        """int32 [B]: the first as large as fits, the others smaller, the last 1."""
        largest = self.s.slots - room
        values = [max(1, largest - 17 * i) for i in range(self.s.batch)]
        if self.s.batch > 1:
            values[-1] = 1
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def caches(self) -> tuple[Tensor, Tensor]:
        shape = (self.s.batch, self.s.slots, self.s.kv_heads, self.s.head_dim)
        return self(*shape), self(*shape)

    def rotary(self) -> tuple[Tensor, Tensor]:
        angle = torch.rand(self.s.slots, self.s.head_dim // 2, generator=self._generator) * 6.28
        return angle.cos().to(self.device, self.dtype), angle.sin().to(self.device, self.dtype)


def rows(d: Draw) -> tuple[int, int]:
    return d.s.batch * d.s.length, d.s.width


def _rope(d: Draw, with_starts: bool, q_heads: int | None = None) -> tuple[Any, ...]:
    s = d.s
    heads = s.q_heads if q_heads is None else q_heads
    qkv = d(s.batch, s.length, (heads + 2 * s.kv_heads) * s.head_dim)
    return qkv, *d.rotary(), d.starts(s.length) if with_starts else None, *d.caches(), heads


def _attention(d: Draw) -> tuple[Any, ...]:
    s = d.s
    return d(s.batch, s.length, s.q_heads, s.head_dim), *d.caches(), d.starts(0), s.head_dim**-0.5


OPERATIONS: dict[str, tuple[str, Callable[[Draw], tuple[Any, ...]]]] = {
    "rms_norm": ("rms_norm", lambda d: (d(*rows(d)), d.f32(d.s.width), 1e-6)),
    "add_rms_norm": ("add_rms_norm", lambda d: (d(*rows(d)), d(*rows(d)), d.f32(d.s.width), 1e-6)),
    "ada_rms_norm": ("ada_rms_norm", lambda d: (d(*rows(d)), d.f32(d.s.width), d.f32(d.s.width), 1e-6)),
    "add_ada_rms_norm": (
        "add_ada_rms_norm",
        lambda d: (d(*rows(d)), d(*rows(d)), d(d.s.width), d.f32(d.s.width), d.f32(d.s.width), 1e-6),
    ),
    "layer_norm": ("layer_norm", lambda d: (d(*rows(d)), d(d.s.width), d(d.s.width), 1e-6)),
    "add_layer_norm": ("add_layer_norm", lambda d: (d(*rows(d)), d(*rows(d)), d(d.s.width), d(d.s.width), 1e-6)),
    "gated_gelu": ("gated_gelu", lambda d: (d(rows(d)[0], 2 * d.s.hidden, scale=3.0),)),
    "linear_gelu": (
        "linear_gelu",
        lambda d: (d(*rows(d)), d(d.s.hidden, d.s.width, scale=d.s.width**-0.5), d(d.s.hidden)),
    ),
    "suffix_linear": ("suffix_linear", lambda d: (d(*rows(d)), d(d.s.hidden, d.s.width, scale=d.s.width**-0.5))),
    "rope_cache": ("rope_cache", lambda d: _rope(d, False)),
    "rope_cache at starts": ("rope_cache", lambda d: _rope(d, True)),
    "rope_cache without q": ("rope_cache", lambda d: _rope(d, True, 0)),
    "attention": ("attention", _attention),
    "suffix_attention": ("suffix_attention", _attention),
    "vision_attention": (
        "vision_attention",
        lambda d: (d(d.s.batch, d.s.length, 3, d.s.q_heads, d.s.head_dim), d.s.head_dim**-0.5),
    ),
}
"""case -> (operation, inputs)"""


def run_both(op: str, kernel: Callable[..., Any], inputs: tuple[Any, ...]) -> list[tuple[Tensor, Tensor]]:
    """(got, reference) of the result and of every tensor that the operation may write."""
    from rlinf_phyai.kernels import torch_ops

    ours, theirs = ([v.clone() if isinstance(v, Tensor) else v for v in inputs] for _ in range(2))
    pairs = [(kernel(*ours), getattr(torch_ops, op)(*theirs))]
    return pairs + [
        (a, b) for a, b in zip(ours, theirs, strict=True) if isinstance(a, Tensor) and a.is_floating_point()
    ]


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want|| in float64; shape and type must agree, NaN is infinite."""
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    if want.numel() == 0:
        return 0.0
    error = float((got.double() - want.double()).norm() / want.double().norm())
    return error if error == error else float("inf")


def expert_layer_inputs(d: Draw) -> tuple[Any, ...]:
    """Arguments of ``expert_layer``."""
    s = d.s
    heads = (s.q_heads + 2 * s.kv_heads) * s.head_dim
    shapes = (heads, s.width), (s.width, s.q_heads * s.head_dim), (2 * s.hidden, s.width), (s.width, s.hidden)
    weights = tuple(d(n, k, scale=k**-0.5) for n, k in shapes)
    norms = [(d.f32(s.width), d.f32(s.width), d(s.width)) for _ in range(2)]
    starts = d.starts(s.length)
    return d(*rows(d)), weights, *norms, d.rotary(), starts, *d.caches(), s.q_heads, s.head_dim**-0.5, 1e-6
