# SPDX-License-Identifier: Apache-2.0
"""What the caller's process or thread has switched on changes neither the engine's numbers nor its later use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch

from rlinf_phyai.engine import Engine
from rlinf_phyai.rollout.sampling import flow_sde_sigmas

from .checkpoints import random_state
from .conftest import SIZES, assert_same_bits, rollout_request, rollout_tensors


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "inference mode": torch.inference_mode,
    "autograd": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default type bfloat16": lambda: default_dtype(torch.bfloat16),
    "default type float64": lambda: default_dtype(torch.float64),
    "default device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("built_inside", [False, True])
def test_modes_of_the_caller_do_not_count(mode: str, built_inside: bool, make_engine: Callable[..., Engine]) -> None:
    request = rollout_request(num_steps=6)  # not the engine's own number of steps: a schedule is made in the mode
    weights = random_state(SIZES, seed=8)
    reference = make_engine()
    before = rollout_tensors(reference, request)
    with reference.weight_update() as update:
        update(weights)
    after = rollout_tensors(reference, request)

    engine = None if built_inside else make_engine()
    with MODES[mode]():
        engine = engine or make_engine()
        inside = rollout_tensors(engine, request)
    assert_same_bits(inside, before)
    assert not any(tensor.is_inference() or tensor.requires_grad for tensor in inside.values())
    assert_same_bits(rollout_tensors(engine, request), before)
    with MODES[mode](), engine.weight_update() as update:
        update(weights)
    assert_same_bits(rollout_tensors(engine, request), after)


def test_noise_scales_do_not_follow_the_default_type() -> None:
    expected = flow_sde_sigmas(7, 0.5)
    for dtype in (torch.bfloat16, torch.float64):
        with default_dtype(dtype):
            found = flow_sde_sigmas(7, 0.5)
        assert found.dtype is torch.float32
        assert torch.equal(found, expected)
