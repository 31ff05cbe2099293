# SPDX-License-Identifier: Apache-2.0
"""Moves the memory of tensors to the host and back, under the same tensor objects.

A storage is shrunk to nothing and grown again, so every view of it stays what it was; only the address changes. (torch has no
way to give memory back and keep its address, so whatever remembers addresses, CUDA graphs above all, must be made again.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf_phyai.errors import PhyaiError
from rlinf_phyai.models.pi05.exposed import ExposedMemory

_ALIGNMENT = 256


class HostCopy:
    """Host memory for the owners of some device memory.

    The host memory is kept between the moves: what nobody wrote since the last one need not be copied again.

    Args:
        memory: withdrawn from others before it goes, exposed to them again when it is back.
    """

    def __init__(self, memory: ExposedMemory) -> None:
        self._memory = memory
        self._tensors = list(memory.owners.values())
        self._sizes = [t.untyped_storage().nbytes() for t in self._tensors]
        self._saved: list[int | None] = [None] * len(self._tensors)  # write counter of what the host holds
        self._host: Tensor | None = None
        self.away = False

    @property
    def num_bytes(self) -> int:
        """Bytes of all storages."""
        return sum(self._sizes)

    def save(self) -> int:
        """Copies what changed to the host and frees the device's memory. Returns the bytes copied.

        Raises:
            PhyaiError: the host has no such amount of (on CUDA: page-locked) memory; nothing was moved.
        """
        copied = 0
        counters = self._memory.write_counters()
        for i, (tensor, host) in enumerate(zip(self._tensors, self._parts(), strict=True)):
            if self._saved[i] != counters[i]:
                host.copy_(_bytes_of(tensor), non_blocking=True)
                self._saved[i] = counters[i]
                copied += self._sizes[i]
        self._wait()
        # Before the first one goes: an interrupt in between must not leave weights that seem to be there.
        self.away = True
        self._memory.withdraw()
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(0)
        return copied

    def restore(self) -> None:
        """Takes device memory again and fills it. When it does not fit, everything stays on the host.

        Raises:
            torch.OutOfMemoryError: too little device memory.
        """
        try:
            for tensor, size in zip(self._tensors, self._sizes, strict=True):
                tensor.untyped_storage().resize_(size)
        except BaseException:
            for tensor in self._tensors:
                tensor.untyped_storage().resize_(0)
            raise
        for tensor, host in zip(self._tensors, self._parts(), strict=True):
            _bytes_of(tensor).copy_(host, non_blocking=True)
        self._wait()
        self._memory.expose()
        self.away = False

    def _parts(self) -> list[Tensor]:
        """The host's bytes of each tensor: one allocation, because torch rounds page-locked ones up to powers of two."""
        padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in self._sizes]
        if self._host is None:
            locked = self._tensors[0].is_cuda
            try:
                self._host = torch.empty(sum(padded), dtype=torch.uint8, device="cpu", pin_memory=locked)
            except RuntimeError as error:
                raise PhyaiError(
                    f"offloading needs {sum(padded) / 2**30:.1f} GiB of {'page-locked ' if locked else ''}host memory, which is not "
                    f"there ({error}). Free host memory, or set rollout.enable_offload: False."
                ) from error
        parts = self._host.split(padded)
        return [part[:size] for part, size in zip(parts, self._sizes, strict=True)]

    def _wait(self) -> None:
        if self._tensors[0].is_cuda:
            torch.cuda.synchronize(self._tensors[0].device)


def _bytes_of(tensor: Tensor) -> Tensor:
    """uint8 over the whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
