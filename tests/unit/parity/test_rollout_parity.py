# SPDX-License-Identifier: Apache-2.0
"""The engine equals RLinf's own policy: actions, chains, log-probs, values, for the same weights, noises and step choice.

The cases cover every pair of (batch size, steps), (steps, step choice) and (value mode, step choice) that RLinf allows, with
prompts of different lengths in one batch, from one token to all 200.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlinf_phyai.engine import Engine
from rlinf_phyai.models.pi05 import PI05Request

from ..engine.checkpoints import parameter_shapes
from .comparison import EVAL, JOINT, Case, deviations, run_engine, run_reference
from .conftest import cpu_engine
from .reference import REFERENCE_SIZES, Reference

Measure = Callable[[dict[str, float]], dict[str, float]]
Engines = Callable[..., Engine]

AFTER_VLM = [
    ("mean_token", Case((20,), 3, 0)),
    ("mean_token", Case((1, 200), 3, 2, noise_level=0.2)),
    ("first_token", Case((5, 1, 30), 1, 0)),
    ("last_token", Case((17, 200, 1, 40), 3, 1, ignore_last=True, chunk=5, env_dim=7)),
    ("mean_token", Case((3, 8, 21, 1, 199), 3, JOINT)),
    ("first_token", Case((12,), 10, 9)),
    ("last_token", Case((200, 9), 10, JOINT, noise_level=0.3)),
    ("mean_token", Case((22, 4, 150), 10, 8, ignore_last=True, noise_level=0.9)),
    ("last_token", Case((1, 2, 3, 4, 200), 1, JOINT)),
    ("mean_token", Case((6, 60, 1, 30), 1, EVAL)),
    ("first_token", Case((200, 1), 3, EVAL, chunk=5, env_dim=7)),
    ("mean_token", Case((33, 2), 10, EVAL)),
]

AFTER_EXPERT = [
    (False, Case((11, 1), 3, 1)),
    (True, Case((1, 200, 30), 3, JOINT)),
    (True, Case((4,), 10, 7, ignore_last=True)),
    (False, Case((2, 3, 200, 1, 77), 1, 0, noise_level=0.8)),
    (True, Case((50, 1), 3, EVAL)),
    (False, Case((9, 100, 1, 18), 10, JOINT)),
]


def check(measure: Measure, case: Case, found: dict[str, float]) -> None:
    measure(found)
    assert max(found.values()) <= case.tolerance, f"{found} exceed {case.tolerance}"


@pytest.mark.parametrize("value_mode, case", AFTER_VLM, ids=[f"{mode}-{case}" for mode, case in AFTER_VLM])
def test_critic_after_the_vlm(
    value_mode: str, case: Case, vlm_reference: Reference, engines: Engines, measure: Measure
) -> None:
    batch = case.batch(vlm_reference.sizes.vocab)
    expected = run_reference(vlm_reference, case, batch, value_vlm_mode=value_mode)
    output = run_engine(engines(value_mode), case, batch)
    check(measure, case, deviations(case, batch, expected, output))
    # Every other transition is deterministic: its log-probs are exactly 0, as the actor's are.
    others = [i for i in range(case.num_steps) if i not in case.sde_steps]
    assert torch.count_nonzero(output.log_probs[:, others]) == 0
    assert torch.equal(output.chains[:, 0], batch.noise)
    assert torch.equal(output.chains[:, -1], output.actions)
    assert output.values is not None
    assert output.values.shape == (batch.size, 1)


@pytest.mark.parametrize("chunk_critic, case", AFTER_EXPERT, ids=[f"chunk{int(c)}-{case}" for c, case in AFTER_EXPERT])
def test_critic_after_the_expert(
    chunk_critic: bool, case: Case, expert_reference: Reference, engines: Engines, measure: Measure
) -> None:
    # The crop to the action chunk also sets what `chunk_critic_input` pools, so both sides get chunk 5 here.
    case = Case(**(vars(case) | {"chunk": 5, "env_dim": 7}))
    batch = case.batch(expert_reference.sizes.vocab)
    expected = run_reference(expert_reference, case, batch, chunk_critic_input=chunk_critic)
    output = run_engine(engines("expert", chunk_critic_input=chunk_critic, action_chunk=5), case, batch)
    assert output.values is not None
    assert output.values.shape == (batch.size, case.num_steps)
    check(measure, case, deviations(case, batch, expected, output))


@pytest.mark.parametrize("cameras", [1, 3])
def test_one_or_three_used_cameras(cameras: int, vlm_reference: Reference, engines: Engines, measure: Measure) -> None:
    case = Case((4, 25), 3, 1)
    batch = case.batch(vlm_reference.sizes.vocab, cameras_used=cameras)
    expected = run_reference(vlm_reference, case, batch, num_images_in_input=cameras)
    check(measure, case, deviations(case, batch, expected, run_engine(engines("mean_token"), case, batch)))


def test_three_cameras_with_a_mask_equal_two_cameras(vlm_reference: Reference, engines: Engines) -> None:
    case = Case((4, 25), 3, 1)
    batch = case.batch(vlm_reference.sizes.vocab)
    two = run_engine(engines("mean_token"), case, batch)
    mask = torch.tensor(batch.camera_mask)
    for image_masks in (mask, mask.expand(batch.size, 3), list(batch.camera_mask)):
        three = run_engine(engines("mean_token"), case, batch, pixel_values=batch.pixels, image_masks=image_masks)
        assert torch.equal(two.actions, three.actions)
        assert torch.equal(two.log_probs, three.log_probs)
        assert torch.equal(two.values, three.values)


def test_shorter_token_rows_equal_the_padded_ones(vlm_reference: Reference, engines: Engines) -> None:
    """The engine takes rows of any length up to the tokenizer's; the critic still counts the actor's 200 positions."""
    case = Case((4, 25), 3, 1)
    batch = case.batch(vlm_reference.sizes.vocab)
    padded = run_engine(engines("mean_token"), case, batch)
    short = run_engine(engines("mean_token"), case, batch, input_ids=batch.input_ids[:, :25])
    assert torch.equal(padded.log_probs, short.log_probs)
    assert torch.equal(padded.values, short.values)


def test_step_equals_the_actors_deterministic_sampling(
    vlm_reference: Reference, engines: Engines, measure: Measure
) -> None:
    """``step`` against RLinf's evaluation sampling with the engine's default number of steps."""
    engine = engines("mean_token", num_steps=3)
    case = Case((16, 1, 200), 3, EVAL)
    batch = case.batch(vlm_reference.sizes.vocab)
    expected = run_reference(vlm_reference, case, batch)
    actions = engine.step(PI05Request(batch.pixels[:, :2], batch.input_ids, batch.lang_lens, batch.noise))
    found = measure({"actions": float((actions - expected.actions).abs().max())})
    assert found["actions"] <= case.tolerance


def test_value_by_the_prefix_alone_equals_the_actors(
    vlm_reference: Reference, engines: Engines, measure: Measure
) -> None:
    case = Case((16, 1, 200), 1, EVAL)
    batch = case.batch(vlm_reference.sizes.vocab)
    request = PI05Request(batch.pixels[:, :2], batch.input_ids, batch.lang_lens)
    for mode in ("mean_token", "last_token", "first_token"):
        expected = run_reference(vlm_reference, case, batch, value_vlm_mode=mode).values
        found = measure({"values": float((engines(mode).value(request) - expected).abs().max())})
        assert found["values"] <= case.tolerance, mode


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": 1, "vision_layers": 1, "vision_heads": 1, "heads": 8, "head_dim": 8},
        {"layers": 3, "kv_heads": 2, "head_dim": 32, "prefix_mlp": 24},
    ],
    ids=["shallow-many-heads", "deep-two-kv-heads"],
)
def test_other_sizes(changes: dict[str, int], tmp_path: Path, measure: Measure) -> None:
    reference = Reference(tmp_path, REFERENCE_SIZES.but(**changes), seed=5)
    case = Case((18, 1, 200), 3, 1)
    batch = case.batch(reference.sizes.vocab)
    expected = run_reference(reference, case, batch)
    with cpu_engine(tmp_path, value_mode="mean_token") as engine:
        check(measure, case, deviations(case, batch, expected, run_engine(engine, case, batch)))


def test_state_dict_has_the_actors_names_order_and_shapes(
    vlm_reference: Reference, expert_reference: Reference, engines: Engines
) -> None:
    for reference, mode in ((vlm_reference, "mean_token"), (expert_reference, "expert")):
        expected = {name: tuple(tensor.shape) for name, tensor in reference.state_dict().items()}
        assert list(parameter_shapes(reference.sizes).items()) == list(expected.items())
        views = engines(mode).state_dict()
        assert list({name: tuple(view.shape) for name, view in views.items()}.items()) == list(expected.items())
        for name, tensor in reference.state_dict().items():
            if not views[name].is_meta:
                assert torch.equal(views[name], tensor), name
