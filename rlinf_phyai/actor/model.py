# SPDX-License-Identifier: Apache-2.0
"""RLinf's PI0.5 with the prefix on real tokens, as a mix-in over whatever class the model already has."""

from __future__ import annotations

from typing import Any

import torch
from rlinf.utils.logging import get_logger

from rlinf_phyai.actor.observations import SUPPORTED_CONFIGS, ReplayTransform
from rlinf_phyai.actor.prefix import VALUE_MODES, PaddedLayout, register_attention, run_prefix

POOLED_KEY = "prefix_pooled"
"""Key of the critic's input, in the rescoring's output and in training's ``forward_inputs``: float32 ``[B, width]``."""

PREFIX_CHOICES = ("auto", "real_tokens", "dense")


def choose_prefix(choice: str, model: Any, recompute: bool) -> str:
    """Decide between ``real_tokens`` and ``dense``.

    Args:
        choice: ``rollout.phyai.actor_prefix``. ``auto`` takes the real tokens where that is exact and wanted: the actor
            rescores, and the prefix is a frozen PI0.5 on LIBERO.
        model: the actor's model before FSDP.
        recompute: ``algorithm.recompute_logprobs``.

    Raises:
        ValueError: an unknown choice, or ``real_tokens`` for a model that it does not fit (says why).
    """
    if choice not in PREFIX_CHOICES:
        raise ValueError(f"rollout.phyai.actor_prefix is {choice!r}; allowed: {', '.join(PREFIX_CHOICES)}.")
    if choice == "dense" or (choice == "auto" and not recompute):
        return "dense"
    obstacle = _obstacle(model)
    if obstacle and choice == "real_tokens":
        raise ValueError(f"rollout.phyai.actor_prefix is 'real_tokens' but {obstacle}. Use 'dense' (or 'auto').")
    return "dense" if obstacle else "real_tokens"


def _obstacle(model: Any) -> str | None:
    config = model.config
    if not getattr(model, "pi05", False) or config.config_name not in SUPPORTED_CONFIGS:
        return f"it knows {', '.join(SUPPORTED_CONFIGS)} only, and actor.model.openpi.config_name is {config.config_name!r}"
    if any(p.requires_grad for p in model.paligemma_with_expert.paligemma.parameters()):
        return "the vision-language model is trained (actor.model.openpi.train_expert_only is not set)"
    if model.use_vlm_value and config.value_vlm_mode not in VALUE_MODES:
        return f"actor.model.openpi.value_vlm_mode is {config.value_vlm_mode!r} (known: {', '.join(VALUE_MODES)})"
    return None


def use_real_tokens(model: torch.nn.Module) -> torch.nn.Module:
    """Give ``model`` the mix-in, in place (before FSDP wraps it); returns it."""
    register_attention()
    cls = type(model)
    model.__class__ = type(f"RealToken{cls.__name__}", (RealTokenPrefix, cls), {"__module__": __name__})
    model._replay_transform = ReplayTransform(model.config.action_dim)  # type: ignore[assignment]
    model._replay_checked = False  # type: ignore[assignment]
    model._need_value, model._pooled = False, None  # type: ignore[assignment]
    return model


class RealTokenPrefix:
    """Overrides of ``OpenPi0ForRLActionPrediction`` for rescoring and training; sampling keeps the class's own path.

    ``default_forward`` accepts the critic's input under :data:`POOLED_KEY` in ``forward_inputs`` and returns it under
    the same key in its output.
    """

    def default_forward(self, forward_inputs: dict[str, torch.Tensor], **kwargs: Any) -> dict[str, Any]:
        """As the base class; a value is computed only where ``compute_values`` asks for one."""
        self._need_value = bool(self.use_vlm_value and kwargs.get("compute_values", False))
        self._pooled = forward_inputs.get(POOLED_KEY)
        try:
            output = super().default_forward(forward_inputs, **kwargs)  # type: ignore[misc]
            output[POOLED_KEY] = self._pooled
            return output
        finally:
            self._need_value, self._pooled = False, None

    def input_transform(self, obs: dict[str, Any], transpose: bool = True) -> dict[str, Any]:
        """Replays (no prompt) skip openpi's CPU transforms; the first one is checked against them."""
        if "prompt" in obs or self._replay_transform is None:
            return super().input_transform(obs, transpose=transpose)  # type: ignore[misc]
        if not self._replay_checked:
            self._replay_checked = True
            reference = super().input_transform(obs, transpose=transpose)["image"]  # type: ignore[misc]
            ours = self._replay_transform.images(obs)
            different = [name for name, image in reference.items() if not torch.equal(image, ours[name].cpu())]
            if different:
                get_logger().warning(
                    f"The fast resize of {', '.join(different)} differs from openpi's transform for this "
                    "checkpoint; the actor keeps openpi's transform (slower, never wrong)."
                )
                self._replay_transform = None
                return super().input_transform(obs, transpose=transpose)  # type: ignore[misc]
        return self._replay_transform(obs)

    def _build_prefix_cache(
        self, images: list[torch.Tensor], img_masks: list[torch.Tensor], lang_tokens: Any, lang_masks: Any
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Same contract as the base class, except that the prefix output is the pooled critic input (or ``[B, 0]``).

        The prefix is frozen, so no gradient is recorded.

        Raises:
            ValueError: a camera is masked for a part of the batch, or a prompt is not right-padded with zeros.
        """
        with torch.no_grad():
            used = _used_cameras(img_masks)
            lengths = lang_masks.sum(dim=1)
            _check_prompt(lang_tokens, lang_masks, lengths)
            length = int(lengths.max())
            embs, valid, _ = self.embed_prefix(
                [images[i] for i in used], [img_masks[i] for i in used], lang_tokens[:, :length], lang_masks[:, :length]
            )
            masked, layout = None, None
            if self._need_value and self._pooled is None:
                masked, layout = self._masked_rows(images, img_masks, used, lang_masks, lengths, valid)
            language_model = self.paligemma_with_expert.paligemma.language_model
            cache, pooled = run_prefix(language_model, embs, valid, masked, layout)
            if pooled is not None:
                self._pooled = pooled
            return embs.new_zeros(len(embs), 0) if self._pooled is None else self._pooled, valid, cache

    def _masked_rows(
        self, images: Any, img_masks: Any, used: list[int], lang_masks: Any, lengths: torch.Tensor, valid: torch.Tensor
    ) -> tuple[torch.Tensor, PaddedLayout]:
        """Embeddings ``[1, E, width]`` of the masked cameras and one padded prompt position, and the layout's counts."""
        absent = [i for i in range(len(images)) if i not in used]
        for i in absent:
            if not bool((images[i] == images[i][:1]).all()):
                raise ValueError(
                    f"masked camera {i} shows different images within a batch; expected the same blank one."
                )
        pad = torch.zeros(1, 1, dtype=torch.long, device=lang_masks.device)
        rows, _, _ = self.embed_prefix(
            [images[i][:1] for i in absent],
            [img_masks[i][:1] for i in absent],
            pad,
            torch.zeros_like(pad, dtype=torch.bool),
        )
        prompt = lang_masks.shape[1]
        per_camera = (valid.shape[1] - int(lengths.max())) // len(used)
        layout = PaddedLayout(
            total=len(images) * per_camera + prompt,
            padding=(prompt - lengths).float(),
            valid=valid,
            mode=self.config.value_vlm_mode,
        )
        return rows, layout

    def get_value_from_vlm(self, prefix_output: torch.Tensor) -> torch.Tensor:
        """The critic on the pooled input float32 ``[B, width]``: ``[B]``; zeros where no value was asked for."""
        if not self._need_value:
            return prefix_output.new_zeros(len(prefix_output), dtype=torch.float32)
        return self.value_head(prefix_output)[:, 0]


def _used_cameras(img_masks: list[torch.Tensor]) -> list[int]:
    counts = torch.stack([mask.sum() for mask in img_masks]).tolist()
    partly = [i for i, count in enumerate(counts) if 0 < count < img_masks[i].numel()]
    if partly:
        raise ValueError(f"cameras {partly} are masked for a part of the batch; use rollout.phyai.actor_prefix: dense.")
    return [i for i, count in enumerate(counts) if count]


def _check_prompt(tokens: torch.Tensor, masks: torch.Tensor, lengths: torch.Tensor) -> None:
    expected = torch.arange(masks.shape[1], device=masks.device)[None] < lengths[:, None]
    if not bool(((masks == expected) & (masks | (tokens == 0))).all()):
        raise ValueError(
            "tokenized_prompt is not right-padded with zeros in every sample; use rollout.phyai.actor_prefix: dense."
        )
