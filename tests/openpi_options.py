# SPDX-License-Identifier: Apache-2.0
"""``actor.model.openpi`` of the examples, in plain values: for tests that build a model section without Hydra."""

from typing import Any

OPENPI_OPTIONS: dict[str, Any] = {
    "config_name": "pi05_libero",
    "num_images_in_input": 2,
    "noise_level": 0.5,
    "noise_method": "flow_sde",
    "action_chunk": 5,
    "action_env_dim": 7,
    "num_steps": 3,
    "add_value_head": True,
    "value_after_vlm": True,
    "value_vlm_mode": "mean_token",
    "train_expert_only": True,
}
