# SPDX-License-Identifier: Apache-2.0
"""Weight updates: all or nothing, in place, with a state machine that never lets mixed weights be used.

::

    idle --begin--> updating-clean --a write--> updating-dirty --finish--> idle (new version)
                    updating-clean --abort----> idle           --abort or a failing finish--> unusable
    any  --close--> closed (a session in progress is ended first)

A batch is checked completely before its first write: unknown names, duplicates, wrong shapes or types reject the whole batch and
leave the session as it was. Weights that hold NaN or infinity are never committed.

Writes through the views of ``state_dict()`` are noticed by torch's version counters: inside a session they count as an update,
outside of one they make the engine unusable at the next step. Writes that torch does not count (through ``view.data``,
``view.numpy()``, DLPack or a raw pointer) are noticed neither way and must not be made.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from rlinf_phyai.errors import EngineClosedError, EngineUnusableError, WeightUpdateError
from rlinf_phyai.models.pi05.checkpoint import EMBEDDING, LM_HEAD, LoadReport
from rlinf_phyai.models.pi05.finite import all_finite, magnitudes, non_finite

Batch = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]

_RECOVER = "Close this engine, build a new one and load the full weights."
_TIED = (EMBEDDING, LM_HEAD)


@torch.no_grad()
def _copy(targets: list[tuple[str, Tensor, Tensor]]) -> None:
    """Few launches instead of one per parameter: tensors that share types and device are copied together."""
    groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for _, view, tensor in targets:
        views, tensors = groups.setdefault((view.dtype, tensor.dtype, tensor.device), ([], []))
        views.append(view)
        tensors.append(tensor)
    for views, tensors in groups.values():
        torch._foreach_copy_(views, tensors)


def _pairs(batch: Any) -> list[tuple[str, Any]]:
    if isinstance(batch, Mapping):
        return list(batch.items())
    items = list(batch) if isinstance(batch, Iterable) else [batch]
    for item in items:
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise WeightUpdateError(
                f"weight update rejected, nothing of this batch was written: found a {type(item).__name__} in a "
                f"{type(batch).__name__}; expected a mapping of names to tensors, or pairs (name, tensor)."
            )
    return [(name, tensor) for name, tensor in items]


def _memory_problem(tensor: Tensor) -> str | None:
    """Why the values of ``tensor`` cannot be read, or None."""
    if tensor.is_meta or not tensor.numel():
        return None
    storage = tensor.untyped_storage()
    try:
        storage.data_ptr()
    except RuntimeError as error:  # withdrawn: a view of an offloaded engine
        return str(error)
    return None if storage.nbytes() else "found a tensor without memory"


def _whole(version: Any) -> int:
    try:
        return operator.index(version)
    except TypeError:
        raise WeightUpdateError(f"version is {version!r}; expected a whole number or None.") from None


class UpdateState(Enum):
    """Where the weights stand."""

    IDLE = "idle"
    CLEAN = "updating-clean"
    DIRTY = "updating-dirty"
    UNUSABLE = "unusable"
    CLOSED = "closed"


class Parameters(Protocol):
    """What an updatable model offers."""

    views: dict[str, Tensor]
    storages: dict[str, Tensor]

    def write_counters(self) -> tuple[int, ...]: ...

    def is_optional(self, name: str) -> bool: ...


class _NoParameters:
    """What a closed engine holds: nothing that keeps memory alive."""

    def __init__(self) -> None:
        self.views: dict[str, Tensor] = {}
        self.storages: dict[str, Tensor] = {}

    def write_counters(self) -> tuple[int, ...]:
        return ()

    def is_optional(self, name: str) -> bool:
        return False


class WeightUpdater:
    """The state machine. It is not thread-safe: the engine calls it under its lock.

    Args:
        parameters: named views of the live weights.
        canonical_name: maps a checkpoint's or actor's name to a view's name.
        refresh: recomputes everything derived from the weights, in place.
    """

    def __init__(
        self, parameters: Parameters, canonical_name: Callable[[str], str], refresh: Callable[[], None]
    ) -> None:
        self._parameters, self._canonical_name, self._refresh = parameters, canonical_name, refresh
        self.version = 0
        self._state = UpdateState.IDLE
        self._reason = ""
        self._committed = parameters.write_counters()
        self._begun: dict[str, int] = {}
        self._report = LoadReport()

    # -- state --

    @property
    def state(self) -> UpdateState:
        return self._state

    def check_usable(self) -> None:
        """Raises unless a step may run now.

        Raises:
            EngineClosedError, EngineUnusableError, WeightUpdateError (a session is in progress).
        """
        self._check_alive()
        if self._state in (UpdateState.CLEAN, UpdateState.DIRTY):
            raise WeightUpdateError("a weight update is in progress; finish or abort it before the next step.")
        if self._parameters.write_counters() != self._committed:
            self._fail("the weights were written outside of a weight update")
            self._check_alive()

    def _check_alive(self) -> None:
        if self._state is UpdateState.CLOSED:
            raise EngineClosedError("the engine is closed; build a new one.")
        if self._state is UpdateState.UNUSABLE:
            raise EngineUnusableError(f"the engine is unusable: {self._reason}. {_RECOVER}")

    def _fail(self, reason: str) -> None:
        self._state, self._reason = UpdateState.UNUSABLE, reason

    def _check_session(self, call: str) -> None:
        self._check_alive()
        if self._state is UpdateState.IDLE:
            raise WeightUpdateError(f"{call} needs a weight update in progress; call begin_weight_update() first.")

    def _is_dirty(self) -> bool:
        return self._state is UpdateState.DIRTY or self._parameters.write_counters() != self._committed

    def _optional_counters(self) -> dict[str, int]:
        is_optional = self._parameters.is_optional
        return {name: view._version for name, view in self._parameters.views.items() if is_optional(name)}

    # -- session --

    def begin(self) -> None:
        """Opens a session."""
        self._check_alive()
        if self._state is not UpdateState.IDLE:
            raise WeightUpdateError(
                "a weight update is already in progress; finish or abort it before the next one begins."
            )
        self.check_usable()
        self._report = LoadReport()
        self._begun = self._optional_counters()
        self._state = UpdateState.CLEAN

    def update(self, batch: Batch) -> None:
        """Writes one batch of (name, tensor); rejects it as a whole before the first write.

        Raises:
            WeightUpdateError: no session, unknown or repeated name, wrong shape, a tensor that is no dense float. An error
                while writing is passed on and makes the engine unusable.
        """
        self._check_session("update_weights")
        targets = self._check_batch(_pairs(batch))
        if not targets:
            return
        self._state = UpdateState.DIRTY
        try:
            _copy(self._detached(targets))
        except BaseException as error:
            self._fail(f"writing weights failed half-way ({type(error).__name__}: {error})")
            raise
        for name, view, tensor in targets:
            self._report.loaded.append(name)
            if tensor.dtype != view.dtype:
                self._report.casts.append(f"{name}: {tensor.dtype} -> {view.dtype}")

    def _check_batch(self, items: list[tuple[str, Any]]) -> list[tuple[str, Tensor, Tensor]]:
        """(canonical name, view, tensor) of what is to be written. Changes nothing when it raises."""
        views = self._parameters.views
        seen = set(self._report.loaded) | set(self._report.ignored)
        ignored, targets, problems = [], [], []
        for source, tensor in items:
            name = self._canonical_name(source) if isinstance(source, str) else repr(source)
            view = views.get(name)
            if view is None:
                problems.append(f"{source}: the model has no such parameter")
            elif not isinstance(tensor, Tensor):
                problems.append(f"{source}: found a {type(tensor).__name__}, expected a tensor")
            elif name in seen:
                problems.append(f"{source}: {name} came already in this update")
            elif tensor.is_nested:
                problems.append(f"{source}: found a nested tensor, expected a dense one")
            elif tuple(tensor.shape) != tuple(view.shape):
                problems.append(f"{source}: found shape {tuple(tensor.shape)}, expected {tuple(view.shape)}")
            elif not tensor.dtype.is_floating_point:
                problems.append(f"{source}: found dtype {tensor.dtype}, expected a floating-point type")
            elif tensor.layout is not torch.strided:
                problems.append(f"{source}: found a {tensor.layout} tensor, expected a dense one")
            elif tensor.is_meta and not view.is_meta:
                problems.append(f"{source}: found a meta tensor, which has no data")
            elif problem := _memory_problem(tensor):
                problems.append(f"{source}: {problem}")
            else:
                seen.add(name)
                if view.is_meta:
                    ignored.append(name)
                else:
                    targets.append((name, view, tensor))
        problems += self._check_tied(targets)
        if problems:
            raise WeightUpdateError(
                f"weight update rejected, nothing of this batch was written: {'; '.join(problems[:8])}."
            )
        self._report.ignored += ignored
        return targets

    def _detached(self, targets: list[tuple[str, Tensor, Tensor]]) -> list[tuple[str, Tensor, Tensor]]:
        """Targets whose sources no write of this batch can change: those that lie in the live weights are copied first."""
        own = {storage.untyped_storage().data_ptr() for storage in self._parameters.storages.values()}

        def apart(view: Tensor, tensor: Tensor) -> Tensor:
            if tensor.untyped_storage().data_ptr() not in own:
                return tensor
            itself = tensor.data_ptr() == view.data_ptr() and tensor.stride() == view.stride()
            return tensor if itself else tensor.detach().clone()

        return [(name, view, apart(view, tensor)) for name, view, tensor in targets]

    def _check_tied(self, targets: list[tuple[str, Tensor, Tensor]]) -> list[str]:
        """The embedding and the output head are one tensor: when both come, they must hold the same values."""
        values = [tensor for name, _, tensor in targets if name in _TIED]
        if values and any(name in _TIED for name in self._report.loaded):
            values.append(self._parameters.views[EMBEDDING])
        if len(values) < 2:
            return []
        first, second = values[0], values[1]
        if torch.equal(first, second.to(device=first.device, dtype=first.dtype)):
            return []
        return [f"{EMBEDDING} and {LM_HEAD} are one tensor in this model but came with different values"]

    def finish(self, version: int | None, require_all: bool) -> LoadReport:
        """Refreshes what is derived and moves the version.

        Args:
            version: the new version, not below the present one; None counts up by one.
            require_all: every parameter must have come in this session.

        Raises:
            WeightUpdateError: no session, a version below the present one, missing names, or weights that are not finite.
                When something had been written already, the engine is unusable afterwards.
        """
        self._check_session("finish_weight_update")
        report, self._report = self._report, LoadReport()
        dirty = self._is_dirty()
        try:
            self._complete_report(report)
            new_version = self.version + 1 if version is None else _whole(version)
            if new_version < self.version:
                raise WeightUpdateError(
                    f"version {new_version} is below the present version {self.version}; versions never go back."
                )
            absent = report.missing + report.optional
            if require_all and absent:
                raise WeightUpdateError(f"require_all: {len(absent)} parameters did not come, first {absent[:8]}.")
            if dirty:
                found = magnitudes(self._written())
                self._refresh()  # queued behind the reduction, so that the device is waited for once
                if not all_finite(found):
                    self._refuse_non_finite()
            self._committed = self._parameters.write_counters()
            self.version = new_version
            self._state = UpdateState.IDLE
        except BaseException as error:
            self._leave(dirty, f"finish_weight_update failed after writes ({type(error).__name__}: {error})")
            raise
        return report

    def _written(self) -> list[Tensor]:
        """The storages that were written in this session."""
        storages = self._parameters.storages.values()
        return [t for t, before in zip(storages, self._committed, strict=True) if t._version != before]

    def _refuse_non_finite(self) -> NoReturn:
        names = non_finite(self._parameters.views)
        raise WeightUpdateError(
            f"{len(names)} parameters hold NaN or infinity, first {names[:8]}; they are not committed. Find the first "
            "non-finite loss or gradient of the training."
        )

    def _complete_report(self, report: LoadReport) -> None:
        # Optional parameters own their storages, so their counters tell whether a writer filled them through the views.
        counters = self._optional_counters()
        report.loaded += [n for n, c in counters.items() if c != self._begun[n] and n not in report.loaded]
        came = set(report.loaded)
        tied_came = bool(came & set(_TIED))
        for name, view in self._parameters.views.items():
            if name in came or view.is_meta or (name in _TIED and tied_came):
                continue
            (report.optional if self._parameters.is_optional(name) else report.missing).append(name)

    def abort(self) -> None:
        """Ends a session. Without writes the engine goes on with the old weights; with writes it is unusable."""
        self._check_session("abort_weight_update")
        self._report = LoadReport()
        self._leave(self._is_dirty(), "a weight update was aborted after writes")

    def _leave(self, dirty: bool, reason: str) -> None:
        if dirty:
            self._fail(reason)
        else:
            self._state = UpdateState.IDLE

    def fail_session(self, reason: str) -> None:
        """Ends a session whose writer failed outside of these calls."""
        if self._state in (UpdateState.CLEAN, UpdateState.DIRTY):
            self._leave(self._is_dirty(), reason)

    def close(self) -> None:
        """Ends a session, lets go of the weights and refuses everything from now on."""
        self._report = LoadReport()
        self._parameters, self._refresh = _NoParameters(), lambda: None
        self._state = UpdateState.CLOSED
