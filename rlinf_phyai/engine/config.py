# SPDX-License-Identifier: Apache-2.0
"""What an engine is built from: device, run-time options, and the plugin (model) with its own arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

_PARAMS_DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class DeviceConfig:
    """Where the weights live and in which type.

    Args:
        target: ``"cuda"``, ``"cuda:1"`` or ``"cpu"``.
        params_dtype: type of the large matrices, ``torch.bfloat16`` or ``torch.float32``. The parts that the actor keeps
            in float32 (norms, projections, time MLP, value head, patch embedding) stay float32 in either case.
    """

    target: str = "cuda"
    params_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.params_dtype not in _PARAMS_DTYPES:
            raise ValueError(
                f"DeviceConfig.params_dtype is {self.params_dtype}; allowed: torch.bfloat16 (GPU) or torch.float32 (CPU, tests)."
            )
        try:
            known = torch.device(self.target).type in ("cuda", "cpu")
        except (RuntimeError, TypeError):
            known = False
        if not known:
            raise ValueError(f"DeviceConfig.target is {self.target!r}; allowed: 'cuda', 'cuda:<index>' or 'cpu'.")


@dataclass(frozen=True)
class RuntimeConfig:
    """How the engine runs.

    Args:
        use_cuda_graph: replay captured CUDA graphs instead of launching kernels one by one; ignored on CPU.
        kernel_policy: name of a packaged policy or path of a YAML file; None takes ``PHYAI_KERNEL_CONFIG`` when that is
            set and the torch reference kernels otherwise.
        seed: seeds the engine's own generator, which draws noise that a request leaves out.
        check_finite: check request tensors for NaN and infinity (costs one device synchronisation a call).
        max_graphs: captured graphs kept at most; the least recently used one is dropped.
        progress: show progress bars while loading and capturing.
    """

    use_cuda_graph: bool = True
    kernel_policy: str | Path | None = None
    seed: int = 0
    check_finite: bool = False
    max_graphs: int = 32
    progress: bool = True

    def __post_init__(self) -> None:
        if self.max_graphs < 1:
            raise ValueError(f"RuntimeConfig.max_graphs is {self.max_graphs}; it must be at least 1.")


@dataclass(frozen=True)
class EngineConfig:
    """Device and run-time options of an engine."""

    device: DeviceConfig = field(default_factory=DeviceConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)


@dataclass(frozen=True)
class EngineArgs:
    """Everything that one engine needs: the plugin's name (``"pi05"``), its arguments and the engine configuration."""

    plugin: str
    plugin_args: Any
    config: EngineConfig = field(default_factory=EngineConfig)
