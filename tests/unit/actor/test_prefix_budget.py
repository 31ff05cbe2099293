# SPDX-License-Identifier: Apache-2.0
"""The memory that kept prefixes may take, from given numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlinf_phyai.actor.prefix_budget import (
    BudgetRule,
    FixedBudget,
    MeasuredBudget,
    StepMemory,
    choose_budget,
)

GIB = 2**30


def memory(total: float, outside: float, peak: float, reserved: float, kept: float = 0):
    return StepMemory(*(int(gib * GIB) for gib in (total, outside, peak, reserved, kept)))


def budget_after(*steps: StepMemory, now: float = 0) -> float:
    rule = BudgetRule()
    for step in steps:
        rule.observe(step)
    return rule.budget(int(now * GIB)) / GIB


def test_nothing_before_a_step_was_measured():
    assert BudgetRule().budget(0) == 0


@pytest.mark.parametrize(
    "step, expected",
    [
        (memory(140, 16, 41, 45), 140 - 16 - 41 - 14),  # a tenth of the device stays free
        (memory(140, 16, 41, 61), 140 - 16 - 41 - 20),  # the allocator needed 20 more than its tensors took
        (
            memory(140, 16, 41, 120),
            140 - 16 - 41 - 28,
        ),  # it filled the device because nobody stopped it: a fifth at most
        (memory(80, 14, 62, 66), 0),  # nothing left
        (memory(24, 2, 17.9, 19), 1.5),  # 1.7: whole quarters
    ],
)
def test_what_actor_and_others_leave_less_a_margin(step: StepMemory, expected: float):
    assert budget_after(step) == expected


def test_two_processes_on_one_device():
    """The engine's process holds 10 GiB; then its graphs and an evaluation's renderers take 6 more."""
    first = memory(80, 14, 41, 44)
    assert budget_after(first, now=10) == 80 - 14 - 41 - 8  # the most that it held during the step
    assert (
        budget_after(first, now=20) == 80 - 20 - 41 - 8
    )  # what it holds before the step: the prefixes give way at once
    second = memory(80, 20, 41 + 17, 44 + 17, kept=17)
    assert budget_after(first, second, now=14) == 80 - 20 - 41 - 8
    third = memory(80, 14, 41 + 11, 44 + 11, kept=11)
    assert budget_after(first, second, third, now=14) == 80 - 14 - 41 - 8  # it has left again


def test_kept_prefixes_are_not_taken_for_the_actors_own_need():
    first = memory(140, 16, 41, 45)
    expected = budget_after(first)
    second = memory(140, 16, 41 + 60, 45 + 60, kept=60)
    assert budget_after(first, second) == expected
    # With every prefix kept, training ran less of the model: what was measured without them still counts.
    assert budget_after(first, replace(second, peak=second.peak - 5 * GIB)) <= expected
    # A longer prompt needs more than any step before.
    assert budget_after(first, replace(second, peak=second.peak + 3 * GIB)) == expected - 3


class GivenMeter:
    """A device of 80 GiB whose numbers a test sets."""

    total = 80 * GIB

    def __init__(self) -> None:
        self.others, self.peak = 12, 40

    def begin(self) -> int:
        return self.outside()

    def outside(self) -> int:
        return self.others * GIB

    def peaks(self) -> tuple[int, int]:
        return self.peak * GIB, (self.peak + 2) * GIB


def test_the_steps_of_a_run():
    meter = GivenMeter()
    budget = MeasuredBudget(meter)
    assert budget.begin() == 0
    assert "the first step measures" in str(budget)
    meter.others = 15  # while the step runs
    budget.watch()
    meter.others = 12
    budget.end(kept=0)
    assert budget.begin() == (80 - 15 - 40 - 8) * GIB
    assert str(budget) == "auto: of the device's 80 GiB the actor itself needs 40, others hold 15, 8 stay free"
    meter.peak = 57
    budget.end(kept=17 * GIB)
    assert budget.begin() == (80 - 12 - 40 - 8) * GIB
    budget.give_up()
    assert budget.begin() == 0
    assert "memory ran out" in str(budget)


def test_choices():
    cpu = torch.device("cpu")
    assert choose_budget("auto", cpu).begin() == 0
    assert choose_budget(None, cpu).begin() == 0
    fixed = choose_budget(1.5, cpu)
    assert isinstance(fixed, FixedBudget)
    assert fixed.begin() == 1.5 * GIB
    fixed.give_up()
    assert fixed.begin() == 0


def test_a_step_that_needs_less_than_later_ones_counts_for_nothing():
    meter = GivenMeter()
    budget = MeasuredBudget(meter)
    meter.peak = 10  # only the critic is trained
    assert budget.begin(typical=False) == 0
    budget.end(kept=0)
    meter.peak = 40
    assert budget.begin() == 0  # measures
    budget.end(kept=0)
    assert budget.begin(typical=False) == 0
    assert budget.begin() == (80 - 12 - 40 - 8) * GIB
