# SPDX-License-Identifier: Apache-2.0
"""Weight updates: one session at a time, nothing deadlocks, nothing of a session survives it (L3, L4)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf_phyai.engine import (
    EngineClosedError,
    UpdateState,
    WeightUpdateError,
)

from .checkpoints import (
    EXPERT_LM_HEAD,
)
from .conftest import Target, assert_same_bits, rollout_request, step_request
from .weight_updates import (
    BIAS,
    NEW,
    OLD,
    MakeEngine,
    assert_unusable,
    everything_it_computes,
    fresh,
    update,
)

# -- L3: one session at a time, and nothing deadlocks ---------------------------------------------------------------------


def test_l3_order_of_calls(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for call in (lambda: engine.update_weights({}), engine.finish_weight_update, engine.abort_weight_update):
        with pytest.raises(WeightUpdateError, match=r"begin_weight_update\(\) first"):
            call()
    engine.begin_weight_update()
    with pytest.raises(WeightUpdateError, match="already in progress"):
        engine.begin_weight_update()
    for call in (
        lambda: engine.step(step_request()),
        lambda: engine.rollout_step(rollout_request()),
        lambda: engine.value(step_request()),
    ):
        with pytest.raises(WeightUpdateError, match="in progress"):
            call()
    engine.finish_weight_update()
    engine.step(step_request())


def test_l3_states(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert engine.state is UpdateState.IDLE
    engine.begin_weight_update()
    assert engine.state is UpdateState.CLEAN
    engine.update_weights({BIAS: NEW[BIAS]})
    assert engine.state is UpdateState.DIRTY
    engine.finish_weight_update()
    assert engine.state is UpdateState.IDLE
    assert [state.value for state in UpdateState] == ["idle", "updating-clean", "updating-dirty", "unusable", "closed"]


@pytest.mark.parametrize("dirty", [False, True])
def test_l3_close_during_a_session(dirty: bool, make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.begin_weight_update()
    if dirty:
        engine.update_weights({BIAS: NEW[BIAS]})
    engine.close()
    engine.close()
    for call in (
        lambda: engine.update_weights({}),
        engine.finish_weight_update,
        engine.abort_weight_update,
        engine.begin_weight_update,
    ):
        with pytest.raises(EngineClosedError):
            call()
    assert engine.version == 0


def test_l3_close_inside_the_context_manager(make_engine: MakeEngine) -> None:
    engine = make_engine()

    def closing() -> None:
        with engine.weight_update(version=1) as write:
            write({BIAS: NEW[BIAS]})
            engine.close()

    with pytest.raises(EngineClosedError):
        closing()
    assert engine.version == 0


class Background:
    """A call in another thread, waited for with a time limit."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.error: BaseException | None = None
        self.result: Any = None
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:  # handed to the test's thread
            self.error = error

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def join(self, seconds: float = 60) -> Background:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "deadlock"
        return self


def slow_batch(started: threading.Event, go_on: threading.Event) -> Iterator[tuple[str, Tensor]]:
    """A batch whose source delivers its second tensor only after ``go_on``."""
    yield BIAS, NEW[BIAS]
    started.set()
    assert go_on.wait(60)
    yield "action_in_proj.bias", NEW["action_in_proj.bias"]


@pytest.mark.parametrize("call", ["finish", "step", "close", "abort"])
def test_l3_calls_wait_for_an_update_in_flight(call: str, make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    engine.begin_weight_update()
    started, go_on = threading.Event(), threading.Event()
    writer = Background(lambda: engine.update_weights(slow_batch(started, go_on)))
    assert started.wait(60)
    other = Background(
        {
            "finish": engine.finish_weight_update,
            "step": lambda: engine.step(step_request()),
            "close": engine.close,
            "abort": engine.abort_weight_update,
        }[call]
    )
    other._thread.join(0.3)
    assert other.running, f"{call} did not wait"
    go_on.set()
    writer.join()
    other.join()
    assert writer.error is None
    if call == "finish":
        assert sorted(other.result.loaded) == ["action_in_proj.bias", BIAS]
        part = {name: NEW[name] for name in ("action_in_proj.bias", BIAS)}
        assert_same_bits(everything_it_computes(engine), fresh(make_engine, tmp_path, OLD | part, Target()))
    elif call == "step":
        assert isinstance(other.error, WeightUpdateError)
    elif call == "close":
        assert other.error is None
        assert engine.state is UpdateState.CLOSED
    else:
        assert_unusable(engine, "aborted after writes")


def test_l3_an_update_waits_for_a_step_in_flight(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is under way sees old weights only: a session cannot begin before it has ended."""
    engine = make_engine()
    expected = engine.step(step_request())
    assert engine._model is not None
    scheduler = engine._model.scheduler
    original = scheduler.program
    started, go_on = threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        started.set()
        assert go_on.wait(60)
        return original(*args)

    monkeypatch.setattr(scheduler, "program", slow)
    stepping = Background(lambda: engine.step(step_request()))
    assert started.wait(60)
    updating = Background(lambda: update(engine, NEW))
    updating._thread.join(0.3)
    assert updating.running
    go_on.set()
    assert updating.join().error is None
    assert torch.equal(stepping.join().result, expected)


def test_l3_the_lock_is_released_after_every_error(make_engine: MakeEngine) -> None:
    """After each failing call another thread still gets through."""
    engine = make_engine()

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield BIAS, NEW[BIAS]
        raise OSError("the source went away")

    def failing_session() -> None:
        engine.begin_weight_update()
        try:
            engine.update_weights(broken())
        finally:
            engine.abort_weight_update()

    failures: list[tuple[Callable[[], Any], type[BaseException]]] = [
        (failing_session, OSError),
        (lambda: engine.rollout_step(None), ValueError),  # type: ignore[arg-type]
        (engine.finish_weight_update, WeightUpdateError),
    ]
    before = everything_it_computes(engine)
    for call, error in failures:
        with pytest.raises(error):
            call()
        assert Background(lambda: engine.step(step_request())).join().error is None
    assert_same_bits(everything_it_computes(engine), before)


# -- L4: a session's state is cleared on every exit of finish -------------------------------------------------------------


@pytest.mark.parametrize("how", ["success", "older version", "require_all", "wrong type", "abort"])
def test_l4_nothing_of_a_session_survives_it(how: str, make_engine: MakeEngine) -> None:
    """The next session starts empty: the same name may come again, and its report holds its own names only."""
    engine = make_engine()
    update(engine, {}, version=2)
    engine.begin_weight_update()
    engine.update_weights({EXPERT_LM_HEAD: NEW[EXPERT_LM_HEAD]})
    arguments: dict[str, Any] = {
        "success": {}, "older version": {"version": 1}, "require_all": {"require_all": True}, "wrong type": {"version": "x"},
    }.get(how, {})  # fmt: skip
    if how == "success":
        engine.finish_weight_update()
    elif how == "abort":
        engine.abort_weight_update()
    else:
        with pytest.raises((WeightUpdateError, ValueError)):
            engine.finish_weight_update(**arguments)
    assert engine.state is UpdateState.IDLE
    engine.begin_weight_update()
    engine.update_weights({EXPERT_LM_HEAD: NEW[EXPERT_LM_HEAD], BIAS: NEW[BIAS]})
    report = engine.finish_weight_update()
    assert (report.loaded, report.ignored) == ([BIAS], [EXPERT_LM_HEAD])
    assert engine.version == (4 if how == "success" else 3)


def test_versions_never_go_back(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for given, expected in ((None, 1), (5, 5), (5, 5), (None, 6)):
        update(engine, {BIAS: NEW[BIAS]}, given)
        assert engine.version == expected
    with pytest.raises(WeightUpdateError, match=r"5 is below.*6"):
        update(engine, {}, 5)
    assert engine.version == 6
