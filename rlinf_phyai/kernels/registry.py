# SPDX-License-Identifier: Apache-2.0
"""Which backends implement which operation, and how a policy's choice becomes callables.

A backend module may define ``unsupported_reason(device) -> str | None``; it is asked before any of its functions is used.
Modules are imported only when a policy names them, so a machine without Triton or FlashInfer can run the others.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

Op = Callable[..., Any]


@dataclass(frozen=True)
class Kernels:
    """One callable per operation. Signatures and rounding rules: see :mod:`rlinf_phyai.kernels.torch_ops`."""

    linear: Op
    suffix_linear: Op
    linear_gelu: Op
    linear_gated_gelu: Op
    rms_norm: Op
    add_rms_norm: Op
    ada_rms_norm: Op
    add_ada_rms_norm: Op
    layer_norm: Op
    add_layer_norm: Op
    gated_gelu: Op
    rope_cache: Op
    attention: Op
    suffix_attention: Op
    vision_attention: Op
    denoise_update: Op
    expert_layer: Op
    quantize_rows: Op
    add_rms_norm_fp8: Op
    linear_gated_gelu_fp8: Op
    linear_fp8: Op


OPERATIONS: tuple[str, ...] = tuple(f.name for f in fields(Kernels))

_TORCH = "rlinf_phyai.kernels.torch_ops"

BACKENDS: dict[str, dict[str, str]] = {op: {"torch": f"{_TORCH}:{op}"} for op in OPERATIONS}
# The chain of single operations, each from the backend that the policy names for it.
BACKENDS["expert_layer"] = {"torch": "rlinf_phyai.kernels.expert_layer:expert_layer"}


# backend -> module -> {operation: function}; a set when both have the same name
_MORE: dict[str, dict[str, dict[str, str] | set[str]]] = {
    "triton": {
        "triton_sampler": {"denoise_update"},
        "triton_norms": {
            "rms_norm", "add_rms_norm", "ada_rms_norm", "add_ada_rms_norm", "layer_norm", "add_layer_norm",
        },
        "triton_activations": {"gated_gelu", "linear_gelu"},
        "triton_rope": {"rope_cache"},
        "triton_attention": {"attention", "suffix_attention"},
        "triton_suffix_linear": {"suffix_linear"},
        "triton_gated_gemm": {"linear_gated_gelu"},
        "triton_expert": {"expert_layer"},
        "triton_fp8": {"quantize_rows", "add_rms_norm_fp8"},
    },
    "split": {"split_linear": {"linear"}},
    "scaled_mm": {"scaled_mm": {"linear_fp8", "linear_gated_gelu_fp8"}},
    "flash": {"flash": {"attention": "attention", "suffix_attention": "attention", "vision_attention": "vision_attention"}},
    "cudnn": {"flash": {"attention": "attention_cudnn", "vision_attention": "vision_attention_cudnn"}},
    "cublaslt": {"triton_activations": {"linear_gelu": "linear_gelu_epilogue"}},
    "flashinfer": {"flashinfer_ops": {"rms_norm", "gated_gelu"}},
}  # fmt: skip
for _backend, _modules in _MORE.items():
    for _module, _functions in _modules.items():
        for _op in _functions:
            _name = _functions[_op] if isinstance(_functions, dict) else _op
            BACKENDS[_op][_backend] = f"rlinf_phyai.kernels.{_module}:{_name}"


class UnknownKernel(ValueError):
    """An operation or backend that does not exist, or a backend that cannot run on this device."""


def _close(name: str, allowed: list[str]) -> str:
    near = difflib.get_close_matches(name, allowed, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def check_operations(operations: Mapping[str, str]) -> None:
    """Raises UnknownKernel when an operation or a backend name does not exist."""
    for op, backend in operations.items():
        if op not in BACKENDS:
            raise UnknownKernel(
                f"unknown operation {op!r}; operations: {', '.join(OPERATIONS)}.{_close(op, list(BACKENDS))}"
            )
        if backend not in BACKENDS[op]:
            raise UnknownKernel(
                f"operation {op!r} has no backend {backend!r}; it has: {', '.join(sorted(BACKENDS[op]))}."
                f"{_close(backend, list(BACKENDS[op]))}"
            )


def load(op: str, backend: str, device: torch.device) -> tuple[Op | None, str]:
    """The callable, or None and the reason why it cannot run on ``device``."""
    module_name, _, function = BACKENDS[op][backend].partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        return None, f"its module cannot be imported ({error})"
    reason = getattr(module, "unsupported_reason", lambda _device: None)(device)
    return (None, reason) if reason else (getattr(module, function), "")


def resolve(
    operations: Mapping[str, str], device: torch.device, fallback: str | None = None
) -> tuple[Kernels, dict[str, str]]:
    """Kernels for ``device`` and the backend really used per operation.

    Args:
        operations: operation -> backend; operations left out use ``torch``.
        fallback: ``"torch"`` replaces a backend that cannot run on ``device``; None makes that an error.

    Raises:
        UnknownKernel: unknown name, or a backend that cannot run here and no fallback.
    """
    check_operations(operations)
    chosen: dict[str, Op] = {}
    used: dict[str, str] = {}
    for op in OPERATIONS:
        backend = operations.get(op, "torch")
        function, reason = load(op, backend, device)
        if function is None:
            if fallback != "torch":
                others = ", ".join(sorted(set(BACKENDS[op]) - {backend}))
                raise UnknownKernel(
                    f"operation {op!r}: backend {backend!r} cannot run on {device}: {reason}. Choose another backend "
                    f"({others}) or set `fallback: torch` in the policy."
                )
            backend = "torch"
            function, _ = load(op, backend, device)
        assert function is not None
        chosen[op], used[op] = function, backend
    return Kernels(**chosen), used
