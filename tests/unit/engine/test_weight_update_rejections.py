# SPDX-License-Identifier: Apache-2.0
"""Weight updates: a batch that does not fit is refused before any write (L1, L12), and what an update reports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_phyai.engine import (
    Engine,
    UpdateState,
    WeightUpdateError,
)

from .checkpoints import (
    EMBEDDING,
    EXPERT_LM_HEAD,
    LM_HEAD,
)
from .conftest import Target, assert_same_bits
from .weight_updates import (
    BIAS,
    NEW,
    OLD,
    MakeEngine,
    everything_it_computes,
    fresh,
)

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
