# SPDX-License-Identifier: Apache-2.0
"""A PI0.5 checkpoint of any size with random weights: for benchmarks and smoke runs where no trained one is at hand."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from rlinf_phyai.models.pi05.checkpoint import LM_HEAD
from rlinf_phyai.models.pi05.configuration import PI05Config
from rlinf_phyai.models.pi05.weights import PI05Weights

_STD = 0.02


def _fill(name: str, view: Tensor, generator: torch.Generator) -> None:
    """Layer-norm weights near 1, everything else small; AdaRMS ``dense`` is not zero, zeros would hide errors."""
    view.normal_(0.0, _STD, generator=generator)
    if name.endswith("weight") and ("layer_norm" in name or "post_layernorm" in name):
        view.add_(1.0)


def make_random_checkpoint(
    directory: str | Path, config: PI05Config | None = None, seed: int = 0, device: str | torch.device = "cpu"
) -> None:
    """Writes ``model.safetensors`` and ``config.json`` (bfloat16, float32 where the actor keeps it) into ``directory``.

    Args:
        config: sizes; None is the published PI0.5 (3.6 billion parameters, 7.5 GB). With ``value_mode`` None no critic is written.
        device: where the random numbers are drawn; the same seed gives other numbers on another device type.
    """
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    config = config or PI05Config()
    with torch.no_grad():
        weights = PI05Weights(config, torch.device(device), torch.bfloat16)
        generator = torch.Generator(device=device).manual_seed(seed)
        state = {}
        for name, view in weights.views.items():
            if view.is_meta or name == LM_HEAD:  # never read; tied to the embedding
                continue
            _fill(name, view, generator)
            state[name] = view.cpu().contiguous()
    save_file(state, target / "model.safetensors")
    sizes = {"action_horizon": config.action_horizon, "action_dim": config.action_dim}
    (target / "config.json").write_text(json.dumps(sizes))
