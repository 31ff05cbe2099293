# SPDX-License-Identifier: Apache-2.0
"""Joins RLinf's weight syncers to the engine's update session.

RLinf's bucket syncer calls ``load_state_dict`` once per bucket; its patch syncer writes into the tensors of
``state_dict()``. Both happen inside one session of the engine, opened before the first transfer and committed after the
last: until then no step sees the new weights, and the version does not move.

A bucket that does not fit is remembered, the remaining buckets are received and dropped, and the session fails at its
end: were the error raised at once, the actor would wait forever for a receiver of its next bucket.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from torch import Tensor

from rlinf_phyai.engine import Engine
from rlinf_phyai.errors import PhyaiError, WeightUpdateError
from rlinf_phyai.models.pi05.checkpoint import LoadReport
from rlinf_phyai.signs import mark

METADATA_NAMES = frozenset({"total_buckets", "syncer_version"})
"""Scalars that RLinf puts beside the weights of a first bucket."""


@dataclass
class WeightSession:
    """One weight sync in progress.

    Attributes:
        version: of the incoming weights; set it before the session ends.
        report: what was written; set by the commit.
        buckets, names: received so far.
    """

    version: int | None = None
    report: LoadReport | None = None
    buckets: int = 0
    names: int = 0
    failure: Exception | None = field(default=None, repr=False)


class EngineWeights:
    """What RLinf's weight syncers see of an engine.

    Args:
        engine: the engine to update in place.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._session: WeightSession | None = None

    def state_dict(self) -> dict[str, Tensor]:
        """Every parameter by the actor's name and in its order, as a view of the live weights.

        Writing to a view is allowed inside :meth:`session` only; the engine notices other writes and stops.
        """
        return self._engine.state_dict()

    def load_state_dict(self, bucket: dict[str, Tensor], strict: bool = False) -> None:
        """Takes one bucket of a sync. Problems are raised at the end of the session, see the module's docstring.

        Args:
            bucket: parameter names and tensors; metadata scalars are left out.
            strict: must be False; a bucket is a part of the parameters.

        Raises:
            WeightUpdateError: called outside of a session, or ``strict``.
        """
        if strict:
            raise WeightUpdateError("load_state_dict takes parts of the weights; call it with strict=False")
        session = self._session
        if session is None:
            raise WeightUpdateError("weights arrived outside of a weight session; open one around the whole sync")
        weights = {name: tensor for name, tensor in bucket.items() if name not in METADATA_NAMES}
        session.buckets += 1
        mark("weight bucket", session.buckets)
        session.names += len(weights)
        if session.failure is not None:
            return
        try:
            self._engine.update_weights(weights)
        except Exception as failure:
            session.failure = failure

    @contextmanager
    def session(self) -> Iterator[WeightSession]:
        """Opens the engine's update; commits at the end, aborts on any failure. An offloaded engine is reloaded first.

        Raises:
            WeightUpdateError: a bucket was rejected, or the sync held no parameter. When weights had been written, the
                engine is unusable afterwards and says so.
        """
        self._engine.reload()
        self._engine.begin_weight_update()
        session = self._session = WeightSession()
        try:
            yield session
            if session.failure is not None:
                raise WeightUpdateError(f"the weight sync failed: {session.failure}") from session.failure
            if session.buckets and not session.names:
                raise WeightUpdateError("the weight sync held no parameter: its buckets contained metadata only")
        except BaseException:
            self._session = None
            self._abort()
            raise
        self._session = None
        session.report = self._engine.finish_weight_update(session.version)

    def _abort(self) -> None:
        with suppress(PhyaiError):  # closed or already unusable: the error that led here says more
            self._engine.abort_weight_update()
