# SPDX-License-Identifier: Apache-2.0
"""What the memory benchmark makes of its samples."""

from __future__ import annotations

import pytest

from benchmarks.leak import WARM_UP, growth


def test_growth_leaves_out_the_warm_up() -> None:
    rows = [{"step": n, "flat": 900.0 if n <= WARM_UP else 1000.0, "leaks": 100.0 + 3.0 * n} for n in range(1, 13)]
    assert growth(rows) == pytest.approx({"flat": 0.0, "leaks": 3.0}, abs=1e-9)
    assert growth(rows[: WARM_UP + 1]) == {}
