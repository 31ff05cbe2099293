# SPDX-License-Identifier: Apache-2.0
"""Weight updates: all or nothing, in place. The names of the tests give the lesson (L1-L6, L10, L12) that they stand for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf_phyai.engine import (
    Engine,
    EngineClosedError,
    EngineUnusableError,
    UpdateState,
    WeightUpdateError,
)
from rlinf_phyai.engine import weight_update as weight_update_module

from .checkpoints import (
    EMBEDDING,
    EXPERT,
    EXPERT_LM_HEAD,
    LANGUAGE,
    LM_HEAD,
    TOWER,
    VLM,
    random_state,
    write_checkpoint,
)
from .conftest import SIZES, Target, assert_same_bits, rollout_request, rollout_tensors, step_request

MakeEngine = Callable[..., Engine]

OLD = random_state(SIZES, seed=3)  # the weights of the ``checkpoint`` fixture
NEW = random_state(SIZES, seed=4)
BIAS = "action_out_proj.bias"


def starts(*stems: str) -> Callable[[str], bool]:
    return lambda name: name.startswith(stems)


GROUPS: dict[str, Callable[[str], bool]] = {
    "vision-embeddings": starts(TOWER + "embeddings."),
    "vision-layers": starts(TOWER + "encoder.", TOWER + "post_layernorm."),
    "projector": starts(VLM + "model.multi_modal_projector."),
    "embedding": lambda name: name in (EMBEDDING, LM_HEAD),
    "prefix-layers": lambda name: name.startswith(LANGUAGE + "layers.") and "norm" not in name,
    "prefix-norms": lambda name: name.startswith(LANGUAGE) and "norm" in name,
    "expert-layers": lambda name: name.startswith(EXPERT + "model.layers.") and "norm" not in name,
    "expert-norms": lambda name: name.startswith(EXPERT) and "norm" in name,
    "action-projections": starts("action_in_proj.", "action_out_proj."),
    "time-mlp": starts("time_mlp_in.", "time_mlp_out."),
    "value-head": starts("value_head."),
    "what-RLinf-syncs": starts(EXPERT, "action_", "time_", "value_head."),
    "everything": starts(""),
}


def group(name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in NEW.items() if GROUPS[name](key)}


def everything_it_computes(engine: Engine) -> dict[str, Tensor]:
    """Results of all entry points: two step counts, step, and the value by the prefix alone."""
    found = rollout_tensors(engine, rollout_request(batch=3))
    other = rollout_tensors(engine, rollout_request(num_steps=2, sde_step=None))
    extra = {"step": engine.step(step_request()), "value": engine.value(step_request(batch=4))}
    return found | {f"{name} N=2": tensor for name, tensor in other.items()} | extra


def fresh(make_engine: MakeEngine, directory: Path, state: dict[str, Tensor], target: Target) -> dict[str, Tensor]:
    engine = make_engine(write_checkpoint(directory, state, SIZES), target=target)
    return everything_it_computes(engine)


def update(engine: Engine, batch: Any, version: int | None = None) -> None:
    with engine.weight_update(version) as write:
        write(batch)


# -- L5: after an update every result is that of a fresh engine -----------------------------------------------------------


def test_groups_cover_every_parameter() -> None:
    parts = [name for name in GROUPS if name not in ("what-RLinf-syncs", "everything")]
    assert {key for part in parts for key in group(part)} | {EXPERT_LM_HEAD} == set(NEW)


@pytest.mark.parametrize("part", list(GROUPS))
def test_l5_update_equals_a_fresh_engine(part: str, make_engine: MakeEngine, target: Target, tmp_path: Path) -> None:
    engine = make_engine(target=target)
    before = everything_it_computes(engine)  # fills every cache, table, buffer and graph with the old weights
    pointers = {name: view.data_ptr() for name, view in engine.state_dict().items()}
    graphs = {key: id(graph) for key, graph in engine.captured_graphs().items()}
    update(engine, group(part))
    after = everything_it_computes(engine)
    assert_same_bits(after, fresh(make_engine, tmp_path, OLD | group(part), target))
    assert any(not torch.equal(after[name], before[name]) for name in after), f"{part} changes no result"
    assert {name: view.data_ptr() for name, view in engine.state_dict().items()} == pointers
    assert {key: id(graph) for key, graph in engine.captured_graphs().items()} == graphs


@pytest.mark.parametrize("part", ["vision-layers", "prefix-layers", "expert-norms", "time-mlp", "value-head"])
def test_l5_each_single_parameter_of_a_group_counts(part: str, make_engine: MakeEngine) -> None:
    """No parameter is written but never read: each one alone changes some result."""
    engine = make_engine()
    previous = everything_it_computes(engine)
    for name, tensor in group(part).items():
        update(engine, {name: tensor})
        found = everything_it_computes(engine)
        # A key bias shifts all logits of a query alike, so softmax hides it except for rounding.
        if not name.endswith("k_proj.bias"):
            assert any(not torch.equal(found[key], previous[key]) for key in found), name
        previous = found


def test_l5_no_op_updates_change_nothing(make_engine: MakeEngine, target: Target) -> None:
    engine = make_engine(target=target)
    before = everything_it_computes(engine)
    update(engine, {})
    assert_same_bits(everything_it_computes(engine), before)
    update(engine, OLD)
    assert_same_bits(everything_it_computes(engine), before)
    update(engine, {name: view.clone() for name, view in engine.state_dict().items() if not view.is_meta})
    assert_same_bits(everything_it_computes(engine), before)
    assert engine.version == 3


def test_l5_back_and_forth(make_engine: MakeEngine, target: Target) -> None:
    engine = make_engine(target=target)
    before = everything_it_computes(engine)
    update(engine, NEW)
    assert not torch.equal(everything_it_computes(engine)["step"], before["step"])
    update(engine, OLD)
    assert_same_bits(everything_it_computes(engine), before)


def test_l5_in_place_writes_through_the_views(make_engine: MakeEngine, target: Target, tmp_path: Path) -> None:
    """A patch writer: whole copies and single entries written into ``state_dict()`` inside a session."""
    engine = make_engine(target=target)
    everything_it_computes(engine)
    views = engine.state_dict()
    expected = dict(OLD)
    engine.begin_weight_update()
    for name, tensor in group("what-RLinf-syncs").items():
        views[name].copy_(tensor)
        expected[name] = tensor
    rows, columns = torch.tensor([0, 2]), torch.tensor([1, 3])
    for name in (LANGUAGE + "layers.0.self_attn.k_proj.weight", LANGUAGE + "layers.1.mlp.up_proj.weight"):
        views[name][rows.to(target.device), columns.to(target.device)] = torch.tensor(7.0, dtype=target.dtype).to(
            target.device
        )
        expected[name] = expected[name].clone()
        expected[name][rows, columns] = 7.0
    engine.finish_weight_update(version=3)
    assert engine.version == 3
    assert_same_bits(everything_it_computes(engine), fresh(make_engine, tmp_path, expected, target))


@pytest.mark.parametrize("layout", ["mapping", "pairs", "generator", "single-batches"])
def test_l5_any_batching(layout: str, make_engine: MakeEngine, tmp_path: Path, target: Target) -> None:
    part = group("what-RLinf-syncs")
    engine = make_engine(target=target)
    engine.begin_weight_update()
    if layout == "mapping":
        engine.update_weights(part)
    elif layout == "pairs":
        engine.update_weights(list(part.items()))
    elif layout == "generator":
        engine.update_weights((f"model.{name}", tensor) for name, tensor in part.items())
    else:
        for name, tensor in reversed(part.items()):
            engine.update_weights({name: tensor})
    engine.finish_weight_update()
    assert_same_bits(everything_it_computes(engine), fresh(make_engine, tmp_path, OLD | part, target))


def test_l5_tied_embedding_by_either_name(make_engine: MakeEngine, tmp_path: Path) -> None:
    expected = fresh(make_engine, tmp_path, OLD | group("embedding"), Target())
    for batch in ({EMBEDDING: NEW[EMBEDDING]}, {LM_HEAD: NEW[EMBEDDING]}, group("embedding")):
        engine = make_engine()
        update(engine, batch)
        assert_same_bits(everything_it_computes(engine), expected)


def test_l5_sources_of_other_types_are_cast(make_engine: MakeEngine, tmp_path: Path) -> None:
    part = {name: tensor.bfloat16() for name, tensor in group("what-RLinf-syncs").items()}
    engine = make_engine()
    with engine.weight_update() as write:
        write(part)
    rounded = {name: tensor.float() for name, tensor in part.items()}
    assert_same_bits(everything_it_computes(engine), fresh(make_engine, tmp_path, OLD | rounded, Target()))


def test_l5_the_engine_keeps_copies(make_engine: MakeEngine) -> None:
    engine = make_engine()
    part = {name: tensor.clone() for name, tensor in NEW.items()}
    update(engine, part)
    before = everything_it_computes(engine)
    for tensor in part.values():
        tensor.zero_()
    assert_same_bits(everything_it_computes(engine), before)


# -- L6: derived tables come from one function ----------------------------------------------------------------------------


def test_l6_schedules_after_an_update_equal_new_ones(make_engine: MakeEngine, target: Target, tmp_path: Path) -> None:
    """A schedule made before the update and refreshed by it equals one that is made after it."""
    engine = make_engine(target=target)
    for steps in (1, 2, 3):
        rollout_tensors(engine, rollout_request(num_steps=steps, sde_step=0))
    update(engine, NEW)
    late = make_engine(target=target)
    update(late, NEW)
    new = make_engine(write_checkpoint(tmp_path, NEW, SIZES), target=target)
    for steps in (1, 2, 3, 4):
        request = rollout_request(num_steps=steps, sde_step=0)
        expected = rollout_tensors(new, request)
        assert_same_bits(rollout_tensors(engine, request), expected)
        assert_same_bits(rollout_tensors(late, request), expected)


# -- L1, L12: a rejected key is refused before any write ------------------------------------------------------------------

REJECTED: list[tuple[str, Any]] = [
    ("no such parameter", {"action_out_proj.scale": torch.zeros(8)}),
    ("no such parameter", {f"model.{BIAS}x": torch.zeros(8)}),
    ("no such parameter", {"": torch.zeros(8)}),
    ("came already", [(BIAS, torch.zeros(8)), (BIAS, torch.zeros(8))]),
    ("came already", {BIAS: torch.zeros(8), f"model.{BIAS}": torch.zeros(8)}),
    (r"\(9,\).*\(8,\)", {BIAS: torch.zeros(9)}),
    (r"\(1, 8\).*\(8,\)", {BIAS: torch.zeros(1, 8)}),
    (r"\(\).*\(8,\)", {BIAS: torch.tensor(0.0)}),
    ("int64", {BIAS: torch.zeros(8, dtype=torch.int64)}),
    ("complex", {BIAS: torch.zeros(8, dtype=torch.complex64)}),
    ("meta", {BIAS: torch.zeros(8, device="meta")}),
    ("sparse", {"action_out_proj.weight": torch.zeros(8, 32).to_sparse()}),
    ("ndarray", {BIAS: torch.zeros(8).numpy()}),
    ("NoneType", {BIAS: None}),
    ("different values", {EMBEDDING: OLD[EMBEDDING], LM_HEAD: OLD[LM_HEAD] + 1}),
    ("nested", {BIAS: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])}),
    ("no such parameter", {1: torch.zeros(8)}),
    ("found a str", [BIAS]),
    ("found a tuple", [(BIAS, torch.zeros(8), 1)]),
    (r"\(3,\).*\(64, 32\)", {EXPERT_LM_HEAD: torch.zeros(3)}),
]


@pytest.mark.parametrize("message, batch", REJECTED, ids=[f"{i}-{m}" for i, (m, _) in enumerate(REJECTED)])
@pytest.mark.parametrize("position", ["alone", "after good ones"])
def test_l1_l12_rejected_batch_writes_nothing(message: str, batch: Any, position: str, make_engine: MakeEngine) -> None:
    engine = make_engine()
    before = everything_it_computes(engine)
    if position != "alone":
        items = list(batch.items()) if isinstance(batch, dict) else list(batch)
        batch = [("action_in_proj.bias", torch.zeros(32)), *items]
    engine.begin_weight_update()
    with pytest.raises(WeightUpdateError, match=f"nothing of this batch was written.*{message}"):
        engine.update_weights(batch)
    assert engine.state is UpdateState.CLEAN
    engine.abort_weight_update()
    assert engine.state is UpdateState.IDLE
    assert_same_bits(everything_it_computes(engine), before)
    assert engine.version == 0


@pytest.mark.parametrize("batch", [None, 5, torch.nn.Linear(1, 1)])
def test_l1_something_that_is_no_batch(batch: Any, make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(WeightUpdateError, match="mapping of names to tensors"), engine.weight_update() as update:
        update(batch)
    assert engine.state is UpdateState.IDLE


@pytest.mark.parametrize("version", ["abc", 1.5, float("nan")])
def test_a_version_is_a_whole_number(version: Any, make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(WeightUpdateError, match=r"version is .*whole number"), engine.weight_update(version):
        pass
    assert (engine.state, engine.version) == (UpdateState.IDLE, 0)


def test_l1_a_name_of_an_earlier_batch_is_refused(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    engine.begin_weight_update()
    engine.update_weights({BIAS: NEW[BIAS]})
    for name in (BIAS, f"model.{BIAS}"):
        with pytest.raises(WeightUpdateError, match="came already"):
            engine.update_weights({"action_in_proj.bias": torch.zeros(32), name: torch.zeros(8)})
    assert engine.state is UpdateState.DIRTY
    engine.finish_weight_update()
    assert_same_bits(everything_it_computes(engine), fresh(make_engine, tmp_path, OLD | {BIAS: NEW[BIAS]}, Target()))


def test_l1_tied_names_in_two_batches_must_agree(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.begin_weight_update()
    engine.update_weights({EMBEDDING: NEW[EMBEDDING]})
    with pytest.raises(WeightUpdateError, match="different values"):
        engine.update_weights({LM_HEAD: NEW[EMBEDDING] + 1})
    engine.update_weights({LM_HEAD: NEW[EMBEDDING]})
    engine.finish_weight_update()


def test_l12_all_problems_of_a_batch_are_named(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.begin_weight_update()
    with pytest.raises(WeightUpdateError) as caught:
        engine.update_weights({"first.wrong": torch.zeros(1), "second.wrong": torch.zeros(1), BIAS: torch.zeros(3)})
    for name in ("first.wrong", "second.wrong", BIAS):
        assert name in str(caught.value)


def test_l12_full_update_on_demand(make_engine: MakeEngine) -> None:
    """``require_all`` demands every parameter, the critic's too; lacking ones are named."""
    engine = make_engine()
    first = next(iter(OLD)).replace(".", r"\.")
    with pytest.raises(WeightUpdateError, match=f"did not come.*{first}"), engine.weight_update(require_all=True):
        pass
    assert engine.state is UpdateState.IDLE  # nothing had been written
    with engine.weight_update(version=2, require_all=True) as write:
        write({name: tensor for name, tensor in NEW.items() if name not in (LM_HEAD, EXPERT_LM_HEAD)})
    assert engine.version == 2
    with (
        pytest.raises(WeightUpdateError, match=r"value_head\.mlp\.0\.weight"),
        engine.weight_update(require_all=True) as write,
    ):
        write({name: tensor for name, tensor in NEW.items() if not name.startswith("value_head.")})
    assert engine.state is UpdateState.UNUSABLE


def test_report_of_an_update(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.begin_weight_update()
    engine.update_weights({f"model.{BIAS}": NEW[BIAS].double(), EXPERT_LM_HEAD: NEW[EXPERT_LM_HEAD]})
    engine.update_weights({LM_HEAD: NEW[LM_HEAD]})
    report = engine.finish_weight_update()
    assert sorted(report.loaded) == sorted([BIAS, LM_HEAD])
    assert report.ignored == [EXPERT_LM_HEAD]
    assert report.casts == [f"{BIAS}: torch.float64 -> torch.float32"]
    assert report.unexpected == []
    critic = {name for name in OLD if name.startswith("value_head.")}
    assert set(report.optional) == critic
    assert set(report.missing) == set(OLD) - critic - {BIAS, LM_HEAD, EMBEDDING, EXPERT_LM_HEAD}


# -- L2: mixed weights make the engine unusable ---------------------------------------------------------------------------


def assert_unusable(engine: Engine, reason: str, version: int = 0) -> None:
    """Every later call says why and how to recover, and the version keeps its old value."""
    assert engine.state is UpdateState.UNUSABLE
    calls: list[Callable[[], Any]] = [
        lambda: engine.step(step_request()),
        lambda: engine.rollout_step(rollout_request()),
        lambda: engine.value(step_request()),
        engine.begin_weight_update,
        lambda: engine.update_weights({}),
        engine.finish_weight_update,
        engine.abort_weight_update,
    ]
    for _ in range(2):
        for call in calls:
            with pytest.raises(EngineUnusableError, match=f"{reason}.*[Bb]uild a new one"):
                call()
    assert engine.version == version
    engine.close()
    assert engine.state is UpdateState.CLOSED


def test_l2_abort_before_any_write_leaves_the_engine_usable(make_engine: MakeEngine) -> None:
    engine = make_engine()
    before = everything_it_computes(engine)
    engine.begin_weight_update()
    engine.abort_weight_update()
    engine.begin_weight_update()
    engine.update_weights({})
    engine.update_weights({EXPERT_LM_HEAD: NEW[EXPERT_LM_HEAD]})  # known, never read, nothing to write
    engine.abort_weight_update()
    assert_same_bits(everything_it_computes(engine), before)
    assert engine.version == 0


def test_l2_abort_after_a_write(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.begin_weight_update()
    engine.update_weights({BIAS: NEW[BIAS]})
    engine.abort_weight_update()
    assert_unusable(engine, "aborted after writes")


def test_l2_abort_after_an_in_place_write(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.begin_weight_update()
    engine.state_dict()[BIAS][0] = 1.0
    engine.abort_weight_update()
    assert_unusable(engine, "aborted after writes")


def test_l2_failing_finish_after_a_write(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    update(engine, {}, version=4)

    def fail() -> None:
        raise MemoryError("no room for the tables")

    engine.begin_weight_update()
    engine.update_weights({BIAS: NEW[BIAS]})
    monkeypatch.setattr(engine._updater, "_refresh", fail)
    with pytest.raises(MemoryError, match="no room"):
        engine.finish_weight_update(version=5)
    assert_unusable(engine, "finish_weight_update failed after writes.*no room for the tables", version=4)


@pytest.mark.parametrize("how", ["older version", "require_all", "version of a wrong type"])
def test_l2_refused_finish_after_a_write(how: str, make_engine: MakeEngine) -> None:
    engine = make_engine()
    update(engine, {}, version=4)
    engine.begin_weight_update()
    engine.update_weights({BIAS: NEW[BIAS]})
    arguments: dict[str, Any] = {
        "older version": {"version": 3},
        "require_all": {"require_all": True},
        "version of a wrong type": {"version": "next"},
    }[how]
    with pytest.raises((WeightUpdateError, ValueError, TypeError)):
        engine.finish_weight_update(**arguments)
    assert_unusable(engine, "finish_weight_update failed after writes", version=4)


def test_l2_a_copy_that_fails_half_way(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error between two copies of one batch: no finish may commit what is half written."""
    engine = make_engine()
    original = weight_update_module._copy

    def fail_after_the_first(targets: list[Any]) -> None:
        original(targets[:1])
        raise RuntimeError("device lost")

    monkeypatch.setattr(weight_update_module, "_copy", fail_after_the_first)
    engine.begin_weight_update()
    with pytest.raises(RuntimeError, match="device lost"):
        engine.update_weights(group("action-projections"))
    assert_unusable(engine, "device lost")


def test_l2_context_manager_with_a_failing_block(make_engine: MakeEngine) -> None:
    engine = make_engine()
    before = everything_it_computes(engine)
    with pytest.raises(ZeroDivisionError), engine.weight_update(version=1):
        raise ZeroDivisionError
    assert_same_bits(everything_it_computes(engine), before)

    def interrupted() -> None:
        with engine.weight_update(version=1) as write:
            write({BIAS: NEW[BIAS]})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert_unusable(engine, "a weight update failed after writes")


def test_l2_writes_outside_a_session_are_noticed(make_engine: MakeEngine) -> None:
    for write in (
        lambda view: view.zero_(),
        lambda view: view[0].fill_(3.0),
        lambda view: view.copy_(NEW[BIAS]),
        lambda view: view.detach().add_(1.0),
    ):
        engine = make_engine()
        everything_it_computes(engine)
        with torch.no_grad():
            write(engine.state_dict()[BIAS])
        with pytest.raises(EngineUnusableError, match="outside of a weight update"):
            engine.step(step_request())
        assert_unusable(engine, "outside of a weight update")


def test_l2_reading_the_views_is_no_write(make_engine: MakeEngine) -> None:
    engine = make_engine()
    before = everything_it_computes(engine)
    total = sum(float(view.sum()) for view in engine.state_dict().values() if not view.is_meta)
    assert total != 0
    assert_same_bits(everything_it_computes(engine), before)


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


# -- L10: caches are bounded ----------------------------------------------------------------------------------------------


def test_l10_buffers_and_schedules_are_bounded_and_stay_right(make_engine: MakeEngine) -> None:
    engine = make_engine()
    request = rollout_request()
    expected = rollout_tensors(engine, request)
    for steps in range(1, 14):
        for batch in (1, 2, 3, 4):
            rollout_tensors(engine, rollout_request(batch=batch, num_steps=steps, sde_step=0))
    assert engine._model is not None
    assert len(engine._model.scheduler._buffers) <= 32
    assert len(engine._model.tables._schedules) <= 8
    assert_same_bits(rollout_tensors(engine, request), expected)


# -- the critic's weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("writer", ["update_weights", "views"])
def test_critic_that_arrives_by_an_update_is_used(writer: str, make_engine: MakeEngine, tmp_path: Path) -> None:
    """Whichever way the critic's weights come, the engine uses them afterwards (a patch writer uses the views)."""
    critic = {name: tensor for name, tensor in OLD.items() if name.startswith("value_head.")}
    write_checkpoint(tmp_path, OLD, SIZES, drop=critic)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"vocab_size"', '"value_head_sizes": [16, 8],\n    "vocab_size"'))
    engine = make_engine(tmp_path, value_mode="mean_token")
    assert set(engine.load_report.optional) == set(critic)
    engine.begin_weight_update()
    if writer == "update_weights":
        engine.update_weights(critic)
    else:
        views = engine.state_dict()
        for name, tensor in critic.items():
            views[name].copy_(tensor)
    engine.finish_weight_update()
    assert engine.load_report.optional == []
    assert_same_bits(everything_it_computes(engine), everything_it_computes(make_engine()))


def test_weights_of_the_engine_itself_as_new_weights(make_engine: Callable[..., Engine]) -> None:
    """Two views that change places, a transposed one, and one sent back as it is."""
    engine = make_engine()
    views = engine.state_dict()
    stem = "paligemma_with_expert.gemma_expert.model.layers.0.self_attn."
    keys, values, square = f"{stem}k_proj.weight", f"{stem}v_proj.weight", "time_mlp_in.weight"
    before = {name: views[name].clone() for name in (keys, values, square)}
    with engine.weight_update() as update:
        update({keys: views[values], values: views[keys], square: views[square].t(), BIAS: views[BIAS]})
    assert torch.equal(views[keys], before[values])
    assert torch.equal(views[values], before[keys])
    assert torch.equal(views[square], before[square].t())


def test_views_of_an_offloaded_engine_are_refused(make_engine: Callable[..., Engine]) -> None:
    engine, other = make_engine(), make_engine()
    views = {name: view for name, view in other.state_dict().items() if not view.is_meta}
    other.offload()
    engine.begin_weight_update()
    with pytest.raises(WeightUpdateError, match=r"nothing of this batch was written.*the engine was offloaded"):
        engine.update_weights(views)
    freed = torch.zeros(views[BIAS].shape)  # as FSDP leaves a parameter that it gathers anew
    freed.untyped_storage().resize_(0)
    with pytest.raises(WeightUpdateError, match="without memory"):
        engine.update_weights({BIAS: freed})
    engine.abort_weight_update()
    assert engine.state.value == "idle"
