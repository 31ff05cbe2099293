# SPDX-License-Identifier: Apache-2.0
"""One step's kept prefixes in the life of an actor: budget, store, log lines, and what happens when memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from rlinf_phyai.actor.prefix import PrefixKeys
from rlinf_phyai.actor.prefix_budget import FixedBudget, PrefixBudget, choose_budget, gib
from rlinf_phyai.actor.prefix_store import PrefixStore

KEY = "rollout.phyai.actor_prefix_cache_gib"
Result = TypeVar("Result")


class KeptPrefixes:
    """Keeps prefixes from the rescoring for training.

    Args:
        choice: ``rollout.phyai.actor_prefix_cache_gib``.
        device: where the actor computes.
        log: takes a line; called on rank 0 when what is kept changes, and on any rank whose memory ran out.
        repeatable: a forward may be run again on this rank alone: its model is not divided among several.

    Attributes:
        metrics: ``actor/prefixes_kept`` of the last rescoring, the fraction of its micro-batches.
    """

    def __init__(self, choice: Any, device: torch.device, log: Callable[[str], None], *, repeatable: bool) -> None:
        self._choice, self._device, self._log, self._repeatable = choice, device, log, repeatable
        self.budget: PrefixBudget = choose_budget(choice, device)
        self.store = PrefixStore()
        self.metrics: dict[str, float] = {}
        self._said: tuple[int, int] | None = None

    def begin(self, prompt_lengths: Sequence[int], typical: bool = True) -> None:
        """A step's rescoring begins. All ranks take the smallest budget of any (a collective call).

        Args:
            prompt_lengths: of every micro-batch, in order, its longest prompt.
            typical: the step needs the memory that later ones will; others keep nothing under ``auto``.
        """
        budget = torch.tensor(self.budget.begin(typical), device=self._device)
        if torch.distributed.get_world_size() > 1:
            torch.distributed.all_reduce(budget, op=torch.distributed.ReduceOp.MIN)
        self.store.begin(int(budget), prompt_lengths)

    def scored(self, score: Callable[[], Result]) -> Result:
        """``score()``; where memory runs out while prefixes are kept, they are dropped and it is called again.

        Raises:
            torch.OutOfMemoryError: nothing is kept, or other ranks wait inside the same forward.
        """
        self.budget.watch()
        try:
            return score()
        except torch.OutOfMemoryError as error:
            if not self.store.nbytes:
                raise
            if not self._repeatable:
                raise self._explained(error) from error
        # Outside the handler: the error holds the frames of the forward, and these its tensors.
        self._drop("the rescoring")
        return score()

    def add(self, keys: PrefixKeys | None) -> None:
        """Offer the next micro-batch's keys."""
        try:
            self.store.add(keys)
            return
        except torch.OutOfMemoryError:
            pass
        self._drop("taking the memory for them")
        self.store.add(None)

    def agree(self) -> None:
        """The rescoring has ended: keep what all ranks kept (a collective call)."""
        self.store.agree(self._device)
        kept = self.store.kept
        self._say(sum(kept), len(kept))
        self.metrics = {"actor/prefixes_kept": sum(kept) / len(kept)}

    def get(self, micro_batch: int) -> PrefixKeys | None:
        """Keys of a micro-batch in training's order, over all epochs; ``None`` where the prefix must run."""
        return self.store.get(micro_batch)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Around a step's training. At its end the budget learns, and the memory goes back to the device, for the engine.

        Raises:
            torch.OutOfMemoryError: with what was kept and the key to set. A backward pass that has begun is not repeated.
        """
        try:
            yield
            self.budget.end(self.store.nbytes)
        except torch.OutOfMemoryError as error:
            if not self.store.nbytes:
                raise
            raise self._explained(error) from error
        finally:
            self._free()

    def _free(self) -> None:
        held = self.store.nbytes
        self.store.clear()
        if held and self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _drop(self, where: str) -> None:
        size = self.store.nbytes
        self.store.drop()
        self.budget.give_up()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self._log(
            f"memory ran out in {where}: {gib(size)} GiB of kept prefixes are dropped, and none are kept from now on. Training "
            f"computes them again, with the same results. ({KEY}: {self._choice}; a smaller number, or 0, avoids this.)"
        )

    def _explained(self, error: torch.OutOfMemoryError) -> torch.OutOfMemoryError:
        return torch.OutOfMemoryError(
            f"{error} The actor kept {gib(self.store.nbytes)} GiB of prefixes at that moment ({KEY}: {self._choice}). Set {KEY}: "
            "0, or a smaller number of GiB."
        )

    def _say(self, kept: int, count: int) -> None:
        """One line where the number of kept micro-batches or the memory that they take (in GiB) has changed."""
        state = kept, self.store.nbytes // 2**30
        never_any = self._said is None and isinstance(self.budget, FixedBudget) and not self.budget.size
        if state == self._said or never_any:
            return
        self._said = state
        if torch.distributed.get_rank() == 0:
            self._log(
                f"prefixes kept for training: {kept} of {count} micro-batches, {gib(self.store.nbytes)} of "
                f"{gib(self.store.budget)} GiB allowed ({self.budget})"
            )
