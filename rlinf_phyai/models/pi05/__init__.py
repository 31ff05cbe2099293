# SPDX-License-Identifier: Apache-2.0
"""PI0.5: requests, outputs and configuration; the model itself is built by the engine's ``pi05`` plugin."""

from pathlib import Path

from rlinf_phyai.models.pi05.configuration import VALUE_MODES, GemmaConfig, PI05Config, VisionConfig
from rlinf_phyai.models.pi05.requests import PI05Args, PI05Request, PI05RolloutOutput, PI05RolloutRequest


def load_config[ConfigType: PI05Config](checkpoint_dir: str | Path, config_type: type[ConfigType]) -> PI05Config:
    """Configuration of a checkpoint; ``config_type`` is :class:`PI05Config`."""
    return config_type.from_checkpoint(checkpoint_dir)


__all__ = [
    "VALUE_MODES",
    "GemmaConfig",
    "PI05Args",
    "PI05Config",
    "PI05Request",
    "PI05RolloutOutput",
    "PI05RolloutRequest",
    "VisionConfig",
    "load_config",
]
