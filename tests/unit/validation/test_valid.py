# SPDX-License-Identifier: Apache-2.0
"""What passes, what the stock backend meets, and that validation only looks."""

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from rlinf_phyai.evaluation.config import for_evaluation
from rlinf_phyai.paths import config_dir
from rlinf_phyai.validation import ANY_BACKEND, ConfigError, find_problems, validate_config
from tests.unit.validation.case import (
    CPS,
    ENGINE,
    EVALUATION,
    GRPO,
    LEARNED,
    MODEL,
    NO_CORRECTION,
    OPENPI,
    P,
    annealed,
    placed,
)
from tests.unit.validation.conftest import FULL, REMOVED, TINY, MakeConfig

STOCK = {"rollout.rollout_backend": "huggingface"}


def copy(cfg: DictConfig) -> Any:
    return OmegaConf.create(OmegaConf.to_container(cfg, resolve=False))


def test_the_tiny_example_as_shipped(
    composed: dict[str, DictConfig], tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the quickstart: no GPU, the checkpoint where the config says, relative to the working directory."""
    cfg = copy(composed[TINY])
    link = tmp_path / cfg.actor.model.model_path
    link.parent.mkdir(parents=True)
    link.symlink_to(tiny_checkpoint)
    monkeypatch.chdir(tmp_path)
    assert validate_config(cfg, gpus=0) == []


@pytest.mark.parametrize("gpus", [None, 1, 2, 4, 8])
def test_the_full_example_as_shipped_lacks_its_checkpoint_only(
    composed: dict[str, DictConfig], gpus: int | None
) -> None:
    problems = find_problems(copy(composed[FULL]), gpus=gpus)
    assert [p.check for p in problems] == ["checkpoint"]
    assert "/path/to/RLinf-Pi05-LIBERO-SFT" in str(problems[0])


def test_shipped_kernel_policies_are_accepted(config: MakeConfig) -> None:
    names = [file.stem for file in (config_dir() / "kernel_policy").glob("*.yaml")]
    assert "torch_reference" in names
    for name in names:
        assert find_problems(config(FULL, {f"{ENGINE}.kernel_policy": name}), gpus=2) == []


@pytest.mark.parametrize(
    "changes, gpus",
    [
        ({}, 8),
        ({}, None),
        (placed(env="0-3", rollout="4-7", actor="0-7"), 8),
        (placed(env="0-1", rollout="2-5", actor="6-7"), 8),
        ({**placed(env="0:0-3", rollout="0-1", actor="0-1"), "rollout.pipeline_stage_num": 2}, 2),
        ({**placed(env_rollout="all"), f"{P}.actor": {"node_group": "cluster", "placement": "0-1"}}, 4),
        (
            {
                "cluster.num_nodes": 2,
                **placed(actor_rollout="0-15"),
                f"{P}.env": {"node_group": "node", "placement": "0-1:0-7"},
            },
            16,
        ),
        (NO_CORRECTION | {"algorithm.recompute_logprobs": True}, 2),  # rescoring without the weight
        ({"algorithm.importance_sampling_mode": "mask", "algorithm.importance_sampling_clip_low": 0.5}, 2),
        ({"algorithm.importance_sampling_mode": False}, 2),  # YAML's reading of a bare `off`
        ({f"{ENGINE}.self_check": False}, 2),
        ({"algorithm.logprob_type": "token_level"}, 2),
        ({"algorithm.logprob_type": "action_level"}, 2),
        (GRPO, 2),
        ({**GRPO, "algorithm.reward_type": "action_level", "algorithm.logprob_type": "token_level"}, 2),
        (EVALUATION, 2),
        ({f"{OPENPI}.value_after_vlm": False, f"{OPENPI}.chunk_critic_input": True}, 2),
        ({f"{OPENPI}.value_vlm_mode": "last_token"}, 2),
        ({f"{OPENPI}.ignore_last": True}, 2),
        ({**CPS, f"{OPENPI}.ignore_last": True}, 2),
        ({**LEARNED, "algorithm.entropy_bonus": 0.005, f"{OPENPI}.noise_logvar_range": [0.05, 0.2]}, 2),
        (annealed(0.7, 0.3, 400), 2),
        ({f"{OPENPI}.discrete_state_input": True}, 2),
        ({f"{OPENPI}.noise_method": REMOVED, f"{OPENPI}.noise_level": REMOVED}, 2),  # the model's own defaults
        ({f"{OPENPI}.train_expert_only": False}, 2),
        ({f"{ENGINE}.max_batch_size": 16}, 2),
        ({f"{ENGINE}.value_source": "actor"}, 2),
        ({f"{ENGINE}.self_check": "stop"}, 2),
        ({f"{ENGINE}.actor_prefix": "dense", f"{ENGINE}.actor_prefix_cache_gib": 8.5}, 2),
        ({f"{ENGINE}.actor_prefix_cache_gib": "auto"}, 2),
        ({f"{ENGINE}.actor_prefix_cache_gib": 0}, 2),
        ({f"{ENGINE}.params_dtype": "float32"}, 2),
        ({f"{ENGINE}.kernel_policy": None}, 2),  # PHYAI_KERNEL_CONFIG or the reference
        ({"weight_syncer": {"type": "patch", "patch": {"init_sync": {"enabled": True}}}}, 2),
        ({"env.train.auto_reset": True, "env.train.max_episode_steps": 120}, 2),
        ({"env.train.rollout_epoch": REMOVED, "algorithm.rollout_epoch": 8}, 2),  # RLinf's deprecated place
        ({"env.train.task_suite_name": "libero_10"}, 2),
        ({f"{MODEL}.is_lora": True, f"{MODEL}.lora_rank": 8}, 2),
        ({"actor.enable_offload": True, "rollout.enable_offload": True}, 2),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else str(value),
)
def test_valid(changes: dict[str, Any], gpus: int | None, config: MakeConfig) -> None:
    assert find_problems(config(FULL, changes), gpus=gpus) == []


def test_two_workers_may_share_a_node_without_gpu(config: MakeConfig) -> None:
    cfg = config(TINY, placed(actor="0", env="0", rollout="0:0-1"))
    assert find_problems(cfg, gpus=0) == []


def test_evaluation_needs_no_actor(config: MakeConfig) -> None:
    cfg = config(FULL, {"env.eval.total_num_envs": 64, "rollout.phyai.kernel_policy": None})
    for_evaluation(cfg)
    cfg = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))
    assert isinstance(cfg, DictConfig)
    for key in ("actor", "algorithm", "weight_syncer"):
        del cfg[key]
    del cfg.env["train"]
    assert find_problems(cfg, gpus=2) == []


def test_an_unresolvable_value_that_nobody_reads_is_no_problem(config: MakeConfig) -> None:
    assert find_problems(config(FULL, {"env.train.note": "${oc.env:PHYAI_TEST_UNSET}"}), gpus=2) == []


def test_validation_changes_nothing(config: MakeConfig) -> None:
    for name, gpus in ((FULL, 2), (FULL, None), (TINY, 0)):
        cfg = config(name, {"actor.micro_batch_size": "???", f"{OPENPI}.noise_level": "${oc.env:PHYAI_TEST_UNSET}"})
        OmegaConf.set_struct(cfg, True)
        before = OmegaConf.to_yaml(cfg, resolve=False)
        flags = (OmegaConf.is_struct(cfg), OmegaConf.is_readonly(cfg))
        find_problems(cfg, gpus=gpus)
        assert OmegaConf.to_yaml(cfg, resolve=False) == before
        assert (OmegaConf.is_struct(cfg), OmegaConf.is_readonly(cfg)) == flags


def test_a_read_only_config_can_be_validated(config: MakeConfig) -> None:
    cfg = config()
    OmegaConf.set_readonly(cfg, True)
    OmegaConf.set_struct(cfg, True)
    assert find_problems(cfg, gpus=2) == []


@pytest.mark.parametrize(
    "broken", [{}, {"rollout": {"rollout_backend": "phyai"}}, {"rollout": {"rollout_backend": "phyai", "phyai": 3}}]
)
def test_checks_survive_an_empty_config(broken: dict[str, Any]) -> None:
    cfg = OmegaConf.create(broken)
    assert isinstance(cfg, DictConfig)
    missing = {p.key for p in find_problems(cfg) if p.check == "sections"}
    assert missing == {"runner", "cluster", "env", "rollout", "actor", "algorithm"} - set(broken)


ODD_VALUES = (None, True, -3, 0.5, "text", [], {}, {"a": 1}, ["x"], float("nan"), "???", "${nope}")


def keys_of(node: DictConfig, prefix: str = "") -> list[str]:
    keys = []
    for name in node:
        keys.append(f"{prefix}{name}")
        child = node._get_node(name)
        if isinstance(child, DictConfig):
            keys += keys_of(child, f"{prefix}{name}.")
    return [key for key in keys if "," not in key]


def test_checks_survive_any_value_anywhere(config: MakeConfig) -> None:
    """Whatever a key holds, validation reports; it raises nothing else."""
    keys = keys_of(config())
    assert len(keys) > 150
    for key, value in zip(keys, itertools.cycle(ODD_VALUES), strict=False):
        find_problems(config(FULL, {key: value}), gpus=2, look_at_files=False)


@pytest.mark.parametrize("value", ODD_VALUES, ids=repr)
def test_checks_survive_one_value_everywhere(value: Any, config: MakeConfig) -> None:
    cfg = config()
    for key in reversed(keys_of(cfg)):
        section, _, name = key.rpartition(".")
        parent = OmegaConf.select(cfg, section) if section else cfg
        if not isinstance(parent._get_node(name), DictConfig) and key != "rollout.rollout_backend":
            OmegaConf.update(cfg, key, value, merge=False)
    assert find_problems(cfg, gpus=2)


# -- the stock backend -------------------------------------------------------------------------------------------------


def test_stock_backend_meets_neutral_checks_only(config: MakeConfig) -> None:
    """Everything that the engine cannot do is fine with RLinf's own rollout."""
    changes = {
        **STOCK,
        **NO_CORRECTION,
        f"{MODEL}.gradient_checkpointing": True,
        f"{MODEL}.model_path": "/nowhere",
        f"{OPENPI}.noise_method": "flow_noise",
        f"{OPENPI}.config_name": "pi0_libero",
        "rollout.enable_offload": True,
        "rollout.enable_torch_compile": True,
        "rollout.model.model_path": "/elsewhere",
        "env.train.env_type": "maniskill",
        "actor.fsdp_config.mixed_precision.param_dtype": "bf16",
        ENGINE: REMOVED,
    }
    assert find_problems(config(FULL, changes), gpus=2) == []


def test_stock_backend_is_the_default(config: MakeConfig) -> None:
    for absent in (REMOVED, None):
        cfg = config(FULL, {"rollout.rollout_backend": absent, f"{OPENPI}.noise_anneal": True, **NO_CORRECTION})
        assert find_problems(cfg, gpus=2) == []


@pytest.mark.parametrize(
    "changes, key",
    [
        ({"algorithm.recompute_logprobs": False}, "algorithm.importance_sampling_fix"),
        ({**NO_CORRECTION, "env.train.total_num_envs": 63}, "env.train.total_num_envs"),
        ({**NO_CORRECTION, "actor.global_batch_size": 100}, "actor.global_batch_size"),
        ({**NO_CORRECTION, "env.train.max_steps_per_rollout_epoch": 239}, "env.train.max_steps_per_rollout_epoch"),
    ],
)
def test_stock_backend_is_refused_what_cannot_run(changes: dict[str, Any], key: str, config: MakeConfig) -> None:
    with pytest.raises(ConfigError) as raised:
        validate_config(config(FULL, {**STOCK, **changes}), gpus=2)
    assert [p.key for p in raised.value.problems] == [key]


def test_neutral_checks_never_look_at_files() -> None:
    assert not any(check.__module__.endswith(".files") for check in ANY_BACKEND)


# -- the package -------------------------------------------------------------------------------------------------------


def test_importing_is_light() -> None:
    code = (
        "import sys, rlinf_phyai.validation; "
        "heavy = {'torch', 'rlinf', 'openpi', 'transformers', 'ray', 'numpy', 'safetensors'} & set(sys.modules); "
        "sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_config_error_is_one_of_ours(config: MakeConfig) -> None:
    from rlinf_phyai.errors import PhyaiError

    with pytest.raises(PhyaiError) as raised:
        validate_config(config(FULL, {f"{MODEL}.gradient_checkpointing": True}), gpus=2)
    assert isinstance(raised.value, ValueError)
    assert str(raised.value).startswith("the config has 1 problem; nothing was started.")
