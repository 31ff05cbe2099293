# SPDX-License-Identifier: Apache-2.0
"""Task sentences to padded token ids, the way the policy was trained.

The sentence is stripped, underscores and line breaks become blanks. Without state the prompt is the sentence and a
separate line break; with state (an option of some checkpoints) each state value in [-1, 1] becomes one of 256 bin
numbers written into the prompt. Ids are cut at ``max_len`` or padded with 0 on the right.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch

_logger = logging.getLogger(__name__)

_STATE_BINS = np.linspace(-1.0, 1.0, 256 + 1)[:-1]


class PromptTokenizer:
    """Sentencepiece tokenizer with a bounded cache of finished prompts.

    Args:
        model_proto: the serialised sentencepiece model (the contents of a ``tokenizer.model`` file).
        max_len: length every prompt is padded or cut to, in tokens.
        cache_size: number of prompts kept; the least recently used is dropped. Prompts with state are not kept, since
            hardly any comes twice.

    Raises:
        ValueError: not a sentencepiece model, or ``max_len`` below 1.
    """

    def __init__(self, model_proto: bytes, max_len: int, cache_size: int = 1024) -> None:
        import sentencepiece

        if max_len < 1:
            raise ValueError(f"max_len is {max_len}; a prompt needs room for at least 1 token")
        try:
            self._pieces = sentencepiece.SentencePieceProcessor(model_proto=model_proto)
        except RuntimeError as error:
            raise ValueError(f"the tokenizer file is not a sentencepiece model ({error})") from error
        self.model_proto = model_proto
        self.max_len = max_len
        self._cache_size = cache_size
        self._cache: OrderedDict[str, tuple[torch.Tensor, int]] = OrderedDict()
        self._newline = self._pieces.encode("\n")

    @classmethod
    def from_file(cls, path: Path | str, max_len: int, cache_size: int = 1024) -> PromptTokenizer:
        """Reads a ``tokenizer.model`` file.

        Raises:
            FileNotFoundError: no such file; the message names the path.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"no tokenizer at {path}; pass the sentencepiece model of the checkpoint")
        return cls(path.read_bytes(), max_len, cache_size)

    def _encode(self, sentence: str, state: np.ndarray | None) -> list[int]:
        text = sentence.strip().replace("_", " ").replace("\n", " ")
        if state is None:
            return self._pieces.encode(text, add_bos=True) + self._newline
        bins = np.digitize(state, bins=_STATE_BINS) - 1
        numbers = " ".join(str(number) for number in bins)
        return self._pieces.encode(f"Task: {text}, State: {numbers};\nAction: ", add_bos=True)

    def _padded(self, sentence: str, state: np.ndarray | None) -> tuple[torch.Tensor, int]:
        tokens = self._encode(sentence, state)
        if len(tokens) > self.max_len:
            _logger.warning(
                "The prompt %r has %d tokens, more than the maximum of %d; the rest is cut off. Shorten the task"
                " sentence or use a checkpoint with a larger max_token_len.",
                sentence,
                len(tokens),
                self.max_len,
            )
            tokens = tokens[: self.max_len]
        row = torch.zeros(self.max_len, dtype=torch.int64)
        row[: len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        return row, len(tokens)

    def _cached(self, sentence: str) -> tuple[torch.Tensor, int]:
        entry = self._cache.get(sentence)
        if entry is None:
            entry = self._padded(sentence, None)
            self._cache[sentence] = entry
            if len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        else:
            self._cache.move_to_end(sentence)
        return entry

    def __call__(self, sentences: list[str], states: np.ndarray | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokenises a batch.

        Args:
            sentences: B task sentences.
            states: normalised states ``[B, n]`` to write into the prompts, or None.

        Returns:
            Ids ``[B, max_len]`` int64, 0 after each prompt, and lengths ``[B]`` int64; both on the CPU.

        Raises:
            ValueError: no sentence, or another number of states than of sentences.
        """
        if not sentences:
            raise ValueError("no task sentence: an empty batch cannot be tokenised")
        if states is None:
            rows = [self._cached(sentence) for sentence in sentences]
        else:
            if len(states) != len(sentences):
                raise ValueError(f"{len(sentences)} task sentences but {len(states)} states")
            rows = [self._padded(sentence, state) for sentence, state in zip(sentences, states, strict=True)]
        ids = torch.stack([row for row, _ in rows])
        return ids, torch.tensor([length for _, length in rows], dtype=torch.int64)
