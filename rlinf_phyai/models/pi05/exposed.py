# SPDX-License-Identifier: Apache-2.0
"""Tensors for others over memory that can be taken away: while it is away, every use of one is an error.

A tensor whose storage was shrunk to nothing keeps its shape, and torch's kernels read it through a null pointer: the process dies.
So others never hold the engine's own tensors, but tensors over the same bytes with a storage object of their own. That object can
be told to raise whenever its address is asked for, by whatever operation and through whatever view of it, but it can never be told
to stop; afterwards the same tensors get a new one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

WITHDRAWN = (
    "the weights behind this tensor are on the host: the engine was offloaded. Call the engine's reload(); then the tensors of "
    "state_dict() are good again, and a view made of one (a slice, a transpose) must be made anew"
)


class ExposedMemory:
    """Some owning tensors, and what others see of them.

    Args:
        owners: each with a storage of its own; the compute side uses these and views of them.
        views: tensors over the owners' storages, to hand out; meta tensors pass through.

    Attributes:
        owners: as given. Their version counters tell nothing: others write through ``wholes`` and ``views``.
        wholes: a whole owner each, under the owner's key. A write to it or to one of its views raises its version counter.
        views: what to hand out, under the given names.
    """

    def __init__(self, owners: Mapping[str, Tensor], views: Mapping[str, Tensor]) -> None:
        self.owners = dict(owners)
        self.wholes = {key: _alias(owner) for key, owner in self.owners.items()}
        keys = {owner.untyped_storage()._cdata: key for key, owner in self.owners.items()}
        self.views: dict[str, Tensor] = {}
        self._exposed: list[tuple[str, Tensor]] = list(self.wholes.items())
        for name, view in views.items():
            if view.is_meta:
                self.views[name] = view
                continue
            key = keys[view.untyped_storage()._cdata]
            self.views[name] = _at_the_place_of(view, self.wholes[key])
            self._exposed.append((key, self.views[name]))

    def write_counters(self) -> tuple[int, ...]:
        """torch's version counter of every whole; neither :meth:`withdraw` nor :meth:`expose` moves one."""
        return tuple(whole._version for whole in self.wholes.values())

    def withdraw(self) -> None:
        """From now on any access to the bytes through ``wholes``, ``views`` or views of them raises a RuntimeError.

        numpy arrays, DLPack capsules and addresses that were taken before are beyond torch's reach.
        """
        for whole in self.wholes.values():
            torch._C._set_storage_data_ptr_access_error_msg(whole.untyped_storage()._cdata, WITHDRAWN)

    def expose(self) -> None:
        """Points ``wholes`` and ``views``, the same objects, at the owners' present memory."""
        fresh = {key: _alias(owner) for key, owner in self.owners.items()}
        for key, tensor in self._exposed:
            tensor.data = _at_the_place_of(tensor, fresh[key])  # keeps the object and its version counter


def _alias(owner: Tensor) -> Tensor:
    """A tensor over the same bytes with another storage object and a version counter of its own."""
    return owner if owner.is_meta else torch.from_dlpack(owner)


def _at_the_place_of(view: Tensor, whole: Tensor) -> Tensor:
    return whole.as_strided(view.size(), view.stride(), view.storage_offset())
