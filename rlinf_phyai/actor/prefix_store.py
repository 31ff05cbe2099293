# SPDX-License-Identifier: Apache-2.0
"""Prefix keys of the rescoring's micro-batches, for training, up to a budget of device memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlinf_phyai.actor.prefix import PrefixKeys


class PrefixStore:
    """Keeps what fits of a step.

    The prefix is frozen within a step and training walks the same micro-batches in every epoch, so what fits need not
    be computed again; at full size an observation takes 9.8 MB (18 layers, 534 tokens, bfloat16).

    All memory is taken at once, with the first micro-batch, and keys are copied there. Kept where they were computed, they would lie
    between the large temporary tensors of every later micro-batch, and leave the allocator with gaps that nothing else fits into.
    """

    def __init__(self) -> None:
        self.budget = 0
        self._lengths: list[int] = []
        self._blocks: list[torch.Tensor | None] = []
        self._entries: list[PrefixKeys | None] = []

    def begin(self, budget: int, prompt_lengths: Sequence[int]) -> None:
        """A step begins; what was kept is freed.

        Args:
            budget: bytes; 0 keeps nothing.
            prompt_lengths: of every micro-batch, in order, its longest prompt.
        """
        self.clear()
        self.budget, self._lengths = budget, list(prompt_lengths)

    def add(self, keys: PrefixKeys | None) -> None:
        """Remember the next micro-batch's keys, if they are among those that fit.

        Raises:
            torch.OutOfMemoryError: the device has less memory than the budget.
        """
        index = len(self._entries)
        if index == 0 and keys is not None and self.budget:
            self._allocate(keys)
        block = self._blocks[index] if index < len(self._blocks) else None
        if keys is None or block is None or keys.numel > block.numel():
            self._entries.append(None)
        else:
            self._entries.append(keys.copy_into(block))

    def _allocate(self, first: PrefixKeys) -> None:
        """One block for each micro-batch that will fit, by the size of the first."""
        samples, tokens = first.valid.shape
        images, elements = tokens - self._lengths[0], first.numel // (samples * tokens) * samples
        if first.keys[0].is_cuda:
            torch.cuda.empty_cache()  # so that each block becomes an allocation of its own
        used = 0
        for length in self._lengths:
            count = elements * (images + length)
            size = count * first.keys[0].element_size()
            fits = used + size <= self.budget
            used += size if fits else 0
            self._blocks.append(first.keys[0].new_empty(count) if fits else None)

    def agree(self, device: torch.device | str | int) -> None:
        """After the rescoring: keep what every rank kept. Collective where there are several.

        A sharded layer gathers its weights from all ranks whenever one calls it, so all must skip the same layers.
        """
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            flags = torch.tensor([entry is not None for entry in self._entries], dtype=torch.int32, device=device)
            torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MIN)
            for index, everywhere in enumerate(flags.tolist()):
                if not everywhere:
                    self._entries[index] = None
        kept = [entry is not None for entry in self._entries]
        self._blocks = [block if keep else None for block, keep in zip(self._blocks, kept, strict=False)]

    def get(self, micro_batch: int) -> PrefixKeys | None:
        """Keys of a micro-batch, counted on over all epochs; ``None`` where they were not kept."""
        return self._entries[micro_batch % len(self._entries)] if self._entries else None

    @property
    def nbytes(self) -> int:
        """Memory that is taken."""
        return sum(block.nbytes for block in self._blocks if block is not None)

    @property
    def kept(self) -> list[bool]:
        """Of every micro-batch so far, whether it was kept."""
        return [entry is not None for entry in self._entries]

    def drop(self) -> None:
        """Free the memory; the rest of the step keeps nothing."""
        self._blocks, self._entries, self.budget = [], [None] * len(self._entries), 0

    def clear(self) -> None:
        """Free the memory and forget the step."""
        self._blocks, self._entries = [], []
