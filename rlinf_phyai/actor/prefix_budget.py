# SPDX-License-Identifier: Apache-2.0
"""How much device memory kept prefixes may take: a rule on measured numbers, and the little code that measures.

The rule. A step tells what the actor's own tensors need at their peak (its peak less the prefixes kept then), and how much the
others hold: the engine's process, environments that render, CUDA contexts, libraries. What neither needs is free, and prefixes
get it less a margin. The margin is a tenth of the device, for what moves from step to step: a longer prompt, a renderer
that draws one more scene, an allocation of NCCL's. Where torch's allocator reserved more than its tensors took, the margin grows
to that difference, up to a fifth of the device: with less memory to reserve, the allocator would have to return and request
blocks within a step.

Prefixes exist from the rescoring to the end of training only. An engine that is offloaded meanwhile, and reloads afterwards,
finds their memory free again, so nothing is set aside for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

GRAIN = 2**28  # budgets are multiples of a quarter GiB, so that they do not change with every byte


@dataclass(frozen=True)
class StepMemory:
    """Device memory of one training step, from the rescoring to the end of training. All bytes.

    Attributes:
        total: of the device.
        outside: most that anything but this process's torch held: other processes, contexts, libraries.
        peak: most that this process's tensors held, kept prefixes included.
        reserved: most that torch's allocator had taken for them.
        kept: kept prefixes.
    """

    total: int
    outside: int
    peak: int
    reserved: int
    kept: int


class BudgetRule:
    """What the steps so far leave for prefixes; see the module's docstring.

    The actor's need only grows: a step whose prefixes were all kept ran less of the model in training than one without would.
    """

    def __init__(self) -> None:
        self._peak = 0
        self._last: StepMemory | None = None

    def observe(self, step: StepMemory) -> None:
        """Learn from a finished step."""
        self._peak = max(self._peak, step.peak - step.kept)
        self._last = step

    @property
    def own(self) -> int:
        """Bytes that the actor needs at its peak without prefixes."""
        return self._peak

    @property
    def margin(self) -> int:
        """Bytes that stay free."""
        if self._last is None:
            return 0
        total = self._last.total
        return min(max(total // 10, self._last.reserved - self._last.peak), total // 5)

    def outside(self, now: int) -> int:
        """Bytes that the others are taken to hold: the most of the last step, or what they hold ``now``."""
        return max(now, self._last.outside if self._last else 0)

    def budget(self, outside_now: int) -> int:
        """Bytes for the prefixes of the next step: 0 before anything was observed."""
        if self._last is None:
            return 0
        left = self._last.total - self.outside(outside_now) - self.own - self.margin
        return max(0, left // GRAIN * GRAIN)


class PrefixBudget(Protocol):
    """Bytes for kept prefixes, step by step."""

    def begin(self, typical: bool = True) -> int:
        """A step begins; bytes that its prefixes may take on this rank.

        Args:
            typical: it needs the memory that later ones will.
        """

    def watch(self) -> None:
        """Called while the step runs, about once for each micro-batch."""

    def end(self, kept: int) -> None:
        """The step has been trained; its prefixes take ``kept`` bytes and are still there."""

    def give_up(self) -> None:
        """Memory ran out: 0 from now on."""

    def __str__(self) -> str: ...


class FixedBudget:
    """The bytes that the config names."""

    def __init__(self, size: int) -> None:
        self.size = size

    def begin(self, typical: bool = True) -> int:
        return self.size

    def watch(self) -> None:
        return None

    def end(self, kept: int) -> None:
        return None

    def give_up(self) -> None:
        self.size = 0

    def __str__(self) -> str:
        return f"{gib(self.size)} GiB by the config"


class MeasuredBudget:
    """``auto``: what the actor's own peak leaves free. The first typical step keeps nothing, and measures."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._rule = BudgetRule()
        self._most_outside = 0
        self._typical = True
        self._given_up = False

    def begin(self, typical: bool = True) -> int:
        self._most_outside, self._typical = self._meter.begin(), typical
        return self._rule.budget(self._most_outside) if typical and not self._given_up else 0

    def watch(self) -> None:
        self._most_outside = max(self._most_outside, self._meter.outside())

    def end(self, kept: int) -> None:
        if not self._typical:
            return
        self.watch()
        total, peak, reserved = self._meter.total, *self._meter.peaks()
        self._rule.observe(StepMemory(total, self._most_outside, peak, reserved, kept))

    def give_up(self) -> None:
        self._given_up = True

    def __str__(self) -> str:
        if self._given_up:
            return "auto: none since memory ran out"
        rule, total = self._rule, self._meter.total
        if not self._typical:
            return "auto: not while a step needs less than later ones will"
        if not rule.own:
            return "auto: the first step measures"
        return (
            f"auto: of the device's {gib(total)} GiB the actor itself needs {gib(rule.own)}, others hold "
            f"{gib(rule.outside(self._most_outside))}, {gib(rule.margin)} stay free"
        )


class Meter(Protocol):
    """Reads a device's memory, in bytes."""

    total: int

    def begin(self) -> int:
        """Peaks count from now on; returns :meth:`outside`."""

    def outside(self) -> int:
        """What anything but this process's torch holds now."""

    def peaks(self) -> tuple[int, int]:
        """Most that this process's tensors held, and most that torch reserved for them, since :meth:`begin`."""


class CudaMeter:
    """The numbers of torch and of the driver."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.total = torch.cuda.mem_get_info(device)[1]

    def begin(self) -> int:
        torch.cuda.reset_peak_memory_stats(self._device)
        return self.outside()

    def outside(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free - torch.cuda.memory_reserved(self._device)

    def peaks(self) -> tuple[int, int]:
        return torch.cuda.max_memory_allocated(self._device), torch.cuda.max_memory_reserved(self._device)


def choose_budget(choice: Any, device: torch.device) -> PrefixBudget:
    """Of ``rollout.phyai.actor_prefix_cache_gib``: GiB, or ``auto`` (on a device without CUDA: nothing)."""
    if choice != "auto":
        return FixedBudget(int(float(choice or 0) * 2**30))
    return MeasuredBudget(CudaMeter(device)) if device.type == "cuda" else FixedBudget(0)


def gib(size: int) -> str:
    """Bytes as a number of GiB."""
    return f"{size / 2**30:.3g}"
