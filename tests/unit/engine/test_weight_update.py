# SPDX-License-Identifier: Apache-2.0
"""Weight updates: what an updated engine computes is what a fresh engine of the new weights computes (L5, L6, L10)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlinf_phyai.engine import (
    Engine,
)

from .checkpoints import (
    EMBEDDING,
    EXPERT_LM_HEAD,
    LANGUAGE,
    LM_HEAD,
    write_checkpoint,
)
from .conftest import SIZES, Target, assert_same_bits, rollout_request, rollout_tensors
from .weight_updates import (
    BIAS,
    GROUPS,
    NEW,
    OLD,
    MakeEngine,
    everything_it_computes,
    fresh,
    group,
    update,
)

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
