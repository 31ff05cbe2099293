# SPDX-License-Identifier: Apache-2.0
"""The projection's arithmetic, on figures that are easy to add up."""

from __future__ import annotations

import pytest

from benchmarks.projection import COLLECTION, Recipe, project

ENGINE = {
    "rows": [{"batch": 4, "phyai": {"median": 100.0}, "eager": {"median": 300.0}}],
    "stages": {
        "1": {"vision": {"ms": 9.0}, "prefix": {"ms": 9.0}, "prefix_value": {"ms": 9.0}},
        "2": {"vision": {"ms": 10.0}, "prefix": {"ms": 20.0}, "prefix_value": {"ms": 30.0}},
    },
}
ACTOR = {
    "arguments": {"samples": 100},
    "dense": {"rescoring_ms_per_observation": 20.0, "training_ms_per_observation": 25.0},
    "fused": {
        "rescoring_ms_per_observation": 5.0,
        "training_ms_per_observation": 8.0,
        "training_stages": {COLLECTION: 3.0},
    },
}
RECIPE = Recipe(environments=4, epochs=2, chunk_steps=5)
OTHER = {"eager": {"sync": 1.0}, "phyai": {"sync": 0.5}}


def test_parts_add_up():
    found = project(ENGINE, ACTOR, OTHER, RECIPE)
    assert RECIPE.samples == 40
    assert list(found) == ["stock RLinf", "stock RLinf, rescoring", "phyai, no rescoring", "phyai, rescoring fused"]
    stock = found["stock RLinf"]
    assert stock == pytest.approx({"rollout": 12 * 0.3, "rescoring": 0.0, "training": 1.0, "sync": 1.0, "total": 5.6})
    assert found["stock RLinf, rescoring"]["rescoring"] == pytest.approx(0.8)
    # Ten calls of four: 100 ms and, per observation, 5 ms for a value; two values alone of (10 + 30) / 2 ms per observation.
    assert found["phyai, no rescoring"]["rollout"] == pytest.approx((10 * 120 + 2 * 80) / 1e3)
    fused = found["phyai, rescoring fused"]
    assert fused["rollout"] == pytest.approx((10 * 100 + 2 * 80) / 1e3)
    assert fused["rescoring"] == pytest.approx(0.2)
    assert fused["training"] == pytest.approx((40 * 5.0 + 100 * 3.0) / 1e3)  # the collection does not grow


def test_a_batch_that_was_not_measured_is_named():
    with pytest.raises(ValueError, match=r"no eager row for a batch of 8; it has batches \[4\]"):
        project(ENGINE, ACTOR, OTHER, Recipe(8, 1, 1))
