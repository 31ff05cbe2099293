# SPDX-License-Identifier: Apache-2.0
"""What a commit refuses and what it leaves out: weights that are not finite, tables whose sources did not change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_phyai.engine import Engine, EngineUnusableError, UpdateState, WeightUpdateError
from rlinf_phyai.errors import CheckpointError
from rlinf_phyai.models.pi05 import tables
from rlinf_phyai.models.pi05.finite import all_finite, magnitudes

from .checkpoints import EXPERT, LANGUAGE, TOWER, VLM, random_state, write_checkpoint
from .conftest import SIZES, Target, assert_same_bits, rollout_request, rollout_tensors, step_request

MakeEngine = Callable[..., Engine]
NEW = random_state(SIZES, seed=4)
ADA = EXPERT + "model.layers.0.input_layernorm.dense.weight"  # float32 in every engine
QUERY = LANGUAGE + "layers.1.self_attn.q_proj.weight"  # rows of a fused matrix, in the parameters' type


@pytest.mark.parametrize("name", [ADA, QUERY, "value_head.mlp.0.bias"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("writer", ["update_weights", "views"])
def test_weights_that_are_not_finite_are_not_committed(
    name: str, value: float, writer: str, make_engine: MakeEngine, target: Target
) -> None:
    engine = make_engine(target=target)
    broken = NEW[name].clone()
    broken.view(-1)[-1] = value
    engine.begin_weight_update()
    engine.update_weights({"action_out_proj.bias": NEW["action_out_proj.bias"]})
    if writer == "views":
        engine.state_dict()[name].copy_(broken)
    else:
        engine.update_weights({name: broken})
    with pytest.raises(WeightUpdateError, match=f"1 parameters hold NaN or infinity.*{name}"):
        engine.finish_weight_update(version=7)
    assert (engine.state, engine.version) == (UpdateState.UNUSABLE, 0)
    with pytest.raises(EngineUnusableError, match=f"finish_weight_update failed after writes.*{name}.*build a new one"):
        engine.step(step_request())


def test_the_largest_finite_numbers_are_committed(make_engine: MakeEngine, target: Target) -> None:
    """A sum of these would overflow; the largest magnitude does not."""
    engine = make_engine(target=target)
    with engine.weight_update() as write:
        for name in ("action_out_proj.bias", QUERY):
            view = engine.state_dict()[name]
            write({name: torch.full(view.shape, torch.finfo(view.dtype).max, dtype=view.dtype)})
    assert engine.version == 1


def test_magnitudes_of_mixed_types(target: Target) -> None:
    tensors = [torch.tensor([1.0, -3.0], dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float32)]
    on_device = [tensor.to(target.device) for tensor in tensors]
    assert [found.tolist() for found in magnitudes(on_device)] == [[3.0, 3.0], [3.0]]
    assert all_finite(magnitudes(on_device))
    assert all_finite(magnitudes([]))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_checkpoint_that_is_not_finite_is_refused(value: float, make_engine: MakeEngine, tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in NEW.items()}
    state[QUERY][0, 0] = value
    with pytest.raises(CheckpointError, match=f"NaN or infinity in {QUERY}"):
        make_engine(write_checkpoint(tmp_path, state, SIZES))


# -- the masked camera's tokens --------------------------------------------------------------------------------------------


@pytest.fixture
def towers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry per run of the vision tower for the masked camera."""
    seen: list[Any] = []
    original = tables.embed_images

    def counted(kernels: Any, weights: Any, pixels: torch.Tensor) -> torch.Tensor:
        seen.append(pixels.shape)
        return original(kernels, weights, pixels)

    monkeypatch.setattr(tables, "embed_images", counted)
    return seen


def test_the_masked_camera_is_embedded_only_when_its_weights_were_written(
    make_engine: MakeEngine, target: Target, towers: list[Any]
) -> None:
    """L5 by group says that every result is right; this says what it does not cost."""
    engine = make_engine(target=target)
    assert len(towers) == 1  # at setup
    for _ in range(2):
        with engine.weight_update() as write:
            write({name: tensor for name, tensor in NEW.items() if not name.startswith((TOWER, VLM + "model.multi"))})
    engine.begin_weight_update()
    engine.abort_weight_update()
    assert len(towers) == 1
    for count, stem in enumerate((TOWER + "encoder.layers.0.", VLM + "model.multi_modal_projector."), start=2):
        with engine.weight_update() as write:
            write({name: tensor for name, tensor in NEW.items() if name.startswith(stem)})
        assert len(towers) == count
    with engine.weight_update():
        pass
    assert len(towers) == 3


def test_every_vision_parameter_reaches_the_masked_tokens(make_engine: MakeEngine, target: Target) -> None:
    """Parameter by parameter, the tokens equal those of an engine that computes them for the first time."""
    engine = make_engine(target=target)
    assert engine._model is not None
    masked, refresh = engine._model.tables.masked_tokens, engine._model.tables.refresh
    assert masked is not None
    for name, tensor in NEW.items():
        with engine.weight_update() as write:
            write({name: tensor})
        found = masked.clone()
        engine._model.tables._masked_source = None
        refresh()
        assert torch.equal(found, masked), name


def test_a_second_engine_agrees_after_mixed_updates(make_engine: MakeEngine, target: Target, tmp_path: Path) -> None:
    engine = make_engine(target=target)
    for stem in (TOWER, EXPERT, ""):
        with engine.weight_update() as write:
            write({name: tensor for name, tensor in NEW.items() if name.startswith(stem)})
    fresh = make_engine(write_checkpoint(tmp_path, NEW, SIZES), target=target)
    request = rollout_request(batch=3)
    assert_same_bits(rollout_tensors(engine, request), rollout_tensors(fresh, request))
