# SPDX-License-Identifier: Apache-2.0
"""TensorBoard's tab *Custom scalars*: the curves that are read together, in one chart each."""

from __future__ import annotations

import re
from typing import Any

_ACTOR, _TIME = "train/actor/", "time/"

#: Section -> chart -> scalars. A run draws those that it has (GRPO, for one, has no critic).
CHARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "1 Is the policy getting better?": {
        "success": ("env/success_once",),
        "return": ("env/return", "env/reward"),
        "episode length": ("env/episode_len",),
    },
    "2 Do engine and actor agree?": {
        "log-probability gap": (f"{_ACTOR}rollout_train_logprob_gap",),
        "importance weight": (f"{_ACTOR}importance_sampling_weight", f"{_ACTOR}importance_sampling_weight_max"),
        "samples that count": (
            f"{_ACTOR}importance_sampling_effective_sample_size",
            f"{_ACTOR}importance_sampling_clip_fraction",
        ),
        "KL of rollout and actor, by denoise step": (f"{_ACTOR}rollout_train_kl", f"{_ACTOR}rollout_train_kl/step_*"),
        "mean shift, by action dimension": (f"{_ACTOR}rollout_train_mean_shift/dim_*",),
        "value gap": (
            f"{_ACTOR}rollout_train_value_gap",
            f"{_ACTOR}rollout_train_value_gap_max",
            f"{_ACTOR}rollout_train_value_rms",
        ),
    },
    "3 Is the update sound?": {
        "before learning: exactly 0": (
            f"{_ACTOR}first_update/ratio_max_dev",
            f"{_ACTOR}first_update/clip_fraction",
        ),
        "how far the policy moved": (f"{_ACTOR}approx_kl", f"{_ACTOR}clip_fraction"),
        "gradient norm": (f"{_ACTOR}grad_norm",),
        "losses": (f"{_ACTOR}policy_loss", "train/critic/value_loss", f"{_ACTOR}entropy_loss"),
        "explained variance": ("train/critic/explained_variance",),
    },
    "4 Where does the time go?": {
        "step": (
            f"{_TIME}step",
            f"{_TIME}generate_rollouts",
            f"{_TIME}actor/run_training",
            f"{_TIME}actor/actor/recompute_logprobs",
            f"{_TIME}sync_weights",
        ),
        "rollout": (
            f"{_TIME}rollout/predict",
            f"{_TIME}env/env_interact_step",
            f"{_TIME}env/env/bootstrap_step",
            f"{_TIME}rollout/offload",
            f"{_TIME}rollout/reload",
        ),
    },
}


def layout() -> dict[str, dict[str, list[Any]]]:
    """:data:`CHARTS` as ``SummaryWriter.add_custom_scalars`` takes it: tags are regular expressions there; ``*`` is any number."""

    def pattern(tag: str) -> str:
        return f"^{re.escape(tag).replace(re.escape('*'), '[0-9]+')}$"

    return {
        section: {title: ["Multiline", [pattern(tag) for tag in tags]] for title, tags in charts.items()}
        for section, charts in CHARTS.items()
    }


def add_layout(metric_logger: Any) -> None:
    """Writes the layout once, where RLinf's ``MetricLogger`` has TensorBoard among its backends."""
    tensorboard = metric_logger.logger.get("tensorboard")
    if tensorboard is not None:
        tensorboard.writer.add_custom_scalars(layout())
