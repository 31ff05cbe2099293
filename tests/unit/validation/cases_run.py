# SPDX-License-Identifier: Apache-2.0
"""Refusals: the kind of run, keys and types, the correction."""

from tests.unit.validation.case import EVALUATION, GRPO, MODEL, OPENPI, STOCK, Case, P, change_one
from tests.unit.validation.conftest import REMOVED

RUN = [
    # -- kind of run
    change_one("rollout_backend", "rollout.rollout_backend", "phyia", "'phyia'", "huggingface", "did you mean phyai?"),
    Case(
        "sections", "algorithm", {**STOCK, "algorithm": REMOVED}, ("missing", "a section", "examples/embodiment/config")
    ),
    Case("sections", "rollout", {"rollout": [1]}, ("[1]", "a section")),
    change_one("task_type", "runner.task_type", "reasoning", "'reasoning'", "embodied or embodied_eval"),
    change_one("task_type", "runner.task_type", REMOVED, "missing"),
    Case(
        "model_type",
        f"{MODEL}.model_type",
        {f"{MODEL}.model_type": "openvla_oft"},
        ("'openvla_oft'", "allowed: openpi", "huggingface"),
    ),
    change_one("config_name", f"{OPENPI}.config_name", "pi05_maniskill", "pi05_libero or pi0_libero", "only LIBERO"),
    Case(
        "weights_readable",
        f"{MODEL}.model_path",
        {f"{OPENPI}.config_name": "pi0_libero"},
        ("a PI0.5 model", "a PI0 model (pi0_libero)"),
    ),
    change_one("config_name", f"{OPENPI}.config_name", "p05_libero", "did you mean pi05_libero?"),
    change_one("model_family", f"{OPENPI}.pi05", False, "false", "another network than pi05_libero names"),
    change_one("simulator", "env.train.env_type", "maniskill", "'maniskill'", "allowed: libero"),
    Case("simulator", "env.eval.env_type", {**EVALUATION, "env.eval.env_type": "calvin"}, ("'calvin'",)),
    change_one(
        "task_suite", "env.train.task_suite_name", "libero_spatail", "libero_10", "did you mean libero_spatial?"
    ),
    Case("advantage_type", "algorithm.adv_type", {"algorithm.adv_type": "opd"}, ("gae or grpo", "teacher's log-probs")),
    Case("advantage_type", "algorithm.adv_type", {"algorithm.adv_type": "reinpp"}, ("only PPO and GRPO",)),
    change_one(
        "loss_type", "algorithm.loss_type", "decoupled_actor_critic", "asynchronous PPO", "actor_critic or actor"
    ),
    change_one("loss_type", "algorithm.loss_type", "embodied_dagger", "expert model"),
    change_one("loss_type", "algorithm.loss_type", "actor", "actor_critic with algorithm.adv_type: gae"),
    Case(
        "loss_type",
        "algorithm.loss_type",
        {**GRPO, "env.train.group_size": 8, "algorithm.loss_type": "actor_critic"},
        ("grpo", "without returns"),
    ),
    change_one("training_backend", "actor.training_backend", "megatron", "'megatron'", "allowed: fsdp"),
    change_one("reward_model", "reward.use_reward_model", True, "allowed: false", "no reward workers"),
    Case(
        "reward_model",
        "reward.use_reward_model",
        {**STOCK, "reward.use_reward_model": True},
        ("RLinf's own entry point",),
    ),
    Case(
        "other_actors",
        "algorithm.loss_type",
        {**STOCK, "algorithm.loss_type": "embodied_sac"},
        ("another actor class",),
    ),
    Case(
        "other_actors",
        "runner.use_training_pipeline",
        {**STOCK, "runner.use_training_pipeline": True},
        ("RLinf's own program",),
    ),
    # -- keys and types
    change_one(
        "keys_and_types", "actor.micro_batch_size", REMOVED, "missing", "at least 1", "set actor.micro_batch_size"
    ),
    change_one("keys_and_types", "actor.micro_batch_size", "128", "'128'", "an integer"),
    change_one("keys_and_types", "actor.micro_batch_size", 0, "is 0", "at least 1"),
    change_one("keys_and_types", "actor.seed", None, "null", "an integer"),
    change_one("keys_and_types", "env.train.total_num_envs", -4, "is -4", "at least 1"),
    change_one("keys_and_types", "env.train.max_episode_steps", REMOVED, "missing"),
    change_one("keys_and_types", "env.train.auto_reset", "no", "'no'", "true or false"),
    change_one("keys_and_types", "env.train.video_cfg", REMOVED, "missing"),
    change_one("keys_and_types", "algorithm.value_clip", None, "null", "above 0"),
    change_one(
        "keys_and_types", "algorithm.recompute_logprobs", "yes", "'yes'", "true or false", also=("fix_needs_recompute",)
    ),
    change_one("keys_and_types", "actor.optim", REMOVED, "missing"),
    change_one("keys_and_types", f"{OPENPI}.noise_level", float("nan"), "nan", "finite"),
    change_one("keys_and_types", f"{OPENPI}.num_steps", 0, "is 0", "at least 1", also=("denoise_steps",)),
    change_one("keys_and_types", "rollout.model.model_path", REMOVED, "missing", "text"),
    change_one("keys_and_types", P, REMOVED, "missing", "a section"),
    change_one("keys_and_types", "weight_syncer", None, "null", "a section"),
    change_one("resolvable", "actor.seed", "${oc.env:PHYAI_TEST_UNSET}", "PHYAI_TEST_UNSET", "can be resolved"),
    change_one("resolvable", "actor.seed", "???", "Missing mandatory value"),
    # -- correction
    Case(
        "fix_needs_recompute",
        "algorithm.importance_sampling_fix",
        {"algorithm.recompute_logprobs": None},
        ("together with algorithm.recompute_logprobs: true", "no actor's score"),
    ),
    *(
        change_one(
            "clip",
            "algorithm.importance_sampling_clip",
            value,
            word,
            "above 0",
            "set algorithm.importance_sampling_clip: 1.0",
        )
        for value, word in (
            (0, "is 0"),
            (-1.5, "is -1.5"),
            (float("inf"), "inf"),
            (float("nan"), "nan"),
            ("two", "'two'"),
            (True, "true"),
        )
    ),
    change_one("clip", "algorithm.importance_sampling_clip", REMOVED, "missing"),
    change_one("clip_low", "algorithm.importance_sampling_clip_low", -0.1, "is -0.1", "at least 0"),
    change_one(
        "clip_low", "algorithm.importance_sampling_clip_low", 1.5, "at most algorithm.importance_sampling_clip (1.0)"
    ),
    change_one(
        "mode", "algorithm.importance_sampling_mode", "trunkate", "truncate, mask or off", "did you mean truncate?"
    ),
    change_one("misspelt_keys", "algorithm.importance_samplig_clip", 2.0, "did you mean importance_sampling_clip?"),
    change_one("misspelt_keys", "algorithm.recompute_logprob", True, "did you mean recompute_logprobs?"),
    change_one("reward_type", "algorithm.reward_type", "step_level", "chunk_level or action_level"),
    change_one("logprob_type", "algorithm.logprob_type", "step_level", "token_level, action_level or chunk_level"),
    change_one("reward_and_logprob_shapes", "algorithm.reward_type", "action_level", "one value per chunk"),
    Case(
        "reward_and_logprob_shapes",
        "algorithm.logprob_type",
        {**GRPO, "algorithm.reward_type": "action_level"},
        ("token_level or action_level with algorithm.reward_type: action_level", "do not broadcast"),
    ),
]
