# SPDX-License-Identifier: Apache-2.0
"""Warnings name the figure, its limit and what to try."""

from __future__ import annotations

import math

import pytest

from rlinf_phyai.actor.monitor import CorrectionMonitor


def metrics(weight: float = 1.0, size: float = 0.9, gap: float = 0.01) -> dict[str, float]:
    return {
        "actor/importance_sampling_weight": weight,
        "actor/importance_sampling_effective_sample_size": size,
        "actor/rollout_train_logprob_gap": gap,
    }


def test_a_healthy_run_is_silent():
    monitor = CorrectionMonitor()
    assert [m for _ in range(30) for m in monitor.check(metrics())] == []


@pytest.mark.parametrize(
    "figures, words",
    [
        ({"weight": 0.4}, ["0.4", "[0.5, 2]", "rlinf-phyai check"]),
        ({"weight": 2.5}, ["2.5", "[0.5, 2]"]),
        ({"size": 0.2}, ["0.2", "0.3"]),
    ],
)
def test_a_figure_out_of_its_limit(figures, words):
    (message,) = CorrectionMonitor().check(metrics(**figures))
    assert all(word in message for word in words)


def test_a_growing_gap():
    monitor = CorrectionMonitor()
    for _ in range(10):
        assert monitor.check(metrics(gap=0.01)) == []
    assert monitor.check(metrics(gap=0.02)) == []
    (message,) = monitor.check(metrics(gap=0.05))
    assert "0.05" in message
    assert "0.011" in message


def test_growth_of_rounding_noise_is_not_reported():
    monitor = CorrectionMonitor()
    for _ in range(10):
        monitor.check(metrics(gap=1e-7))
    assert monitor.check(metrics(gap=1e-5)) == []


def test_too_few_steps_to_compare_with():
    monitor = CorrectionMonitor()
    for _ in range(9):
        monitor.check(metrics(gap=0.01))
    assert monitor.check(metrics(gap=1.0)) == []


def test_a_fully_masked_step_is_skipped():
    monitor = CorrectionMonitor()
    nan = metrics(math.nan, math.nan, math.nan)
    assert [m for _ in range(12) for m in monitor.check(nan)] == []
    assert monitor.check({}) == []
