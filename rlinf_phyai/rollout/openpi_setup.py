# SPDX-License-Identifier: Apache-2.0
"""What RLinf's loader derives from a model config beside the weights: openpi's options and the transforms.

The rollout reads them from the same functions of RLinf and openpi as the training actor does, so a new option of a data
config reaches both sides.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig

from rlinf_phyai.checkpoint_setup import own_tokenizer, with_stated_sizes
from rlinf_phyai.models.pi05.processor import NormStats, PI05Processor, ProcessorOptions
from rlinf_phyai.models.pi05.tokenizer import PromptTokenizer

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenPiSetup:
    """An actor model without its weights.

    Attributes:
        config: RLinf's ``OpenPi0Config`` with the overrides of the YAML's ``openpi`` section.
        inputs, outputs: openpi's transforms, in the order of their application.
    """

    config: Any
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]


def load_openpi_setup(model_config: DictConfig) -> OpenPiSetup:
    """Reads options, statistics and transforms of a model config.

    Args:
        model_config: the ``actor.model`` (or ``rollout.model``) section, with ``model_path`` and ``openpi``.

    Raises:
        FileNotFoundError: normalisation statistics or tokenizer are missing; the message names the path.
        ValueError: unknown ``openpi.config_name``, or a data config without asset id.
    """
    from openpi import transforms
    from openpi.training import checkpoints
    from rlinf.models.embodiment.openpi.dataconfig import get_openpi_config
    from rlinf.models.embodiment.openpi.openpi_action_model import OpenPi0Config

    model_config = with_stated_sizes(model_config)
    train_config = get_openpi_config(
        model_config.openpi.get("config_name"),
        model_path=model_config.model_path,
        data_kwargs=model_config.get("openpi_data"),
    )
    config = OpenPi0Config(**train_config.model.__dict__)
    config.__dict__.update(model_config.openpi)  # the dataclass is frozen; RLinf sets its fields this way
    with own_tokenizer(str(model_config.model_path)):
        data = train_config.data.create(train_config.assets_dirs, config)
    if data.asset_id is None:
        raise ValueError(f"data config {config.config_name!r} names no asset id, so its statistics cannot be found")
    directory = Path(str(model_config.model_path)).expanduser()
    stats = checkpoints.load_norm_stats(directory, data.asset_id)
    return OpenPiSetup(
        config,
        (
            transforms.InjectDefaultPrompt(None),
            *data.data_transforms.inputs,
            transforms.Normalize(stats, use_quantiles=data.use_quantile_norm),
            *data.model_transforms.inputs,
        ),
        (
            *data.model_transforms.outputs,
            transforms.Unnormalize(stats, use_quantiles=data.use_quantile_norm),
            *data.data_transforms.outputs,
        ),
    )


LIBERO_CAMERAS = ("observation/image", "observation/wrist_image")
"""Cameras that LIBERO's input transform reads, in the model's order; its third camera is black and masked."""

LIBERO_ACTION_DIM = 7
"""Action dimensions that LIBERO's output transform keeps."""


def recognised_processor(setup: OpenPiSetup, device: torch.device | str) -> PI05Processor | None:
    """A batched processor equal to the setup's transforms, or None where they are not exactly LIBERO's known lists.

    Recognised are, ignoring empty default prompts: LiberoInputs, Normalize, ResizeImages (square), TokenizePrompt with
    PaliGemma's tokenizer, PadStatesAndActions; and Unnormalize, LiberoOutputs with the same statistics.
    """
    from openpi import transforms
    from openpi.models.tokenizer import PaligemmaTokenizer
    from rlinf.models.embodiment.openpi.policies import libero_policy

    def is_empty_prompt(step: Any) -> bool:
        return type(step) is transforms.InjectDefaultPrompt and step.prompt is None

    if not setup.config.pi05:
        return None  # PI0 reads the state itself, and LIBERO's actions relative to it
    inputs = [step for step in setup.inputs if not is_empty_prompt(step)]
    known_inputs = [
        libero_policy.LiberoInputs,
        transforms.Normalize,
        transforms.ResizeImages,
        transforms.TokenizePrompt,
        transforms.PadStatesAndActions,
    ]
    known_outputs = [transforms.Unnormalize, libero_policy.LiberoOutputs]
    if [type(step) for step in inputs] != known_inputs or [type(step) for step in setup.outputs] != known_outputs:
        return None
    _, normalize, resize, tokenize, pad = inputs
    unnormalize = setup.outputs[0]
    stats = normalize.norm_stats
    same_scaling = stats is unnormalize.norm_stats and normalize.use_quantiles == unnormalize.use_quantiles
    if not same_scaling or resize.height != resize.width or type(tokenize.tokenizer) is not PaligemmaTokenizer:
        return None
    if stats is not None and set(stats) != {"state", "actions"}:
        return None
    options = ProcessorOptions(
        image_size=resize.height,
        max_token_len=tokenize.tokenizer._max_len,
        discrete_state_input=tokenize.discrete_state_input,
        action_dim=pad.model_action_dim,
        action_env_dim=LIBERO_ACTION_DIM,
        use_quantiles=normalize.use_quantiles,
    )
    tokenizer = PromptTokenizer(tokenize.tokenizer._tokenizer.serialized_model_proto(), options.max_token_len)
    return PI05Processor(options, tokenizer, None if stats is None else _norm_stats(stats), device)


def _norm_stats(stats: Any) -> dict[str, NormStats]:
    fields = ("mean", "std", "q01", "q99")
    return {
        name: NormStats.from_values({field: _array(getattr(value, field)) for field in fields}, name)
        for name, value in stats.items()
    }


def _array(value: Any) -> np.ndarray | None:
    return None if value is None else np.asarray(value)
