# SPDX-License-Identifier: Apache-2.0
"""What is started with a warning."""

from tests.unit.validation.case import (
    CPS,
    ENGINE,
    EVALUATION,
    LEARNED,
    NO_CORRECTION,
    OPENPI,
    Case,
    annealed,
    change_one,
)
from tests.unit.validation.conftest import REMOVED

WARNINGS = [
    Case(
        "correction_keys_missing",
        "algorithm.recompute_logprobs, algorithm.importance_sampling_fix, algorithm.importance_sampling_clip",
        {
            f"algorithm.{name}": REMOVED
            for name in ("recompute_logprobs", "importance_sampling_fix", "importance_sampling_clip")
        },
        ("together", "every PPO ratio"),
    ),
    Case(
        "correction_keys_missing",
        "algorithm.importance_sampling_fix",
        {"algorithm.importance_sampling_fix": None},
        ("missing or null",),
    ),
    Case(
        "recompute_switched_off",
        "algorithm.recompute_logprobs",
        NO_CORRECTION,
        ("false", "not exactly 1"),
    ),
    change_one("rollout_recompute_key", "rollout.recompute_logprobs", True, "nothing reads this key"),
    Case(
        "ignored_by_the_stock_backend",
        "algorithm.recompute_logprobs",
        {"rollout.rollout_backend": "huggingface"},
        ("RLinf's own actor",),
    ),
    change_one("entropy_bonus", "algorithm.entropy_bonus", 0.005, "fixed noise level"),
    Case("noise_annealing", f"{OPENPI}.noise_anneal", {**LEARNED, **annealed(0.7, 0.3, 400)}, ("learns its noise",)),
    Case("cps_steps", f"{OPENPI}.ignore_last", CPS, ("true with flow_cps", "teaches nothing")),
    change_one("joint_logprob", f"{OPENPI}.joint_logprob", True, "false (recommended with flow_sde)"),
    change_one("misspelt_options", f"{OPENPI}.zzz", 1, "remove actor.model.openpi.zzz"),
    Case(
        "episode_length",
        "env.train.max_steps_per_rollout_epoch",
        {"env.train.max_episode_steps": 120},
        ("at most 120", "for nothing"),
    ),
    Case(
        "episode_length",
        "env.eval.max_steps_per_rollout_epoch",
        {**EVALUATION, "env.eval.max_steps_per_rollout_epoch": 120},
        ("not counted",),
    ),
    change_one("weight_sync_interval", "runner.weight_sync_interval", 2, "staleness"),
    change_one("debug_logprob_offset", f"{ENGINE}.debug_logprob_offset", 0.01, "is 0.01", "correction at work"),
    change_one("cuda_graphs_off", f"{ENGINE}.use_cuda_graph", False, "launch overhead"),
]
