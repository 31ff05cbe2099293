# SPDX-License-Identifier: Apache-2.0
"""Refusals: the model."""

from tests.unit.validation.case import CPS, LEARNED, MODEL, ONLY_EVALUATION, OPENPI, Case, annealed, change_one
from tests.unit.validation.conftest import REMOVED

MODEL_ERRORS = [
    # -- the model
    change_one(
        "noise_method", f"{OPENPI}.noise_method", "flow_ode", "flow_sde, flow_cps or flow_noise", "log-prob is 0"
    ),
    change_one("noise_method", f"{OPENPI}.noise_method", "flowsde", "did you mean flow_sde?", "no such method"),
    Case(
        "noise_method",
        "rollout.model.openpi.noise_method",
        {**ONLY_EVALUATION, f"{OPENPI}.noise_method": "flow_nose"},
        ("did you mean flow_noise?",),
    ),
    change_one("noise_level", f"{OPENPI}.noise_level", 0, "is 0", "above 0", "every log-prob is 0"),
    change_one("noise_level", f"{OPENPI}.noise_level", -0.5, "is -0.5"),
    Case("noise_level", f"{OPENPI}.noise_level", {**CPS, f"{OPENPI}.noise_level": 1.2}, ("is 1.2", "at most 1")),
    Case("noise_annealing", f"{OPENPI}.noise_params", annealed(0.7, 0.3), ("[0.7, 0.3]", "global steps until then")),
    Case("noise_annealing", f"{OPENPI}.noise_params", annealed(0.7, 0.3, 0), ("at least 1",)),
    Case("noise_annealing", f"{OPENPI}.noise_params", annealed(0.7, 0.0, 400), ("above 0", "every log-prob is 0")),
    Case(
        "noise_annealing",
        f"{OPENPI}.noise_params",
        {**CPS, **annealed(1.5, 0.3, 400)},
        ("above 0 and at most 1", "quarter circle"),
    ),
    Case(
        "noise_range",
        f"{OPENPI}.noise_logvar_range",
        {**LEARNED, f"{OPENPI}.noise_logvar_range": [0.1, 0.1]},
        ("[0.1, 0.1]", "smallest, largest"),
    ),
    Case("cps_steps", f"{OPENPI}.num_steps", {**CPS, f"{MODEL}.num_steps": 1}, ("at least 2", "teaches nothing")),
    Case(
        "entropy_type",
        "algorithm.entropy_type",
        {**LEARNED, "algorithm.entropy_bonus": 0.005, "algorithm.entropy_type": "action_level"},
        ("'action_level'", "allowed: token_level"),
    ),
    Case(
        "ignore_last",
        f"{OPENPI}.ignore_last",
        {f"{OPENPI}.ignore_last": True, f"{MODEL}.num_steps": 1},
        ("num_steps 1", "at least 2"),
    ),
    change_one("denoise_steps", f"{OPENPI}.num_steps", 5, "the value of actor.model.num_steps (3)", "would do nothing"),
    change_one("denoise_steps", f"{OPENPI}.num_steps", REMOVED, "missing (the model takes 10)"),
    change_one("action_chunk", f"{OPENPI}.action_chunk", 4, "the value of actor.model.num_action_chunks (5)"),
    Case(
        "action_chunk",
        f"{OPENPI}.action_chunk",
        {f"{MODEL}.num_action_chunks": 10, f"{OPENPI}.action_chunk": REMOVED},
        ("missing (the model takes 5)", "(10)"),
    ),
    Case(
        "chunk_within_horizon",
        f"{MODEL}.num_action_chunks",
        {f"{OPENPI}.action_horizon": 4},
        ("is 5", "1 to 4", "horizon"),
    ),
    Case(
        "chunk_within_horizon",
        f"{MODEL}.num_action_chunks",
        {f"{MODEL}.num_action_chunks": 12},
        ("is 12", "1 to 10"),
        also=("model_sizes",),
    ),
    Case("action_dimension", f"{OPENPI}.action_env_dim", {f"{OPENPI}.action_env_dim": 8}, ("is 8", "allowed: 7")),
    Case(
        "action_dimension",
        f"{MODEL}.action_dim",
        {f"{MODEL}.action_dim": 6, f"{OPENPI}.action_env_dim": 7},
        ("is 6", "allowed: 7"),
    ),
    change_one("cameras", f"{OPENPI}.num_images_in_input", 3, "is 3", "allowed: 2", "a masked camera would be pooled"),
    change_one("cameras", f"{OPENPI}.num_images_in_input", 1, "is 1", "leave out a camera"),
    change_one(
        "critic_flags",
        f"{OPENPI}.add_value_head",
        False,
        "the value of actor.model.add_value_head (true)",
        also=("critic_for_ppo",),
    ),
    Case(
        "critic_for_ppo",
        f"{OPENPI}.add_value_head",
        {f"{MODEL}.add_value_head": False},
        ("true with algorithm.adv_type: gae", "grpo"),
    ),
    change_one("value_pooling", f"{OPENPI}.value_vlm_mode", "mean", "mean_token, last_token or first_token"),
    change_one("prompt_length", f"{OPENPI}.max_token_len", 48, "is 48", "allowed: 200"),
    change_one("lora_variants", f"{OPENPI}.paligemma_variant", "gemma_2b_lora", "allowed: gemma_2b", "LoRA"),
    change_one("misspelt_options", f"{OPENPI}.nois_level", 0.7, "did you mean noise_level", "ignores it silently"),
    Case("one_checkpoint", "rollout.model.model_path", {"rollout.model.model_path": "/other"}, ("'/other'", "frozen")),
]
