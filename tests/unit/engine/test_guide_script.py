# SPDX-License-Identifier: Apache-2.0
"""The single-GPU guide's program and its training-update pattern run on this package with only the imports changed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlinf_phyai.engine import Engine, EngineUnusableError
from rlinf_phyai.models.pi05 import PI05RolloutOutput

from .checkpoints import random_state
from .conftest import SIZES, Target, rollout_request

SCRIPT = Path(__file__).with_name("guide_script.py")


def test_complete_script(checkpoint: Path, target: Target) -> None:
    environment = os.environ | {"CHECKPOINT_DIR": str(checkpoint), "DEVICE": target.device, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"action chunk shape=(1, {SIZES.horizon}, {SIZES.action_dim}), dtype=torch.float32" in done.stdout


def guide_update(engine: Engine, batches: list[dict[str, torch.Tensor]], version: int) -> None:
    """The guide's transaction: begin, any number of batches, finish; abort on any error."""
    engine.begin_weight_update()
    try:
        for batch in batches:
            engine.update_weights(batch)
        engine.finish_weight_update(version=version)
    except Exception:
        engine.abort_weight_update()
        raise


def test_training_update_pattern(make_engine: Callable[..., Engine], target: Target) -> None:
    engine = make_engine(target=target, capture_rollout=True)
    state = random_state(SIZES, seed=9)
    names = [name for name in state if name.startswith(("action_", "time_", "value_head."))]
    before = engine.rollout_step(rollout_request())
    guide_update(engine, [{name: state[name]} for name in names], version=7)
    after: PI05RolloutOutput = engine.rollout_step(rollout_request())
    assert engine.version == 7
    assert not torch.equal(before.actions, after.actions)


def test_training_update_pattern_with_a_failure(make_engine: Callable[..., Engine]) -> None:
    """The first error reaches the caller, also when the engine cannot go on."""
    engine = make_engine()
    good, bad = {"action_in_proj.bias": torch.ones(SIZES.expert_width)}, {"action_in_proj.scale": torch.ones(1)}
    with pytest.raises(Exception, match=r"action_in_proj\.scale"):
        guide_update(engine, [bad], version=1)
    engine.rollout_step(rollout_request())  # nothing was written
    with pytest.raises(Exception, match=r"action_in_proj\.scale"):
        guide_update(engine, [good, bad], version=1)
    with pytest.raises(EngineUnusableError, match="build a new one"):
        engine.rollout_step(rollout_request())
    assert engine.version == 0


def test_a_failing_finish_reaches_the_caller(make_engine: Callable[..., Engine]) -> None:
    """Finish fails after a write: the guide's handler then calls abort on an unusable engine; the reason must survive."""
    engine = make_engine()
    guide_update(engine, [], version=5)
    with pytest.raises(Exception, match="version 3 is below") as caught:
        guide_update(engine, [{"action_in_proj.bias": torch.ones(SIZES.expert_width)}], version=3)
    assert engine.version == 5
    assert caught.value is not None
