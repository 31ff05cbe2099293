# SPDX-License-Identifier: Apache-2.0
"""A PI0.5 checkpoint of the published size with random weights: benchmarks and smoke runs where no trained one is at hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from rlinf_phyai.models.pi05.checkpoint import EXPERT_LM_HEAD, LM_HEAD, NOISE_HEAD
from rlinf_phyai.models.pi05.configuration import PI05Config
from rlinf_phyai.models.pi05.stated_sizes import GemmaSizes, StatedSizes, VisionSizes
from rlinf_phyai.models.pi05.tiny import WEIGHTS_FILE, train_tokenizer, write_transform_files
from rlinf_phyai.models.pi05.weights import PI05Weights

SHALLOW = StatedSizes(
    vision=VisionSizes(hidden_size=1152, intermediate_size=4304, num_layers=2, num_heads=16, patch_size=14),
    prefix=GemmaSizes(width=2048, mlp_dim=16384, head_dim=256),
    expert=GemmaSizes(width=1024, mlp_dim=4096, head_dim=256),
    value_head_sizes=(1024, 512, 256),
    params_dtype="bfloat16",
)
"""The published widths, token counts and types with two layers and a small vocabulary: for what needs no depth."""

_STD = 0.02
_TOKENIZER_SIZE = 1024


def make_random_checkpoint(
    directory: str | Path,
    config: PI05Config | None = None,
    seed: int = 0,
    device: str | torch.device = "cpu",
    tokenizer: Path | None = None,
) -> Path:
    """Writes a checkpoint folder that RLinf's loader and the engine accept, and returns it.

    It holds ``model.safetensors`` (bfloat16, float32 where the actor keeps it), LIBERO's normalisation statistics with
    made-up numbers, a tokenizer and ``config.json``.

    Args:
        directory: created if missing; files of an earlier call are overwritten.
        config: sizes; None is the published PI0.5 (3.6 billion parameters, 8 GB). With ``value_mode`` None no critic is
            written, as in an SFT checkpoint. RLinf builds the published sizes only.
        seed: of the weights.
        device: where the random numbers are drawn; the same seed gives other numbers on another device type.
        tokenizer: a SentencePiece model to copy, such as PaliGemma's; None trains a small one on LIBERO's sentences.

    Raises:
        OSError: the folder cannot be written, has too little space, or ``tokenizer`` cannot be read.
    """
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    config = config or PI05Config()
    _require_space(target, config)
    write_transform_files(target, tokenizer.read_bytes() if tokenizer else _small_tokenizer(config.vocab_size))
    with torch.no_grad():
        weights = PI05Weights(config, torch.device(device), torch.bfloat16)
        generator = torch.Generator(device=device).manual_seed(seed)
        state = {}
        for name, view in weights.views.items():
            if name == LM_HEAD:  # tied to the embedding
                continue
            # A meta view: the expert's output head, part of a checkpoint but not of the engine's memory.
            tensor = torch.empty_like(view, device=device) if view.is_meta else view
            _fill(name, tensor, generator)
            state[name] = tensor.cpu().contiguous()
    save_file(state, target / WEIGHTS_FILE, metadata={"format": "pt"})
    # Last: its presence says that the rest is complete.
    sizes = {"model_type": "pi05", "action_horizon": config.action_horizon, "action_dim": config.action_dim}
    (target / "config.json").write_text(json.dumps(sizes, indent=2) + "\n")
    return target


def _fill(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Layer-norm weights near 1, everything else small; AdaRMS ``dense`` is not zero, zeros would hide errors."""
    if name.startswith(f"{NOISE_HEAD}logvar_"):  # bounds, not weights
        return
    tensor.normal_(0.0, _STD, generator=generator)
    if name.endswith("weight") and ("layer_norm" in name or "post_layernorm" in name):
        tensor.add_(1.0)


def _small_tokenizer(vocab_size: int) -> bytes:
    return train_tokenizer(min(vocab_size, _TOKENIZER_SIZE))


def _require_space(directory: Path, config: PI05Config) -> None:
    weights = PI05Weights(config, torch.device("meta"), torch.bfloat16)
    unread = weights.views[EXPERT_LM_HEAD]
    needed, free = weights.num_bytes + unread.numel() * unread.element_size(), shutil.disk_usage(directory).free
    if free < needed:
        raise OSError(f"the weights need {needed / 1e9:.1f} GB, free are {free / 1e9:.1f} GB")
