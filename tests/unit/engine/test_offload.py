# SPDX-License-Identifier: Apache-2.0
"""Offload and reload: memory goes and comes back, every bit and every object stays; what is refused in between."""

from __future__ import annotations

import copy
import pickle
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
from rlinf_phyai.models.pi05.exposed import ExposedMemory

from .checkpoints import random_state, write_checkpoint
from .conftest import SIZES, Target, assert_same_bits, rollout_request, rollout_tensors, step_request

MakeEngine = Callable[..., Engine]


def held_bytes(engine: Engine) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in engine._model.weights.memory.owners.values())


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


USES: dict[str, Callable[[torch.Tensor], object]] = {
    "read": lambda view: view + 1,
    "write": lambda view: view.add_(1),
    "write without a view in front": lambda view: torch._foreach_copy_([view], [torch.zeros(view.shape)]),
    "copy from": lambda view: torch.zeros(view.shape).copy_(view),
    "numpy": lambda view: view.numpy(),
    "dlpack": torch.from_dlpack,
    "past the version counter": lambda view: view.data.zero_(),
    "storage": lambda view: view.untyped_storage()[0],
    "address": lambda view: view.data_ptr(),
    "print": repr,
    "one number": lambda view: view.flatten()[0].item(),
    "pickle": pickle.dumps,
    "copy": copy.deepcopy,
    "slice taken now": lambda view: view[:1].sum(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_using_a_view_of_an_offloaded_engine_is_an_error(
    make_engine: MakeEngine, use: Callable[[torch.Tensor], object]
) -> None:
    """It used to read through a null pointer, which ends the process."""
    engine = make_engine()
    view = engine.state_dict()["action_in_proj.bias"]
    before = view.clone()
    use(view.clone())  # nothing but the offload is in the way
    engine.offload()
    with pytest.raises(RuntimeError, match=r"the engine was offloaded\. Call the engine's reload\(\)"):
        use(view)
    assert tuple(view.shape) == tuple(before.shape)
    assert view.dtype == before.dtype
    engine.reload()
    assert torch.equal(view, before)
    engine.step(step_request())  # a refused write was no write


def test_views_of_views_must_be_made_anew(make_engine: MakeEngine) -> None:
    engine = make_engine()
    view = engine.state_dict()["action_in_proj.weight"]
    row = view[3]
    engine.offload()
    engine.reload()
    with pytest.raises(RuntimeError, match="must be made anew"):
        row.sum()
    assert torch.equal(view[3], engine.state_dict()["action_in_proj.weight"][3])


def test_every_view_is_withdrawn_and_good_again(make_engine: MakeEngine, target: Target) -> None:
    engine = make_engine(target=target)
    views = {name: view for name, view in engine.state_dict().items() if not view.is_meta}
    values = {name: view.clone() for name, view in views.items()}
    engine.offload()
    for name, view in views.items():
        with pytest.raises(RuntimeError, match="offloaded"):
            view.sum()
        with pytest.raises(RuntimeError, match="offloaded"):
            torch.equal(values[name], view)
    engine.reload()
    before = rollout_tensors(engine, rollout_request())
    with engine.weight_update():
        for view in views.values():
            view.mul_(0.5)  # as RLinf's patch syncer writes
    after = rollout_tensors(engine, rollout_request())
    assert not torch.equal(after["actions"], before["actions"])


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
    owners = {"first": torch.zeros(1000), "second": torch.ones(3, 7)}
    memory = ExposedMemory(owners, {"part": owners["first"][3:5]})
    host = HostCopy(memory)
    assert host.save() == host.num_bytes == 4000 + 84
    host.restore()
    assert host.save() == 0
    host.restore()
    memory.views["part"].fill_(2.0)  # through a view, as weight syncs write
    assert host.save() == 4000
    host.restore()
    assert owners["first"].sum() == memory.wholes["first"].sum() == 4.0
    assert torch.equal(memory.wholes["second"], torch.ones(3, 7))


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
