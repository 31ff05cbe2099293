# SPDX-License-Identifier: Apache-2.0
"""Weight updates: mixed weights make the engine unusable (L2)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlinf_phyai.engine import (
    EngineUnusableError,
    WeightUpdateError,
)
from rlinf_phyai.engine import weight_update as weight_update_module

from .checkpoints import (
    EXPERT_LM_HEAD,
)
from .conftest import assert_same_bits, step_request
from .weight_updates import (
    BIAS,
    NEW,
    MakeEngine,
    assert_unusable,
    everything_it_computes,
    group,
    update,
)


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
