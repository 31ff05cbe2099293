# SPDX-License-Identifier: Apache-2.0
"""RLinf's PI0.5 with the prefix on real tokens, as a mix-in over whatever class the model already has."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from rlinf.utils.logging import get_logger
from transformers import DynamicCache

from rlinf_phyai.actor.fused import fused_vision, run_fused_prefix
from rlinf_phyai.actor.observations import CAMERAS, SUPPORTED_CONFIGS, ReplayTransform
from rlinf_phyai.actor.prefix import VALUE_MODES, PaddedLayout, PrefixKeys, PromptLayout, register_attention, run_prefix
from rlinf_phyai.kernels import Kernels

LAYOUT_KEY = "prompt_layout"
POOLED_KEY = "prefix_pooled"
KEYS_KEY = "prefix_keys"

PREFIX_CHOICES = ("auto", "fused", "real_tokens", "dense")


def choose_prefix(choice: str, model: Any, recompute: bool) -> str:
    """Decide between ``fused``, ``real_tokens`` and ``dense``.

    Args:
        choice: ``rollout.phyai.actor_prefix``. ``auto`` takes ``fused`` where real tokens are exact and wanted: the actor
            rescores, and the prefix is a frozen PI0.5 on LIBERO.
        model: the actor's model before FSDP.
        recompute: ``algorithm.recompute_logprobs``.

    Raises:
        ValueError: an unknown choice, or real tokens for a model that they do not fit (says why).
    """
    if choice not in PREFIX_CHOICES:
        raise ValueError(f"rollout.phyai.actor_prefix is {choice!r}; allowed: {', '.join(PREFIX_CHOICES)}.")
    if choice == "dense" or (choice == "auto" and not recompute):
        return "dense"
    obstacle = _obstacle(model)
    if obstacle and choice != "auto":
        raise ValueError(f"rollout.phyai.actor_prefix is {choice!r} but {obstacle}. Use 'dense' (or 'auto').")
    if obstacle:
        return "dense"
    return "fused" if choice == "auto" else choice


def _obstacle(model: Any) -> str | None:
    config = model.config
    if not getattr(model, "pi05", False) or config.config_name not in SUPPORTED_CONFIGS:
        return f"it knows {', '.join(SUPPORTED_CONFIGS)} only, and actor.model.openpi.config_name is {config.config_name!r}"
    if any(p.requires_grad for p in model.paligemma_with_expert.paligemma.parameters()):
        return "the vision-language model is trained (actor.model.openpi.train_expert_only is not set)"
    if model.use_vlm_value and config.value_vlm_mode not in VALUE_MODES:
        return f"actor.model.openpi.value_vlm_mode is {config.value_vlm_mode!r} (known: {', '.join(VALUE_MODES)})"
    return None


class _WholeCache(DynamicCache):
    """A cache of a type that torch's tree functions do not know, so they pass it on instead of rebuilding it."""


def keep_cache_whole(model: torch.nn.Module) -> torch.nn.Module:
    """Let a trained prefix fill its key-value cache under FSDP2, in place (before FSDP wraps it); returns the model.

    Where a layer's inputs need a gradient, FSDP2 rebuilds the containers among its arguments; the layer would then write its keys
    into a copy of the cache that nobody reads.
    """
    language_model: Any = model.paligemma_with_expert.paligemma.language_model  # type: ignore[union-attr]
    original = language_model.forward

    def forward(*args: Any, past_key_values: Any = None, use_cache: bool | None = None, **kwargs: Any) -> Any:
        if use_cache and past_key_values is None:
            past_key_values = _WholeCache()
        return original(*args, past_key_values=past_key_values, use_cache=use_cache, **kwargs)

    language_model.forward = forward
    return model


def use_real_tokens(model: torch.nn.Module, kernels: Kernels | None = None) -> torch.nn.Module:
    """Give ``model`` the mix-in, in place (before FSDP wraps it); returns it.

    Args:
        kernels: compute the frozen prefix; ``None`` leaves that to the model's own modules.
    """
    register_attention()
    cls = type(model)
    model.__class__ = type(f"RealToken{cls.__name__}", (RealTokenPrefix, cls), {"__module__": __name__})
    model._replay_transform = ReplayTransform(model.config.action_dim)  # type: ignore[assignment, union-attr, arg-type]
    model._replay_checked = False  # type: ignore[assignment]
    model._request = None  # type: ignore[assignment]
    model._kernels = kernels  # type: ignore[assignment]
    return model


@dataclass
class _Request:
    """What one forward was given and has found so far."""

    need_value: bool = False
    layout: PromptLayout | None = None
    pooled: torch.Tensor | None = None
    keys: PrefixKeys | None = None
    reused: bool = False


class RealTokenPrefix:
    """Overrides of ``OpenPi0ForRLActionPrediction`` for rescoring and training; sampling keeps the class's own path.

    ``default_forward`` accepts more in ``forward_inputs``, and returns the last two in its output:

    - :data:`LAYOUT_KEY`: a :class:`PromptLayout`, so that nothing waits for the GPU;
    - :data:`POOLED_KEY`: the critic's input float32 ``[B, width]``;
    - :data:`KEYS_KEY`: :class:`PrefixKeys`. With them no observation is needed.
    """

    # Set by use_real_tokens:
    _request: _Request | None
    _replay_transform: ReplayTransform | None
    _replay_checked: bool
    _kernels: Kernels | None
    # Of the class that it is mixed into:
    config: Any
    use_vlm_value: bool
    embed_prefix: Any
    paligemma_with_expert: Any
    value_head: Any

    def default_forward(self, forward_inputs: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """As the base class; a value is computed only where ``compute_values`` asks for one."""
        keys = forward_inputs.get(KEYS_KEY)
        self._request = _Request(
            need_value=bool(self.use_vlm_value and kwargs.get("compute_values", False)),
            layout=forward_inputs.get(LAYOUT_KEY),
            pooled=forward_inputs.get(POOLED_KEY),
            keys=keys,
            reused=keys is not None,
        )
        try:
            output = super().default_forward(forward_inputs, **kwargs)  # type: ignore[misc]
            output[POOLED_KEY], output[KEYS_KEY] = self._request.pooled, self._request.keys
            return output
        finally:
            self._request = None

    def input_transform(self, obs: dict[str, Any], transpose: bool = True) -> dict[str, Any]:
        """Replays (no prompt) skip openpi's CPU transforms; the first one is checked against them."""
        if self._request is not None and self._request.reused:
            return self._without_images(obs)
        if "prompt" in obs or self._replay_transform is None:
            return super().input_transform(obs, transpose=transpose)  # type: ignore[misc]
        if not self._replay_checked:
            self._replay_checked = True
            reference = super().input_transform(obs, transpose=transpose)["image"]  # type: ignore[misc]
            ours = self._replay_transform.images(obs)
            different = [name for name, image in reference.items() if not torch.equal(image, ours[name].cpu())]
            if different:
                get_logger().warning(
                    f"The fast resize of {', '.join(different)} differs from openpi's transform for this checkpoint; "
                    "the actor keeps openpi's transform (slower, never wrong)."
                )
                self._replay_transform = None
                return super().input_transform(obs, transpose=transpose)  # type: ignore[misc]
        return self._replay_transform(obs)

    def _without_images(self, obs: dict[str, Any]) -> dict[str, Any]:
        tokens, mask = obs["tokenized_prompt"], obs["tokenized_prompt_mask"]
        state = torch.zeros(len(tokens), self.config.action_dim, device=tokens.device)  # PI0.5 does not read it
        return {
            "image": {},
            "image_mask": {},
            "state": state,
            "tokenized_prompt": tokens,
            "tokenized_prompt_mask": mask,
        }

    def _preprocess_observation(self, observation: Any, *, train: bool = True) -> Any:
        if self._request is not None and self._request.reused:
            prompt = (observation.tokenized_prompt, observation.tokenized_prompt_mask)
            return [], [], *prompt, observation.state
        return super()._preprocess_observation(observation, train=train)  # type: ignore[misc]

    def _build_prefix_cache(
        self, images: list[torch.Tensor], img_masks: list[torch.Tensor], lang_tokens: Any, lang_masks: Any
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Same contract as the base class, except that the prefix output is the pooled critic input (or ``[B, 0]``).

        The prefix is frozen, so no gradient is recorded.

        Raises:
            ValueError: a camera is masked for a part of the batch, or a prompt is not right-padded with zeros.
        """
        request = self._request
        if request is None:  # sampling
            return super()._build_prefix_cache(images, img_masks, lang_tokens, lang_masks)  # type: ignore[misc]
        if request.keys is None:
            with torch.no_grad():
                self._run_prefix(request, images, img_masks, lang_tokens, lang_masks)
        keys = request.keys
        assert keys is not None
        pooled = request.pooled if request.pooled is not None else keys.keys[0].new_zeros(len(keys.valid), 0)
        return pooled, keys.valid, keys.cache()

    def _run_prefix(
        self, request: _Request, images: list[torch.Tensor], img_masks: list[torch.Tensor], tokens: Any, masks: Any
    ) -> None:
        used = list(range(len(CAMERAS))) if self._replay_transform is not None else _used_cameras(images, img_masks)
        prompt = request.layout or PromptLayout.of(tokens, masks)
        embs, valid = self._embed(
            [images[i] for i in used],
            [img_masks[i] for i in used],
            tokens[:, : prompt.length],
            masks[:, : prompt.length],
        )
        masked, layout = None, None
        if request.need_value and request.pooled is None:
            absent = [i for i in range(len(images)) if i not in used]
            masked = self._masked_rows([images[i] for i in absent], [img_masks[i] for i in absent], masks.device)
            per_camera = (valid.shape[1] - prompt.length) // len(used)
            layout = PaddedLayout(
                total=len(images) * per_camera + masks.shape[1],
                padding=(masks.shape[1] - masks.sum(dim=1)).float(),
                valid=valid,
                mode=self.config.value_vlm_mode,
            )
        language_model = self.paligemma_with_expert.paligemma.language_model
        if self._kernels is None:
            cache, pooled = run_prefix(language_model, embs, valid, prompt.even, masked, layout)
        else:
            cache, pooled = run_fused_prefix(language_model, self._kernels, embs, valid, masked, layout)
        request.keys = PrefixKeys(cache.key_cache, cache.value_cache, valid)
        if pooled is not None:
            request.pooled = pooled

    def _masked_rows(self, images: list[torch.Tensor], img_masks: list[torch.Tensor], device: Any) -> torch.Tensor:
        """Embeddings ``[1, E, width]`` of the masked cameras' rows and, last, of one padded prompt position."""
        pad = torch.zeros(1, 1, dtype=torch.long, device=device)
        one = [image[:1] for image in images], [mask[:1] for mask in img_masks]
        return self._embed(*one, pad, torch.zeros_like(pad, dtype=torch.bool))[0]

    def _embed(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings and validity of images and prompt, as ``embed_prefix``."""
        vision: AbstractContextManager[None] = nullcontext()
        if self._kernels is not None:
            vision = fused_vision(self.paligemma_with_expert.paligemma.vision_tower, self._kernels)
        with vision:
            embs, valid, _ = self.embed_prefix(*arguments)
        return embs, valid

    def get_value_from_vlm(self, prefix_output: torch.Tensor) -> torch.Tensor:
        """The critic on the pooled input float32 ``[B, width]``: ``[B]``; zeros where no value was asked for."""
        if self._request is None:
            return super().get_value_from_vlm(prefix_output)  # type: ignore[misc]
        if not self._request.need_value:
            return prefix_output.new_zeros(len(prefix_output), dtype=torch.float32)
        return self.value_head(prefix_output)[:, 0]


def _used_cameras(images: list[torch.Tensor], img_masks: list[torch.Tensor]) -> list[int]:
    """Cameras that no sample masks; a masked one must show the same blank image everywhere. Waits for the GPU."""
    counts = torch.stack([mask.sum() for mask in img_masks]).tolist()
    partly = [i for i, count in enumerate(counts) if 0 < count < img_masks[i].numel()]
    if partly:
        raise ValueError(f"cameras {partly} are masked for a part of the batch; use rollout.phyai.actor_prefix: dense.")
    used = [i for i, count in enumerate(counts) if count]
    for i, image in enumerate(images):
        if i not in used and not bool((image == image[:1]).all()):
            raise ValueError(f"masked camera {i} shows different images within a batch; expected the same blank one.")
    return used
