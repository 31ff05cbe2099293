# SPDX-License-Identifier: Apache-2.0
"""L11: smaller batches do not pay for the largest, and a large evaluation batch does not slow the calls after it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_phyai.engine import Engine
from rlinf_phyai.models.pi05.scheduler import batch_bucket, prompt_bucket

from .conftest import assert_same_bits, rollout_request, rollout_tensors


@given(batch=st.integers(1, 1000), limit=st.integers(1, 1000))
def test_l11_batch_buckets(batch: int, limit: int) -> None:
    batch = min(batch, limit)
    bucket = batch_bucket(batch, limit)
    assert batch <= bucket <= limit
    assert bucket < 2 * batch or batch == bucket  # never as much padding as work
    assert batch_bucket(bucket, limit) == bucket
    if batch < limit:
        assert batch_bucket(batch + 1, limit) >= bucket


@given(length=st.integers(1, 200), limit=st.integers(1, 200))
def test_l11_prompt_buckets(length: int, limit: int) -> None:
    length = min(length, limit)
    bucket = prompt_bucket(length, limit)
    assert length <= bucket <= min(limit, length + 7)
    assert prompt_bucket(bucket, limit) == bucket


@pytest.mark.parametrize("limit", [1, 8, 500])
def test_l11_a_single_observation_is_computed_alone(limit: int) -> None:
    assert batch_bucket(1, limit) == 1


def test_l11_a_large_batch_leaves_small_calls_as_they_were(make_engine: Callable[..., Engine]) -> None:
    """The small call keeps its own buffers: same sizes and same bits before and after a batch of 500."""
    engine = make_engine(max_batch_size=500)
    before = rollout_tensors(engine, rollout_request(batch=2))
    assert engine._model is not None
    small = set(engine._model.scheduler._buffers)
    rollout_tensors(engine, rollout_request(batch=500))
    assert_same_bits(rollout_tensors(engine, rollout_request(batch=2)), before)
    assert {shape.batch for shape in small} == {2}
    assert {shape.batch for shape in engine._model.scheduler._buffers} == {2, 500}
