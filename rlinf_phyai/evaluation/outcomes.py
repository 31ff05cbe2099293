# SPDX-License-Identifier: Apache-2.0
"""Episodes and what follows from them. Pure functions: no simulator, no Ray."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

_Z = NormalDist().inv_cdf(0.975)  # 95%, two-sided


@dataclass(frozen=True, order=True)
class Episode:
    """One finished episode.

    Attributes:
        task: index of the task in its suite.
        trial: index of the initial state among the task's.
        success: the task was solved at some time of the episode.
        steps: environment steps of the episode.
    """

    task: int
    trial: int
    success: bool
    steps: int


@dataclass(frozen=True)
class Rate:
    """A success rate with its 95% Wilson interval ``[low, high]`` (E. B. Wilson, 1927).

    Unlike the normal approximation it stays inside [0, 1] and says something about 0 of n and n of n.
    """

    successes: int
    episodes: int

    @property
    def value(self) -> float:
        return self.successes / self.episodes if self.episodes else math.nan

    @property
    def low(self) -> float:
        return self._bound(-1.0) if self.successes else 0.0

    @property
    def high(self) -> float:
        return self._bound(1.0) if self.successes < self.episodes else 1.0

    def _bound(self, sign: float) -> float:
        n, p = self.episodes, self.value
        spread = _Z * math.sqrt(p * (1 - p) / n + _Z * _Z / (4 * n * n))
        return (p + _Z * _Z / (2 * n) + sign * spread) / (1 + _Z * _Z / n)

    @classmethod
    def of(cls, outcomes: Iterable[bool]) -> Rate:
        found = list(outcomes)
        return cls(sum(found), len(found))


def rates(episodes: Sequence[Episode]) -> dict[int, Rate]:
    """Success rate by task."""
    tasks = sorted({episode.task for episode in episodes})
    return {task: Rate.of(e.success for e in episodes if e.task == task) for task in tasks}


@dataclass(frozen=True)
class Paired:
    """Two policies on the same initial states: how many episodes both, one or none of them solved."""

    both: int
    only_first: int
    only_second: int
    neither: int

    @property
    def episodes(self) -> int:
        return self.both + self.only_first + self.only_second + self.neither

    @property
    def difference(self) -> float:
        """First rate minus second."""
        return (self.only_first - self.only_second) / self.episodes if self.episodes else math.nan

    @property
    def p_value(self) -> float:
        """Two-sided exact McNemar test: chance of so uneven a split if neither policy were better.

        Only the episodes that the policies end differently tell them apart; each is then a fair coin.
        """
        n, k = self.only_first + self.only_second, min(self.only_first, self.only_second)
        return min(1.0, 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n)


def first_of_each(episodes: Iterable[Episode]) -> list[Episode]:
    """The first episode of every initial state.

    The last round of an evaluation may begin again at the first states. A policy that acts without noise plays them as before, so
    a repeated episode says nothing new, and a test that took it for a further coin toss would be too sure.
    """
    found: dict[tuple[int, int], Episode] = {}
    for episode in episodes:
        found.setdefault((episode.task, episode.trial), episode)
    return list(found.values())


def pair(first: Sequence[Episode], second: Sequence[Episode]) -> Paired:
    """Episodes paired by task and initial state, each state once; those that one side lacks are left out.

    Raises:
        ValueError: no initial state occurs on both sides.
    """
    others = {(e.task, e.trial): e.success for e in first_of_each(second)}
    pairs = [(e.success, others[e.task, e.trial]) for e in first_of_each(first) if (e.task, e.trial) in others]
    if not pairs:
        raise ValueError("the evaluations share no initial state, so nothing can be paired.")
    count = {kind: pairs.count(kind) for kind in ((True, True), (True, False), (False, True), (False, False))}
    return Paired(*count.values())
