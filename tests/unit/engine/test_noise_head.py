# SPDX-License-Identifier: Apache-2.0
"""flow-noise and flow-CPS inside the engine, on every target: replay, graphs, weight updates, loading."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlinf_phyai.engine import CheckpointError, Engine
from rlinf_phyai.models.pi05 import PI05RolloutRequest

from .checkpoints import random_state, write_checkpoint
from .conftest import SIZES, STEPS, Target, assert_same_bits, rollout_request, rollout_tensors

MakeEngine = Callable[..., Engine]

LEARNED = SIZES.but(noise_head=True)
OLD, NEW = random_state(LEARNED, seed=3), random_state(LEARNED, seed=4)
# The bounds of the noise are buffers that no training moves; another run's may differ.
NEW |= {name: bound - 0.3 for name, bound in NEW.items() if name.startswith("noise_head.logvar_")}
HEAD = {name: tensor for name, tensor in NEW.items() if name.startswith("noise_head.")}


def learned_request(batch: int = 2, step: int | None = None, seed: int = 0) -> PI05RolloutRequest:
    steps = torch.ones(batch, STEPS, dtype=torch.bool) if step is None else torch.zeros(batch, STEPS, dtype=torch.bool)
    if step is not None:
        steps[:, step] = True
    return replace(rollout_request(batch=batch, seed=seed), sigmas=None, stochastic_steps=steps)


@pytest.fixture
def learned(tmp_path: Path, make_engine: MakeEngine, target: Target) -> Engine:
    return make_engine(write_checkpoint(tmp_path / "old", OLD, LEARNED), target=target, capture_rollout=True)


def test_calls_repeat_bit_for_bit(learned: Engine) -> None:
    first = rollout_tensors(learned, learned_request())
    rollout_tensors(learned, learned_request(batch=3, step=1, seed=5))
    rollout_tensors(learned, replace(learned_request(batch=2), noise=None, step_noise=None))
    assert_same_bits(rollout_tensors(learned, learned_request()), first)


def test_a_step_that_is_not_named_is_deterministic(learned: Engine) -> None:
    found = learned.rollout_step(learned_request(step=1))
    assert torch.count_nonzero(found.log_probs[:, [0, 2]]) == 0
    assert torch.count_nonzero(found.log_probs[:, 1]) == found.log_probs[:, 1].numel()


def test_an_update_equals_a_fresh_engine(
    learned: Engine, make_engine: MakeEngine, target: Target, tmp_path: Path
) -> None:
    before = rollout_tensors(learned, learned_request())
    graphs = {key: id(graph) for key, graph in learned.captured_graphs().items()}
    assert bool(graphs) == target.graphs
    with learned.weight_update(version=1) as update:
        update(HEAD)
    after = rollout_tensors(learned, learned_request())
    assert {key: id(graph) for key, graph in learned.captured_graphs().items()} == graphs
    assert not torch.equal(after["log_probs"], before["log_probs"])
    fresh = make_engine(write_checkpoint(tmp_path / "new", OLD | HEAD, LEARNED), target=target)
    assert_same_bits(rollout_tensors(fresh, learned_request()), after)


def test_each_tensor_of_the_head_counts(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(write_checkpoint(tmp_path, OLD, LEARNED))
    previous = rollout_tensors(engine, learned_request())["log_probs"]
    for name, tensor in HEAD.items():
        with engine.weight_update() as update:
            update({name: tensor})
        found = rollout_tensors(engine, learned_request())["log_probs"]
        assert not torch.equal(found, previous), name
        previous = found


def test_graphs_equal_the_eager_path(make_engine: MakeEngine, target: Target, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, OLD, LEARNED)
    eager = make_engine(checkpoint, target=replace(target, graphs=False))
    ours = make_engine(checkpoint, target=target)
    for batch in (1, 2, 4):
        request = learned_request(batch=batch)
        assert_same_bits(rollout_tensors(ours, request), rollout_tensors(eager, request))


def test_flow_cps_equals_its_deterministic_step_without_noise(make_engine: MakeEngine, target: Target) -> None:
    engine = make_engine(target=target, noise_method="flow_cps", value_mode="mean_token")
    request = rollout_request(sde_step=None)
    assert_same_bits(rollout_tensors(engine, request), rollout_tensors(engine, request))
    silent = replace(request, sigmas=torch.zeros(2, STEPS))
    tolerance = {"rtol": 0, "atol": 1e-5 if target.dtype == torch.float32 else 0.05}
    torch.testing.assert_close(engine.rollout_step(silent).actions, engine.step(request), **tolerance)


def test_a_state_dict_of_a_run_brings_the_head(make_engine: MakeEngine, tmp_path: Path) -> None:
    """``weights`` (RLinf's ``runner.ckpt_path``) on a checkpoint of supervised training."""
    bare = write_checkpoint(tmp_path / "bare", OLD, LEARNED, drop=HEAD)
    torch.save(HEAD, tmp_path / "head.pt")
    resumed = make_engine(bare, noise_method="flow_noise", weights=tmp_path / "head.pt")
    assert resumed.load_report.optional == []
    fresh = make_engine(write_checkpoint(tmp_path / "new", OLD | HEAD, LEARNED))
    assert_same_bits(rollout_tensors(resumed, learned_request()), rollout_tensors(fresh, learned_request()))


def test_a_part_of_the_head_is_refused(make_engine: MakeEngine, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, OLD, LEARNED, drop=["noise_head.mlp_logvar.moduleList.1.linear_1.bias"])
    with pytest.raises(CheckpointError, match="holds a part of the noise head only"):
        make_engine(checkpoint)


def test_a_head_that_the_run_does_not_use_is_refused(make_engine: MakeEngine, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"noise_head\.\*\) is noise_method flow_noise"):
        make_engine(write_checkpoint(tmp_path, OLD, LEARNED), noise_method="flow_sde")


@pytest.mark.parametrize(
    "value", [(0.1, float("inf")), (float("nan"), 1.0), ("a", "b"), (0.1,), 5, (0.2, 0.1), (0.0, 1.0)]
)
def test_a_noise_range_that_is_none(value: object, checkpoint: Path, make_engine: MakeEngine) -> None:
    with pytest.raises(ValueError, match=r"noise_std_range is .* two numbers are needed"):
        make_engine(checkpoint, noise_method="flow_noise", noise_std_range=value)
