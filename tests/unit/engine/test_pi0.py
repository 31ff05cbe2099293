# SPDX-License-Identifier: Apache-2.0
"""PI0 inside the engine, on every target: replay, graphs, weight updates, stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlinf_phyai.engine import CheckpointError, Engine, RequestError
from rlinf_phyai.models.pi05 import PI05Config, PI05RolloutRequest

from .checkpoints import random_state, write_checkpoint
from .conftest import SIZES, Target, assert_same_bits, build_engine, rollout_request, rollout_tensors, step_request

MakeEngine = Callable[..., Engine]

PI0 = SIZES.but(pi05=False)
OLD, NEW = random_state(PI0, seed=3), random_state(PI0, seed=4)
READ_BY_PI0_ONLY = ("state_proj.", "action_time_mlp_in.", "action_time_mlp_out.")


def state(batch: int) -> torch.Tensor:
    return torch.randn(batch, PI0.action_dim, generator=torch.Generator().manual_seed(batch))


def pi0_request(batch: int = 2, **options: object) -> PI05RolloutRequest:
    return replace(rollout_request(batch=batch, **options), state=state(batch))


@pytest.fixture
def engine(tmp_path: Path, make_engine: MakeEngine, target: Target) -> Engine:
    return make_engine(write_checkpoint(tmp_path / "old", OLD, PI0), target=target, capture_rollout=True)


def test_calls_repeat_bit_for_bit(engine: Engine) -> None:
    first = rollout_tensors(engine, pi0_request())
    rollout_tensors(engine, pi0_request(batch=3, num_steps=1, sde_step=0, seed=5))
    engine.value(replace(step_request(batch=4), state=state(4)))
    assert_same_bits(rollout_tensors(engine, pi0_request()), first)


def test_an_update_equals_a_fresh_engine(
    engine: Engine, make_engine: MakeEngine, target: Target, tmp_path: Path
) -> None:
    rollout_tensors(engine, pi0_request())
    graphs = {key: id(graph) for key, graph in engine.captured_graphs().items()}
    assert bool(graphs) == target.graphs
    with engine.weight_update(version=1) as update:
        update(NEW)
    after = rollout_tensors(engine, pi0_request())
    assert {key: id(graph) for key, graph in engine.captured_graphs().items()} == graphs
    fresh = make_engine(write_checkpoint(tmp_path / "new", NEW, PI0), target=target)
    assert_same_bits(rollout_tensors(fresh, pi0_request()), after)


def test_each_parameter_of_its_own_counts(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(write_checkpoint(tmp_path, OLD, PI0))
    own = [name for name in OLD if name.startswith(READ_BY_PI0_ONLY) or ("gemma_expert" in name and "norm" in name)]
    assert len(own) == 6 + 2 * PI0.layers + 1
    previous = rollout_tensors(engine, pi0_request())["actions"]
    for name in own:
        with engine.weight_update() as update:
            update({name: NEW[name]})
        found = rollout_tensors(engine, pi0_request())["actions"]
        assert not torch.equal(found, previous), name
        previous = found


def test_a_sample_does_not_depend_on_its_neighbours(engine: Engine, target: Target) -> None:
    """Prompts of other lengths put the state token at other places."""
    request = pi0_request(batch=4)
    together = engine.rollout_step(request)
    for row in range(4):
        fields = {name: v[row : row + 1] if isinstance(v, torch.Tensor) else v for name, v in vars(request).items()}
        alone = engine.rollout_step(PI05RolloutRequest(**fields))
        tolerance = 1e-5 if target.dtype == torch.float32 else 0.05
        torch.testing.assert_close(alone.actions[0], together.actions[row], atol=tolerance, rtol=0)


def test_stages_end_at_the_actions_of_a_step(engine: Engine) -> None:
    request = replace(step_request(), state=state(2))
    expected = engine.step(request)
    stages = engine.stages(request)
    for _ in range(2):
        found = [program() for program in stages.values()][-1]
    assert torch.equal(found, expected)


def test_bad_states_are_named(make_engine: MakeEngine, tmp_path: Path) -> None:
    pi0, pi05 = make_engine(write_checkpoint(tmp_path, OLD, PI0)), make_engine()
    with pytest.raises(RequestError, match="state is missing; PI0 needs a float32 tensor"):
        pi0.step(step_request())
    with pytest.raises(RequestError, match=r"state has shape \(3, 8\)"):
        pi0.step(replace(step_request(), state=state(3)))
    with pytest.raises(RequestError, match=r"state is given; PI0\.5 reads it from the prompt"):
        pi05.step(replace(step_request(), state=state(2)))


def test_published_sizes_are_pi0s(tmp_path: Path) -> None:
    """A checkpoint without our own key: horizon, prompt length and critic of PI0 where shapes do not tell them."""
    folder = write_checkpoint(tmp_path, OLD, PI0, drop=[name for name in OLD if name.startswith("value_head.")])
    (folder / "config.json").unlink()
    config = PI05Config.from_checkpoint(folder)
    assert (config.pi05, config.action_horizon, config.tokenizer_max_length) == (False, 50, 48)
    assert config.value_head_sizes == (512, 256, 128)
    with pytest.raises(CheckpointError, match="state_proj"):
        build_engine(write_checkpoint(tmp_path / "part", OLD, PI0, drop=["state_proj.bias"]))
