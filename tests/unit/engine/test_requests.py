# SPDX-License-Identifier: Apache-2.0
"""Bad requests are refused at once, with a message that names the field, and leave the engine usable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlinf_phyai.engine import Engine, PhyaiError, RequestError
from rlinf_phyai.models.pi05 import PI05Args, PI05Request, PI05RolloutRequest

from .conftest import SIZES, STEPS, build_engine, request_fields, rollout_fields, rollout_request, step_request

MakeEngine = Callable[..., Engine]

IDS = request_fields()["input_ids"]
NAN = float("nan")


def with_id(column: int, value: int) -> torch.Tensor:
    ids = IDS.clone()
    ids[0, column] = value
    return ids


# name of the field in the message, what is changed
BAD_FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("pixel_values", {"pixel_values": torch.zeros(2, 3, 28, 28)}),
    ("pixel_values", {"pixel_values": torch.zeros(2, 2, 3, 28, 14)}),
    ("pixel_values", {"pixel_values": torch.zeros(2, 2, 1, 28, 28)}),
    ("pixel_values", {"pixel_values": torch.zeros(2, 4, 3, 28, 28)}),
    ("pixel_values", {"pixel_values": torch.zeros(2, 0, 3, 28, 28)}),
    ("pixel_values", {"pixel_values": torch.zeros(2, 2, 3, 28, 28, dtype=torch.uint8)}),
    ("pixel_values", {"pixel_values": torch.zeros(2, 2, 3, 28, 28, dtype=torch.float64)}),
    ("pixel_values", {"pixel_values": torch.zeros(2, 2, 3, 28, 28, device="meta")}),
    ("pixel_values", {"pixel_values": [[0.0]]}),
    ("input_ids", {"input_ids": IDS.int()}),
    ("input_ids", {"input_ids": IDS[0]}),
    ("input_ids", {"input_ids": IDS[:1]}),
    ("input_ids", {"input_ids": torch.zeros(2, SIZES.prompt_tokens + 1, dtype=torch.int64)}),
    ("input_ids", {"input_ids": torch.zeros(2, 0, dtype=torch.int64)}),
    ("input_ids", {"input_ids": IDS.tolist()}),
    ("input_ids", {"input_ids": with_id(0, SIZES.vocab)}),
    ("input_ids", {"input_ids": with_id(0, -1)}),
    ("right-padded", {"input_ids": with_id(3, 5)}),
    ("right-padded", {"input_ids": with_id(SIZES.prompt_tokens - 1, 5)}),
    ("lang_lens", {"lang_lens": torch.tensor([1, SIZES.prompt_tokens + 1])}),
    ("lang_lens", {"lang_lens": torch.tensor([0, 3])}),
    ("lang_lens", {"lang_lens": torch.tensor([-1, 3])}),
    ("lang_lens", {"lang_lens": torch.tensor([1.0, 3.0])}),
    ("lang_lens", {"lang_lens": torch.tensor([1])}),
    ("lang_lens", {"lang_lens": [1, 3]}),
    ("lang_lens", {"input_ids": IDS[:, :4]}),
    ("noise", {"noise": torch.zeros(2, SIZES.horizon, SIZES.action_dim + 1)}),
    ("noise", {"noise": torch.zeros(1, SIZES.horizon, SIZES.action_dim)}),
    ("noise", {"noise": torch.zeros(2, SIZES.horizon, SIZES.action_dim, dtype=torch.float64)}),
    ("image_masks", {"image_masks": torch.tensor([True])}),
    ("image_masks", {"image_masks": torch.ones(3, 2, dtype=torch.bool)}),
    ("image_masks", {"image_masks": torch.tensor([False, False])}),
    ("image_masks", {"image_masks": torch.tensor([False, True])}),
    ("image_masks", {"image_masks": torch.tensor([[True, True], [True, False]])}),
    ("image_masks", {"image_masks": "ab"}),
    ("image_masks", {"image_masks": [None, True]}),
    ("image_masks", {"image_masks": [[True], [True, False]]}),
    ("image_masks", {"image_masks": torch.ones(2, dtype=torch.bool, device="meta")}),
    ("image_masks", {"image_masks": torch.ones(2, dtype=torch.bool).to_sparse()}),
    ("pixel_values is a torch.sparse_coo", {"pixel_values": torch.zeros(2, 2, 3, 28, 28).to_sparse()}),
    ("input_ids is a torch.sparse_coo", {"input_ids": IDS.to_sparse()}),
    ("lang_lens is a torch.sparse_coo", {"lang_lens": torch.tensor([1, 3]).to_sparse()}),
    ("noise is a torch.sparse_coo", {"noise": torch.zeros(2, SIZES.horizon, SIZES.action_dim).to_sparse()}),
]

BAD_ROLLOUT_FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("sigmas", {"sigmas": None}),
    ("sigmas", {"sigmas": torch.zeros(STEPS)}),
    ("sigmas", {"sigmas": torch.zeros(2, 0)}),
    ("sigmas", {"sigmas": torch.zeros(1, STEPS)}),
    ("sigmas", {"sigmas": torch.zeros(2, STEPS, dtype=torch.float64)}),
    ("sigmas", {"sigmas": torch.tensor([[0.0, -0.1, 0.0]] * 2)}),
    ("sigmas", {"sigmas": torch.tensor([[0.0, NAN, 0.0]] * 2)}),
    ("sigmas", {"sigmas": torch.tensor([[0.0, float("inf"), 0.0]] * 2)}),
    ("sigmas is a torch.sparse_coo", {"sigmas": torch.zeros(2, STEPS).to_sparse()}),
    ("step_noise", {"step_noise": torch.zeros(2, STEPS + 1, SIZES.horizon, SIZES.action_dim)}),
    ("step_noise", {"step_noise": torch.zeros(2, STEPS, SIZES.horizon, SIZES.action_dim, dtype=torch.float16)}),
]


def ids_of(cases: list[tuple[str, dict[str, Any]]]) -> list[str]:
    return [f"{i}-{name}" for i, (name, _) in enumerate(cases)]


@pytest.mark.parametrize("name, change", BAD_FIELDS, ids=ids_of(BAD_FIELDS))
def test_step_refuses(name: str, change: dict[str, Any], make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(RequestError, match=name):
        engine.step(PI05Request(**(request_fields() | change)))
    with pytest.raises(RequestError, match=name):
        engine.value(PI05Request(**(request_fields() | change)))
    engine.step(step_request())


@pytest.mark.parametrize("name, change", BAD_FIELDS + BAD_ROLLOUT_FIELDS, ids=ids_of(BAD_FIELDS + BAD_ROLLOUT_FIELDS))
def test_rollout_step_refuses(name: str, change: dict[str, Any], make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(RequestError, match=name):
        engine.rollout_step(PI05RolloutRequest(**(rollout_fields() | change)))
    engine.rollout_step(rollout_request())


@pytest.mark.parametrize("batch", [0, 5])
def test_batch_outside_the_limits(batch: int, make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch_size=4)
    given = request_fields(5)
    request = PI05Request(**{name: value[:batch] for name, value in given.items()})
    with pytest.raises(RequestError, match=r"1\.\.4.*max_batch_size"):
        engine.step(request)


@pytest.mark.parametrize("field", ["pixel_values", "noise", "step_noise"])
@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_check_finite_names_the_field(field: str, value: float, make_engine: MakeEngine) -> None:
    given = rollout_fields()
    given[field] = given[field].clone()
    given[field].view(-1)[3] = value
    request = PI05RolloutRequest(**given)
    with pytest.raises(RequestError, match=field):
        make_engine(runtime={"check_finite": True}).rollout_step(request)
    make_engine().rollout_step(request)  # off by default: the caller pays nothing


@pytest.mark.parametrize("wrong", [None, {}, "request"])
def test_something_that_is_no_request(wrong: Any, make_engine: MakeEngine) -> None:
    engine = make_engine()
    for call in (engine.step, engine.value, engine.rollout_step):
        with pytest.raises(RequestError, match="PI05"):
            call(wrong)


def test_rollout_step_needs_a_rollout_request(make_engine: MakeEngine) -> None:
    with pytest.raises(RequestError, match="PI05RolloutRequest"):
        make_engine().rollout_step(step_request())  # type: ignore[arg-type]


def test_pixel_types_and_int32_lengths_are_accepted(make_engine: MakeEngine) -> None:
    engine = make_engine()
    expected = engine.step(step_request())
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        given = request_fields()
        given["pixel_values"] = given["pixel_values"].to(dtype)
        given["lang_lens"] = given["lang_lens"].int()
        found = engine.step(PI05Request(**given))
        assert float((found - expected).abs().max()) < (1e-6 if dtype == torch.float32 else 0.1)


def test_non_contiguous_inputs(make_engine: MakeEngine) -> None:
    engine = make_engine()
    given = request_fields()
    flipped = dict(given)
    flipped["pixel_values"] = given["pixel_values"].permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    flipped["input_ids"] = given["input_ids"].t().contiguous().t()
    flipped["noise"] = given["noise"].transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(engine.step(PI05Request(**given)), engine.step(PI05Request(**flipped)))


@pytest.mark.parametrize("size", [0, -1, 1.5, None])
def test_max_batch_size_must_be_positive(size: Any, checkpoint: Any) -> None:
    with pytest.raises(RequestError, match="max_batch_size"):
        PI05Args(checkpoint_dir=checkpoint, max_batch_size=size)


@pytest.mark.parametrize(
    "args, message",
    [
        ({"action_chunk": SIZES.horizon + 1}, "action_chunk"),
        ({"action_chunk": 0}, "action_chunk"),
        ({"num_steps": 0}, "num_steps"),
        ({"value_mode": "median_token"}, "value_mode"),
    ],
)
def test_arguments_that_contradict_the_model(args: dict[str, Any], message: str, checkpoint: Any) -> None:
    with pytest.raises((PhyaiError, ValueError), match=message):
        build_engine(checkpoint, **args)
