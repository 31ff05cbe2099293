# SPDX-License-Identifier: Apache-2.0
"""What the tests of weight updates share: two sets of weights, groups of parameters, and everything an engine computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from rlinf_phyai.engine import (
    Engine,
    EngineUnusableError,
    UpdateState,
)

from .checkpoints import (
    EMBEDDING,
    EXPERT,
    LANGUAGE,
    LM_HEAD,
    TOWER,
    VLM,
    random_state,
    write_checkpoint,
)
from .conftest import SIZES, Target, rollout_request, rollout_tensors, step_request

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
