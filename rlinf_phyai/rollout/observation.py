# SPDX-License-Identifier: Apache-2.0
"""Environment observations to model inputs, and model actions to environment actions.

Two ways with the same results: :class:`BatchedTransforms` for LIBERO's known transforms (whole batches on the engine's
device) and :class:`OpenPiTransforms` for any other list (openpi's own code, sample by sample on the CPU).
"""

from __future__ import annotations

import logging
import types
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rlinf_phyai.models.pi05.processor import PI05Processor
from rlinf_phyai.rollout.openpi_setup import LIBERO_CAMERAS, OpenPiSetup, recognised_processor

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelInputs:
    """One batch, ready for a request.

    Attributes:
        pixel_values: float32 ``[B, C, 3, S, S]`` in [-1, 1].
        input_ids: int64 ``[B, L]`` on the CPU, padded right with 0. lang_lens: int64 ``[B]`` on the CPU.
        image_masks: one bool per camera, or None where all cameras are used.
        state: normalised and padded state ``[B, D]``; only PI0 and openpi's output transforms read it.
    """

    pixel_values: Tensor
    input_ids: Tensor
    lang_lens: Tensor
    image_masks: list[bool] | None = None
    state: Tensor | None = None

    @property
    def prompt_mask(self) -> Tensor:
        """bool ``[B, L]``, True on the prompt's tokens."""
        return torch.arange(self.input_ids.shape[1])[None] < self.lang_lens[:, None]


class Transforms(Protocol):
    """What the policy needs of a data config."""

    used_cameras: int | None

    def inputs(self, observation: dict[str, Any]) -> ModelInputs:
        """Model inputs of an observation in openpi's naming (``observation/...`` and ``prompt``)."""
        ...

    def actions(self, actions: Tensor, inputs: ModelInputs) -> Tensor:
        """float64 ``[B, c, d]`` environment actions of float32 ``[B, H, D]`` model actions."""
        ...


class BatchedTransforms:
    """LIBERO's transforms on whole batches.

    Args:
        processor: see :func:`recognised_processor`.
        action_chunk: leading actions of the horizon that are executed.
    """

    used_cameras: int | None = len(LIBERO_CAMERAS)

    def __init__(self, processor: PI05Processor, action_chunk: int) -> None:
        self.processor = processor
        self._action_chunk = action_chunk

    def inputs(self, observation: dict[str, Any]) -> ModelInputs:
        missing = [name for name in (*LIBERO_CAMERAS, "observation/state", "prompt") if observation.get(name) is None]
        if missing:
            raise ValueError(
                f"the observation lacks {missing}; it holds"
                f" {sorted(name for name, value in observation.items() if value is not None)}. LIBERO's data config"
                " reads a main and a wrist camera, the state and the task sentence"
            )
        ids, lengths = self.processor.tokenize(observation["prompt"], observation["observation/state"])
        return ModelInputs(self.processor.pixel_values([observation[name] for name in LIBERO_CAMERAS]), ids, lengths)

    def actions(self, actions: Tensor, inputs: ModelInputs) -> Tensor:
        return self.processor.unnormalize_actions(actions, self._action_chunk)


class OpenPiTransforms:
    """Any data config's transforms, run by RLinf's own per-sample methods.

    Args:
        setup: transforms and options. RLinf's ``input_transform`` and ``output_transform`` are called on a stand-in
            that holds exactly the attributes they read, so no actor model has to be built.
    """

    used_cameras: int | None = None

    def __init__(self, setup: OpenPiSetup) -> None:
        from openpi import transforms
        from rlinf.models.embodiment.openpi.openpi_action_model import OpenPi0ForRLActionPrediction

        self._policy = OpenPi0ForRLActionPrediction
        self._stand_in = types.SimpleNamespace(
            config=setup.config,
            _input_transform=transforms.compose(setup.inputs),
            _output_transform=transforms.compose(setup.outputs),
        )

    def inputs(self, observation: dict[str, Any]) -> ModelInputs:
        from openpi.models.model import Observation
        from openpi.models_pytorch.preprocessing_pytorch import preprocess_observation_pytorch

        processed = self._policy.input_transform(self._stand_in, observation, transpose=False)
        prepared = preprocess_observation_pytorch(Observation.from_dict(processed), train=False)
        images, masks = list(prepared.images.values()), torch.stack(list(prepared.image_masks.values()), dim=1)
        if not bool((masks == masks[0]).all()):
            raise ValueError(
                "the data config masks different cameras in different samples of one batch; the engine needs the same"
                " cameras for all of them. Use rollout.rollout_backend: huggingface for it"
            )
        used = masks[0].tolist()
        black = [index for index, flag in enumerate(used) if not flag and bool((images[index] != -1).any())]
        if black:
            raise ValueError(
                f"masked cameras {black} do not hold black images; the engine takes a masked camera as black. Use"
                " rollout.rollout_backend: huggingface for this data config"
            )
        lengths = prepared.tokenized_prompt_mask.sum(dim=1)
        inputs = ModelInputs(
            torch.stack([image if image.shape[1] == 3 else image.permute(0, 3, 1, 2) for image in images], dim=1),
            prepared.tokenized_prompt.to(torch.int64),
            lengths,
            used,
            prepared.state,
        )
        if not torch.equal(inputs.prompt_mask, prepared.tokenized_prompt_mask):
            raise ValueError("the data config's prompts are not padded on the right; the engine needs right padding")
        return inputs

    def actions(self, actions: Tensor, inputs: ModelInputs) -> Tensor:
        outputs = self._policy.output_transform(self._stand_in, {"actions": actions.cpu(), "state": inputs.state})
        return outputs["actions"].to(torch.float64)


def make_transforms(setup: OpenPiSetup, device: torch.device | str) -> Transforms:
    """The batched way where the transforms are recognised; otherwise openpi's, with one notice."""
    processor = recognised_processor(setup, device)
    if processor is not None:
        return BatchedTransforms(processor, setup.config.action_chunk)
    _logger.warning(
        "The transforms of data config %r are not LIBERO's known ones (%s | %s); observations are processed sample by"
        " sample on the CPU. Results are the same, the rollout is slower.",
        setup.config.config_name,
        ", ".join(type(step).__name__ for step in setup.inputs),
        ", ".join(type(step).__name__ for step in setup.outputs),
    )
    return OpenPiTransforms(setup)
