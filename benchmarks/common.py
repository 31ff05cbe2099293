# SPDX-License-Identifier: Apache-2.0
"""Shared by the benchmarks: the machine's description, JSON output, the random full-size actor."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parent / "results"


def machine() -> dict[str, Any]:
    """GPU, versions and commit, for the JSON of every result."""
    commit = os.environ.get("BENCHMARK_COMMIT", "")  # for machines that get the files without the repository
    if not commit:
        command = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, cwd=RESULTS.parent, check=False).stdout.strip()
    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "commit": commit or None}
    if torch.cuda.is_available():
        found |= {
            "gpu": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            "capability": list(torch.cuda.get_device_capability()),
        }
    return found


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a result with the machine's description, unless it has one: of the machine that measured it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    described = content if "machine" in content else {"machine": machine(), **content}
    path.write_text(json.dumps(described, indent=1) + "\n")


def random_actor(num_steps: int = 3, seed: int = 0, device: str = "cuda") -> Any:
    """RLinf's actor model at full size with random weights, as its loader leaves it (bf16, float32 islands, frozen VLM).

    AdaRMS ``dense.weight`` is random too: zeros would hide errors in the modulation.
    """
    from rlinf.models.embodiment.openpi.dataconfig import get_openpi_config
    from rlinf.models.embodiment.openpi.openpi_action_model import OpenPi0Config, OpenPi0ForRLActionPrediction

    base = get_openpi_config("pi05_libero", model_path="unused").model
    config = OpenPi0Config(**base.__dict__)
    options = {
        "config_name": "pi05_libero", "num_steps": num_steps, "action_chunk": 5, "action_env_dim": 7, "add_value_head": True,
        "value_after_vlm": True, "train_expert_only": True, "noise_method": "flow_sde", "noise_level": 0.5,
    }  # fmt: skip
    config.__dict__.update(options)
    torch.manual_seed(seed)
    with torch.device(device):
        model = OpenPi0ForRLActionPrediction(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("dense.weight", "dense.bias")):
                parameter.normal_(std=0.02)
            elif (
                "norm" in name and name.endswith("weight") and "layer_norm" not in name and "post_layernorm" not in name
            ):
                parameter.normal_(std=0.1)
    model.paligemma_with_expert.to_bfloat16_for_selected_params("bfloat16")
    model.freeze_vlm()
    return model.to(device).eval()


def save_actor(model: Any, directory: Path) -> None:
    """The actor's weights as a checkpoint directory that the engine loads."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    seen: set[int] = set()
    state = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() in seen:
            continue  # tied tensors are stored once
        seen.add(tensor.data_ptr())
        state[name] = tensor.detach().contiguous().cpu()
    save_file(state, directory / "model.safetensors")
    (directory / "config.json").write_text(
        json.dumps({"action_horizon": model.config.action_horizon, "action_dim": 32})
    )
