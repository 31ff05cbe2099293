# SPDX-License-Identifier: Apache-2.0
"""Lets RLinf train on a node without accelerator: the demo, the tests, a laptop.

RLinf 0.3.0 asks ``Worker.torch_platform`` for a device module (``torch.cuda`` and its kin) and gets None on such a
node. :func:`install` gives it ``torch.cpu`` with the missing functions, in this process only. Communication then goes
through gloo. RLinf's FSDP2 strategy and bucket syncer work with it; the FSDP1 strategy and the patch syncer need CUDA.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch


class CpuStream(torch.cpu.Stream):  # type: ignore[misc]
    """A stream on which everything has already happened."""

    def synchronize(self) -> None:
        """Return at once."""


class CpuPlatform(types.ModuleType):
    """``torch.cpu`` plus what RLinf calls on a device module beyond it."""

    Stream = CpuStream

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    @staticmethod
    def current_device() -> str:
        return "cpu"

    @staticmethod
    def current_stream(device: Any = None) -> CpuStream:
        return CpuStream()

    @staticmethod
    def empty_cache() -> None:
        """Nothing is cached."""

    @staticmethod
    def ipc_collect() -> None:
        """Nothing is shared."""

    @staticmethod
    def memory_allocated(device: Any = None) -> int:
        return 0

    memory_reserved = max_memory_allocated = memory_allocated

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)


CPU_PLATFORM = CpuPlatform("rlinf_phyai_cpu_platform")


def install() -> bool:
    """Make RLinf use the CPU in this process if it has no accelerator.

    Returns:
        True when the CPU is in use, False when an accelerator is present and RLinf stays as it is. Calling again is fine.
    """
    from rlinf.scheduler import Worker
    from rlinf.scheduler.hardware import AcceleratorType, AcceleratorUtil

    if AcceleratorUtil.get_accelerator_type() != AcceleratorType.NO_ACCEL:
        return False
    if getattr(AcceleratorUtil.get_torch_platform, "_rlinf_phyai", False):
        return True

    def without_accelerator(original: Callable[[Any], Any], value: Any) -> Any:
        @functools.wraps(original)
        def get(accelerator_type: Any) -> Any:
            return value if accelerator_type == AcceleratorType.NO_ACCEL else original(accelerator_type)

        get._rlinf_phyai = True  # type: ignore[attr-defined]
        return staticmethod(get)

    AcceleratorUtil.get_torch_platform = without_accelerator(AcceleratorUtil.get_torch_platform, CPU_PLATFORM)
    AcceleratorUtil.get_device_type = without_accelerator(AcceleratorUtil.get_device_type, "cpu")
    Worker.torch_platform, Worker.torch_device_type = CPU_PLATFORM, "cpu"

    # RLinf loads extensions inside Worker.__new__, just after it gave the worker being built its (missing) platform.
    original_init = Worker.__init__

    @functools.wraps(original_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.__dict__.get("torch_platform", CPU_PLATFORM) is None:
            self.torch_platform, self.torch_device_type = CPU_PLATFORM, "cpu"
        original_init(self, *args, **kwargs)

    Worker.__init__ = init
    return True
