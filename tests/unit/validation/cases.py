# SPDX-License-Identifier: Apache-2.0
"""Tables of refusals and warnings: what changes in a valid config, and what the report says."""

from dataclasses import dataclass, field
from typing import Any

from tests.unit.validation.conftest import FULL, REMOVED, TINY

P = "cluster.component_placement"


def placed(**components: str) -> dict[str, Any]:
    return {P: {name.replace("_", ","): text for name, text in components.items()}}


GRPO = {
    "algorithm.adv_type": "grpo",
    "algorithm.loss_type": "actor",
    "algorithm.group_size": 8,
    "actor.model.add_value_head": False,
}
EVALUATION = {"runner.val_check_interval": 10, "env.eval.total_num_envs": 64}
NO_CORRECTION = {"algorithm.recompute_logprobs": False, "algorithm.importance_sampling_fix": False}
STOCK = {"rollout.rollout_backend": "huggingface", **NO_CORRECTION}
ONLY_EVALUATION = {"runner.only_eval": True, "env.eval.total_num_envs": 64, "rollout.model": "${actor.model}"}


@dataclass(frozen=True)
class Case:
    """``changes`` of the example ``base`` on ``gpus`` accelerators -> one report per (check, key, parts of its message)."""

    check: str
    key: str
    changes: dict[str, Any]
    words: tuple[str, ...]
    gpus: int | None = 2
    base: str = FULL
    also: tuple[str, ...] = field(default=())
    """Further checks that report an error, each once."""

    @property
    def id(self) -> str:
        return f"{self.check}-{'+'.join(self.changes) or self.base}-gpus{self.gpus}"[:150]


def change_one(check: str, key: str, value: Any, *words: str, **more: Any) -> Case:
    """The common case: one key is changed and that key is reported."""
    return Case(check, key, {key: value}, words, **more)


MODEL, OPENPI, ENGINE = "actor.model", "actor.model.openpi", "rollout.phyai"
CPS = {f"{OPENPI}.noise_method": "flow_cps"}
LEARNED = {f"{OPENPI}.noise_method": "flow_noise", f"{OPENPI}.joint_logprob": True}


def annealed(*params: float) -> dict[str, Any]:
    return {f"{OPENPI}.noise_anneal": True, f"{OPENPI}.noise_params": list(params)}


ERRORS = [
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
    # -- processes and devices
    Case(
        "placement_syntax",
        f"{P}.rollout",
        placed(actor="0", env="0", rollout="0-"),
        ("'0-' is no rank", "correct the placement"),
    ),
    Case("placement_syntax", f"{P}.rollout", placed(actor="0", env="0"), ("missing", "add rollout")),
    Case(
        "placement_syntax",
        f"{P}.rollout",
        placed(actor="0", env="0", rollout="1-2"),
        ("names resource 2, but there are 2 (0-1)",),
    ),
    Case(
        "placement_syntax",
        f"{P}.rollout",
        {**placed(actor="0", env="0"), f"{P}.rollout": {"node_group": "a"}},
        ("no `placement`",),
    ),
    Case(
        "one_gpu_per_rollout_worker",
        f"{P}.rollout",
        placed(actor_env="0-3", rollout="0-3:0-1"),
        ("2 resources (0, 1) for rollout process 0", "one GPU"),
        gpus=4,
    ),
    Case(
        "one_gpu_per_rollout_worker",
        f"{P}.rollout",
        placed(actor_env="0", rollout="0:0-1"),
        ("GPU 0 for rollout processes 0, 1", "one engine"),
        gpus=1,
    ),
    Case(
        "one_gpu_per_rollout_worker", f"{P}.rollout", placed(actor_env="0", rollout="0:0-1"), ("GPU 0 for",), gpus=None
    ),
    change_one("fsdp_strategy", "actor.fsdp_config.strategy", "fdsp2", "did you mean fsdp2"),
    Case(
        "fsdp_strategy",
        "actor.fsdp_config.strategy",
        {"actor.fsdp_config.strategy": "fsdp"},
        ("fsdp2 without a GPU",),
        gpus=0,
        base=TINY,
    ),
    Case(
        "fsdp_strategy",
        "actor.fsdp_config.strategy",
        {"actor.fsdp_config.strategy": REMOVED},
        ("missing (RLinf takes fsdp)",),
        gpus=0,
        base=TINY,
    ),
    Case(
        "weight_syncer",
        "weight_syncer.type",
        {"weight_syncer": {"type": "buckets"}},
        ("bucket or patch", "did you mean bucket?"),
    ),
    Case(
        "weight_syncer",
        "weight_syncer.type",
        {"weight_syncer": {"type": "patch", "patch": {"snapshot_device": "cpu"}}},
        ("bucket without a GPU",),
        gpus=0,
        base=TINY,
    ),
    Case("weight_syncer", "weight_syncer.bucket", {"weight_syncer": {"type": "bucket"}}, ("missing", "a section")),
    change_one("bucket_options", "weight_syncer.bucket.bucket_size", 0, "at least 1"),
    change_one("bucket_options", "weight_syncer.bucket.is_agent", True, "renames parameters"),
    Case(
        "patch_initial_sync",
        "weight_syncer.patch.init_sync.enabled",
        {"weight_syncer": {"type": "patch", "patch": {"delta_encoding": True}}},
        ("missing (false)", "never become equal"),
    ),
    Case(
        "patch_initial_sync",
        "weight_syncer.patch.init_sync.enabled",
        {"weight_syncer": {"type": "patch", "patch": {"init_sync": {"enabled": False}}}},
        ("false",),
    ),
    Case(
        "patch_compression",
        "weight_syncer.patch.compression_algorithm",
        {"weight_syncer": {"type": "patch", "patch": {"init_sync": {"enabled": True}, "compression_algorithm": "lz4"}}},
        ("'lz4'", "none or nvcomp_lz4", "uncompressed"),
    ),
    Case(
        "patch_compression",
        "weight_syncer.patch.compression",
        {
            "weight_syncer": {
                "type": "patch",
                "patch": {"init_sync": {"enabled": True}, "compression": "nvcomp_lz4", "transport_device": "cpu"},
            }
        },
        ("'nvcomp_lz4' with transport_device 'cpu'", "through the host"),
    ),
    Case(
        "trained_prefix",
        "actor.fsdp_config.reshard_after_forward",
        {f"{MODEL}.is_lora": True, "actor.fsdp_config.strategy": "fsdp2"},
        ("is true", "false where fsdp2 trains", "keys and values"),
    ),
    Case(
        "trained_prefix",
        "actor.fsdp_config.reshard_after_forward",
        {f"{OPENPI}.train_expert_only": False, "actor.fsdp_config.strategy": "fsdp2"},
        ("train_expert_only off",),
    ),
    Case(
        "lora_syncer",
        "weight_syncer.type",
        {f"{MODEL}.is_lora": True, "weight_syncer": {"type": "patch", "patch": {"init_sync": {"enabled": True}}}},
        ("'patch'", "bucket with actor.model.is_lora: true", "merged"),
    ),
    Case("precision", f"{MODEL}.precision", {f"{MODEL}.precision": "bf16"}, ("'bf16'", "allowed: null", "log-probs")),
    change_one("precision", "actor.fsdp_config.mixed_precision.param_dtype", "bf16", "'bf16'", "allowed: null"),
    # -- batches
    change_one(
        "environments_per_process",
        "env.train.total_num_envs",
        63,
        "a multiple of 2 (2 environment processes)",
        "62 or 64",
    ),
    Case(
        "environments_per_process",
        "env.eval.total_num_envs",
        {**EVALUATION, "env.eval.total_num_envs": 31},
        ("is 31", "30 or 32"),
    ),
    Case(
        "environments_per_stage",
        "env.train.total_num_envs",
        {"env.train.total_num_envs": 66, "rollout.pipeline_stage_num": 4},
        ("a multiple of 8", "64 or 72"),
    ),
    Case(
        "environments_per_stage",
        "env.train.total_num_envs",
        {"env.train.total_num_envs": 2, "rollout.pipeline_stage_num": 2},
        ("a multiple of 4", "set env.train.total_num_envs: 4"),
    ),
    change_one("group_size", "env.train.group_size", 5, "a divisor of 32", "same state"),
    Case(
        "rollout_share",
        "env.train.total_num_envs",
        {**placed(actor="0-1", env="0-1", rollout="2-4")},
        ("is 64", "a multiple of 3", "63 or 66"),
        gpus=5,
    ),
    Case(
        "actor_share",
        "env.train.total_num_envs",
        {**placed(actor="0-2", env="0", rollout="0"), "env.train.total_num_envs": 64, "actor.global_batch_size": 384},
        ("64 environments per process", "3 parts for 3 actor processes", "63 or 66"),
        gpus=3,
    ),
    Case(
        "groups_stay_together",
        "algorithm.group_size",
        {**GRPO, **placed(actor="0-7", env="0", rollout="0"), "algorithm.group_size": 16},
        ("a divisor of 8", "strangers"),
        gpus=8,
    ),
    Case(
        "same_group_size",
        "env.train.group_size",
        {**GRPO, "env.train.group_size": 4},
        ("the value of algorithm.group_size (8)",),
    ),
    Case(
        "same_group_size",
        "env.train.group_size",
        {"algorithm.filter_rewards": True, "algorithm.group_size": 4, "env.train.group_size": 2},
        ("(4)",),
    ),
    Case(
        "grpo_group",
        "algorithm.group_size",
        {**GRPO, "algorithm.group_size": 1},
        ("at least 2 with algorithm.adv_type: grpo",),
    ),
    change_one(
        "chunk_steps",
        "env.train.max_steps_per_rollout_epoch",
        238,
        "a multiple of 5 (actor.model.num_action_chunks)",
        "235 or 240",
    ),
    change_one(
        "global_batch",
        "actor.global_batch_size",
        2000,
        "a multiple of 256 (actor.micro_batch_size 128 x 2 actor processes)",
        "1792 or 2048",
    ),
    change_one(
        "samples_per_step",
        "actor.global_batch_size",
        2560,
        "24576 samples of a step",
        "48 chunk steps x 8 epochs x 32 environments",
        "2048 or 3072",
    ),
    # -- the engine's options
    Case("group_present", ENGINE, {ENGINE: REMOVED}, ("missing", "hybrid_engines/phyai@rollout.phyai")),
    change_one("unknown_options", f"{ENGINE}.max_batchsize", 4, "an unknown option", "did you mean max_batch_size?"),
    change_one("unknown_options", f"{ENGINE}.quantise", True, "kernel_policy", "remove rollout.phyai.quantise"),
    *(
        change_one("max_batch_size", f"{ENGINE}.max_batch_size", value, "null", "at least 1")
        for value in (0, -1, 1.5, "auto", True)
    ),
    *(
        change_one("simulator_timeout", f"{ENGINE}.simulator_timeout", value, "seconds above 0")
        for value in (0, -5, 1e9, None, "forever", True)
    ),
    *(
        change_one("stall_timeout", f"{ENGINE}.stall_timeout", value, "null (never), or a number of seconds above 0")
        for value in (0, -5, 1e9, "forever", True)
    ),
    change_one("stall_timeout", f"{ENGINE}.stall_timeout", 600, "simulator_timeout (600)", "raise", "still answer"),
    change_one("value_source", f"{ENGINE}.value_source", "actr", "auto, rollout or actor", "did you mean actor?"),
    Case(
        "value_source",
        f"{ENGINE}.value_source",
        {f"{ENGINE}.value_source": "actor", f"{OPENPI}.value_after_vlm": False},
        (f"actor together with {OPENPI}.value_after_vlm: true.", "does not depend on the denoise step"),
    ),
    Case(
        "value_source",
        f"{ENGINE}.value_source",
        {f"{ENGINE}.value_source": "actor", **GRPO},
        ("value_after_vlm: true, algorithm.adv_type: gae",),
    ),
    Case(
        "value_source",
        f"{ENGINE}.value_source",
        {f"{ENGINE}.value_source": "actor", **NO_CORRECTION},
        ("algorithm.recompute_logprobs: true",),
    ),
    change_one("debug_logprob_offset", f"{ENGINE}.debug_logprob_offset", float("inf"), "finite"),
    change_one("debug_logprob_offset", f"{ENGINE}.debug_logprob_offset", "0.01", "'0.01'", "finite"),
    change_one("self_check", f"{ENGINE}.self_check", "wran", "off, warn or stop", "did you mean warn?"),
    change_one("self_check", f"{ENGINE}.self_check", True, "true"),
    Case(
        "self_check_needs_recompute",
        f"{ENGINE}.self_check",
        {f"{ENGINE}.self_check": "stop", **NO_CORRECTION},
        ("warn or stop together with algorithm.recompute_logprobs: true", "nothing to compare with"),
    ),
    change_one("actor_prefix", f"{ENGINE}.actor_prefix", "sparse", "auto, fused, real_tokens or dense"),
    change_one("actor_prefix_cache", f"{ENGINE}.actor_prefix_cache_gib", -1, "at least 0"),
    change_one("actor_prefix_cache", f"{ENGINE}.actor_prefix_cache_gib", "all", "auto (", "or a number of GiB"),
    change_one("params_dtype", f"{ENGINE}.params_dtype", "fp8", "bfloat16, bf16, float32 or fp32"),
    change_one("prefix_precision", f"{ENGINE}.prefix_precision", "int8", "null (as params_dtype) or fp8"),
    Case(
        "prefix_precision",
        f"{ENGINE}.prefix_precision",
        {f"{ENGINE}.prefix_precision": "fp8", f"{ENGINE}.params_dtype": "fp32"},
        (f"fp8 together with {ENGINE}.params_dtype: bfloat16", "rounded to bfloat16"),
    ),
    Case(
        "prefix_precision",
        f"{ENGINE}.prefix_precision",
        {f"{ENGINE}.prefix_precision": "fp8"},
        (f"fp8 together with {ENGINE}.params_dtype: bfloat16",),
        gpus=0,
        base=TINY,
    ),
    change_one("switches", f"{ENGINE}.use_cuda_graph", "auto", "true or false"),
    change_one("kernel_policy", f"{ENGINE}.kernel_policy", "no_such_policy", "'no_such_policy'", "unknown"),
    change_one("kernel_policy", f"{ENGINE}.kernel_policy", "/no/such/policy.yaml", "does not exist"),
    change_one("kernel_policy", f"{ENGINE}.kernel_policy", 3, "by its name or by a path"),
]

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
