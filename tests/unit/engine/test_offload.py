# SPDX-License-Identifier: Apache-2.0
"""Offload and reload: memory goes and comes back, every bit and every object stays; what is refused in between."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlinf_phyai.engine import (
    Engine,
    EngineClosedError,
    EngineOffloadedError,
    EngineUnusableError,
    RequestError,
    WeightUpdateError,
)
from rlinf_phyai.engine.offload import HostCopy

from .checkpoints import random_state, write_checkpoint
from .conftest import SIZES, Target, assert_same_bits, rollout_request, rollout_tensors, step_request

MakeEngine = Callable[..., Engine]


def held_bytes(engine: Engine) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in engine._model.weights.storages.values())


def test_a_round_trip_changes_nothing(make_engine: MakeEngine, target: Target) -> None:
    engine = make_engine(target=target)
    before = rollout_tensors(engine, rollout_request())
    views = engine.state_dict()
    values = {name: view.clone() for name, view in views.items() if not view.is_meta}
    size = held_bytes(engine)
    assert size > 0
    for _ in range(2):
        engine.offload()
        assert engine.offloaded
        assert held_bytes(engine) == 0
        assert not engine.captured_graphs()
        engine.reload()
        assert not engine.offloaded
        assert held_bytes(engine) == size
        assert_same_bits(rollout_tensors(engine, rollout_request()), before)
    for name, view in engine.state_dict().items():
        assert view is views[name]
        if not view.is_meta:
            assert torch.equal(view, values[name]), name


def test_twice_is_once(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.reload()
    engine.offload()
    engine.offload()
    engine.reload()
    engine.reload()
    engine.step(step_request())


def test_an_offloaded_engine_refuses_to_work(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.offload()
    for call in (
        lambda: engine.step(step_request()),
        lambda: engine.rollout_step(rollout_request()),
        lambda: engine.value(step_request()),
        engine.state_dict,
        engine.begin_weight_update,
    ):
        with pytest.raises(EngineOffloadedError, match=r"reload\(\) first"):
            call()
    engine.reload()
    engine.step(step_request())


def test_not_in_the_middle_of_an_update(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.begin_weight_update()
    for call in (engine.offload, engine.reload):
        with pytest.raises(WeightUpdateError, match="in progress"):
            call()
    engine.abort_weight_update()
    engine.offload()


def test_closing_an_offloaded_engine(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.offload()
    engine.close()
    assert not engine.offloaded
    for call in (engine.offload, engine.reload):
        with pytest.raises(EngineClosedError):
            call()


def test_updates_between_two_offloads_survive(make_engine: MakeEngine, target: Target, tmp_path: Path) -> None:
    """After an update every result is a fresh engine's, offloaded or not."""
    engine = make_engine(target=target)
    engine.rollout_step(rollout_request())
    engine.offload()
    engine.reload()
    state = random_state(SIZES, seed=8)
    with engine.weight_update(5) as update:
        update(state)
    engine.offload()
    engine.reload()
    assert engine.version == 5
    fresh = make_engine(write_checkpoint(tmp_path, state, SIZES), target=target)
    assert_same_bits(rollout_tensors(engine, rollout_request()), rollout_tensors(fresh, rollout_request()))


def test_writes_past_the_engine_are_still_noticed(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.offload()
    engine.reload()
    engine.step(step_request())  # moving the weights was no write
    engine.state_dict()["action_in_proj.bias"].add_(1.0)
    with pytest.raises(EngineUnusableError, match="outside of a weight update"):
        engine.offload()


def test_an_empty_critic_stays_empty(make_engine: MakeEngine, tmp_path: Path) -> None:
    state = {name: t for name, t in random_state(SIZES, seed=3).items() if not name.startswith("value_head.")}
    engine = make_engine(write_checkpoint(tmp_path, state, SIZES), value_mode="mean_token")
    engine.offload()
    engine.reload()
    with pytest.raises(RequestError, match="the critic has no weights yet"):
        engine.value(step_request())


def test_only_what_changed_is_copied_again() -> None:
    first, second = torch.zeros(1000), torch.ones(3, 7)
    host = HostCopy((first, second))
    assert host.save() == host.num_bytes == 4000 + 84
    host.restore()
    assert host.save() == 0
    host.restore()
    first[3:5] = 2.0  # through a view, as weight syncs write
    assert host.save() == 4000
    host.restore()
    assert first.sum() == 4.0
    assert torch.equal(second, torch.ones(3, 7))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("no memory"), torch.OutOfMemoryError()])
def test_a_reload_that_is_cut_short_leaves_the_engine_offloaded(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    engine = make_engine()
    before = rollout_tensors(engine, rollout_request())
    engine.offload()

    def fail() -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(engine._model.tables, "refresh", fail)
        with pytest.raises(type(error)):
            engine.reload()
    assert engine.offloaded
    assert held_bytes(engine) == 0
    engine.reload()
    assert_same_bits(rollout_tensors(engine, rollout_request()), before)


def test_steps_offloads_updates_and_close_from_many_threads(make_engine: MakeEngine) -> None:
    """Every call answers or is refused by name; the engine ends idle with right results, and closes among them."""
    engine, state = make_engine(), random_state(SIZES, seed=3)  # the checkpoint's own weights: results stay
    before = rollout_tensors(engine, rollout_request())
    refused: set[type[BaseException]] = set()
    stop = threading.Event()

    def update() -> None:
        with engine.weight_update() as write:
            write(state)

    def repeat(call: Callable[[], object]) -> None:
        while not stop.is_set():
            try:
                call()
            except Exception as error:
                refused.add(type(error))

    calls = (lambda: engine.step(step_request()), engine.offload, engine.reload, update, engine.state_dict)
    threads = [threading.Thread(target=repeat, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    stop.set()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert refused <= {EngineOffloadedError, WeightUpdateError}
    engine.reload()
    assert_same_bits(rollout_tensors(engine, rollout_request()), before)
