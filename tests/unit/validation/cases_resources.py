# SPDX-License-Identifier: Apache-2.0
"""Refusals: processes, devices, batches."""

from tests.unit.validation.case import EVALUATION, GRPO, MODEL, OPENPI, Case, P, change_one, placed
from tests.unit.validation.conftest import REMOVED, TINY

RESOURCES = [
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
        "placed_once",
        P,
        {f"{P}.actor": 0},  # beside the example's own key, as +cluster.component_placement.actor=0 leaves it
        (
            "actor placed by 'actor,env,rollout' and 'actor';",
            "'~cluster.component_placement' '+cluster.component_placement={actor: 0, rollout: 1, env: 1}'",
        ),
    ),
    Case("placed_once", P, placed(actor_env="0", env_rollout="1"), ("env placed by 'actor,env' and 'env,rollout'",)),
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
]
