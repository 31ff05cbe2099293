# SPDX-License-Identifier: Apache-2.0
"""The actor's prefix on real tokens only: used cameras and the prompt, without masked cameras and padding.

RLinf's PI0.5 runs its vision-language prefix over 968 positions of which LIBERO fills about 534. Masked positions are
never attended by valid ones, so leaving them out changes nothing that an action or a log-prob depends on. The critic
after the VLM does read them: it averages over the padding. Their rows follow a simple rule, which :func:`run_prefix`
computes beside the real tokens: a masked row sees every key with the same weight, so its attention output is the mean
of V over all positions, and all prompt padding of a sample is one and the same row.

Rescoring and training call the same function on the same batches, so PPO's ratio before the first step is exactly 1.
Real and masked rows go through each layer in two calls, never in one product: leaving out the masked rows (in training,
where the pooled critic input of the frozen prefix is already known) then changes no bit of the real ones.

Every layer is called as a module, so that FSDP's hooks gather its weights.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma.modeling_gemma import apply_rotary_pos_emb

ATTENTION = "rlinf_phyai_real_tokens"
VALUE_MODES = ("mean_token", "last_token", "first_token")


@dataclass(frozen=True)
class PromptLayout:
    """What the host must know of a micro-batch's prompts before it can queue work; read once, where the tensors are.

    Attributes:
        length: tokens of the longest prompt.
        even: all prompts have this length, so no attention mask is needed.
    """

    length: int
    even: bool

    @classmethod
    def of(cls, tokens: torch.Tensor, mask: torch.Tensor) -> PromptLayout:
        """From tokens int64 and mask bool, both ``[B, L]``. (On a GPU this waits for it.)

        Raises:
            ValueError: a prompt is not right-padded with zeros.
        """
        lengths = mask.sum(dim=1)
        expected = torch.arange(mask.shape[1], device=mask.device)[None] < lengths[:, None]
        padded = ((mask == expected) & (mask | (tokens == 0))).all()
        longest, shortest, fits = torch.stack([lengths.max(), lengths.min(), padded.long()]).tolist()
        if not fits:
            raise ValueError(
                "tokenized_prompt is not right-padded with zeros in every sample; use rollout.phyai.actor_prefix: "
                "dense."
            )
        return cls(longest, longest == shortest)


@dataclass(frozen=True)
class PrefixKeys:
    """Keys and values of a micro-batch's prefix, to be used again: each ``[B, heads, L, head_dim]`` per layer.

    Attributes:
        valid: bool ``[B, L]``.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    valid: torch.Tensor

    @property
    def numel(self) -> int:
        """Elements of all layers."""
        return sum(tensor.numel() for tensor in (*self.keys, *self.values))

    def copy_into(self, block: torch.Tensor) -> PrefixKeys:
        """The same, stored in the flat ``block`` of :attr:`numel` elements. Strides stay, so that all arithmetic does."""
        copies, offset = [], 0
        for tensor in (*self.keys, *self.values):
            dense = torch.empty_like(tensor, device="meta")  # its strides; those of a slice without the gaps
            copies.append(block.as_strided(dense.shape, dense.stride(), offset).copy_(tensor))
            offset += tensor.numel()
        layers = len(self.keys)
        return PrefixKeys(copies[:layers], copies[layers:], self.valid)

    def cache(self) -> DynamicCache:
        """The form in which the expert reads them."""
        cache = DynamicCache()
        cache.key_cache, cache.value_cache = list(self.keys), list(self.values)
        return cache


@dataclass(frozen=True)
class PaddedLayout:
    """The padded prefix that RLinf would have built, in counts.

    Attributes:
        total: all positions (968 at full size), masked cameras and padding included.
        padding: float32 ``[B]``, padded prompt positions of each sample.
        valid: bool ``[B, L]``, real tokens among the ``L`` rows that are computed.
        mode: ``value_vlm_mode``.
    """

    total: int
    padding: torch.Tensor
    valid: torch.Tensor
    mode: str


@dataclass(frozen=True)
class _MaskedRows:
    """Marks a layer call for masked rows. ``real_values`` ``[B, heads, L, head_dim]`` are V of the real tokens."""

    layout: PaddedLayout
    real_values: torch.Tensor


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    masked_rows: _MaskedRows | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers: q ``[B, Hq, L, hd]``, k and v ``[B, Hk, S, hd]`` -> ``[B, L, Hq, hd]``."""
    if masked_rows is not None:
        mean = masked_rows_attention(value, masked_rows.real_values, masked_rows.layout)
        mean = mean.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        return mean[:, None].expand(-1, query.shape[2], -1, -1).contiguous(), None
    groups = query.shape[1] // key.shape[1]
    key, value = (_repeat(x, groups) for x in (key, value))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def _repeat(x: torch.Tensor, groups: int) -> torch.Tensor:
    b, heads, length, dim = x.shape
    return x[:, :, None].expand(b, heads, groups, length, dim).reshape(b, heads * groups, length, dim)


def masked_rows_attention(value: torch.Tensor, real: torch.Tensor, layout: PaddedLayout) -> torch.Tensor:
    """Attention output of every masked row and query head of a sample: the mean of V over all positions.

    The probability is rounded as the actor's softmax rounds it.

    Args:
        value: ``[B, heads, E, hd]``, the masked rows' own V, the padded prompt row last.
        real: ``[B, heads, L, hd]``, V of the real tokens.

    Returns:
        ``[B, heads, hd]``.
    """
    total = (real * layout.valid[:, None, :, None]).sum(dim=2, dtype=torch.float32)
    total = total + value[:, :, :-1].sum(dim=2, dtype=torch.float32)
    total = total + layout.padding[:, None, None] * value[:, :, -1].float()
    # Rounded on the host: a tensor from there would make the host wait for the GPU.
    probability = torch.tensor(1.0 / layout.total, dtype=torch.float32).to(value.dtype).item()
    return (total * probability).to(value.dtype)


def register_attention() -> None:
    """Make the attention function known to transformers. Calling it again changes nothing."""
    if ATTENTION not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)


@contextmanager
def forwards(replacements: Iterable[tuple[torch.nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Inside the block, each module computes the function beside it (which takes the module as its first argument)."""
    replaced = []
    try:
        for module, function in replacements:
            module = getattr(module, "_fsdp_wrapped_module", module)  # FSDP1 wraps; its own forward must stay
            module.forward = types.MethodType(function, module)
            replaced.append(module)
        yield
    finally:
        for module in replaced:
            del module.forward


def run_prefix(
    language_model: Any,
    embs: torch.Tensor,
    valid: torch.Tensor,
    even: bool,
    masked: torch.Tensor | None,
    layout: PaddedLayout | None,
) -> tuple[DynamicCache, torch.Tensor | None]:
    """Run Gemma over the real tokens and, where a critic input is wanted, over the masked rows.

    Args:
        language_model: transformers' ``GemmaModel``.
        embs: ``[B, L, width]``, scaled embeddings of used cameras and prompt; prompts end with padding up to ``L``.
        valid: bool ``[B, L]``.
        even: every row is valid.
        masked: ``[1, E, width]``, embeddings of the masked cameras' rows and of one padded prompt position (last), or
            ``None``: no critic input, and the last layer stops at its keys and values.
        layout: see :class:`PaddedLayout`; needed with ``masked``.

    Returns:
        keys and values ``[B, heads, L, head_dim]`` of every layer, and the critic's input float32 ``[B, width]`` or
        ``None``.
    """
    language_model.config._attn_implementation = ATTENTION
    dtype = language_model.layers[0].self_attn.q_proj.weight.dtype
    hidden = embs.to(dtype) if dtype == torch.bfloat16 else embs
    rotary = language_model.rotary_emb(hidden, torch.cumsum(valid, dim=1) - 1)
    # No mask where every row is real: the fastest attention kernels take none.
    mask = None if even else valid[:, None, None, :].expand(-1, 1, valid.shape[1], -1)
    cache = DynamicCache()
    options: dict[str, Any] = {
        "attention_mask": mask,
        "past_key_value": cache,
        "use_cache": True,
        "position_embeddings": rotary,
    }
    if masked is None:
        for layer in language_model.layers[:-1]:
            hidden = layer(hidden, **options)[0]
        _keys_and_values(language_model.layers[-1], hidden, rotary, cache)
        return cache, None

    assert layout is not None
    extra = masked.to(hidden.dtype).expand(embs.shape[0], -1, -1)
    no_rotation = tuple(part[:1, :1] for part in rotary)  # masked rows' keys are never compared
    for index, layer in enumerate(language_model.layers):
        hidden = layer(hidden, attention_mask=mask, past_key_value=cache, use_cache=True, position_embeddings=rotary)[0]
        rows = _MaskedRows(layout, cache[index][1])
        extra = layer(extra, position_embeddings=no_rotation, masked_rows=rows)[0]
    hidden, _ = language_model.norm(hidden)
    padded, _ = language_model.norm(extra[:, -1:])
    return cache, pool(hidden, padded[:, 0], layout)


def _keys_and_values(layer: Any, hidden: torch.Tensor, rotary: tuple[torch.Tensor, ...], cache: DynamicCache) -> None:
    """Only what later tokens read of the last layer. Called as the layer itself, for FSDP's hooks."""

    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        normed, _ = self.input_layernorm(hidden)
        attention = self.self_attn
        shape = (*normed.shape[:-1], -1, attention.head_dim)
        key = attention.k_proj(normed).view(shape).transpose(1, 2)
        value = attention.v_proj(normed).view(shape).transpose(1, 2)
        _, key = apply_rotary_pos_emb(key, key, *rotary)
        cache.update(key, value, attention.layer_idx)
        return hidden

    with forwards([(layer, forward)]):
        layer(hidden)


def pool(hidden: torch.Tensor, padded: torch.Tensor, layout: PaddedLayout) -> torch.Tensor:
    """The critic's input from final-norm rows ``[B, L, width]`` and the padded row ``[B, width]``; float32 ``[B, width]``."""
    if layout.mode == "first_token":
        return hidden[:, 0].float()
    if layout.mode == "last_token":
        last = hidden[torch.arange(hidden.shape[0], device=hidden.device), layout.valid.sum(dim=1) - 1]
        return torch.where(layout.padding[:, None] > 0, padded, last).float()
    total = (hidden * layout.valid[..., None]).sum(dim=1, dtype=torch.float32)
    total = total + layout.padding[:, None] * padded.float()
    count = layout.valid.sum(dim=1).float() + layout.padding
    return (total / count[:, None]).to(hidden.dtype).float()
