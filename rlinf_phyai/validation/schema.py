# SPDX-License-Identifier: Apache-2.0
"""Keys that a phyai run reads, their types, and which of them must be there.

RLinf reads most of these in a worker, minutes after the start. Checks of values live elsewhere; they skip a key of a
wrong type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from rlinf_phyai.validation.problems import Problem, show
from rlinf_phyai.validation.settings import Settings


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class Kind:
    """A type of value: its name in messages and the test."""

    name: str
    accepts: Callable[[Any], bool]


POSITIVE = Kind("an integer of at least 1", lambda value: _is_integer(value) and value >= 1)
INTEGER = Kind("an integer", _is_integer)
NUMBER = Kind("a finite number", _is_number)
POSITIVE_NUMBER = Kind("a finite number above 0", lambda value: _is_number(value) and value > 0)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("text", lambda value: isinstance(value, str) and value != "")
SECTION = Kind("a section", lambda value: isinstance(value, DictConfig))


@dataclass(frozen=True)
class Key:
    """A key that is read: ``required`` ones must be there and not null, others may be either."""

    name: str
    kind: Kind
    required: bool = True


_ALWAYS = (
    Key("cluster.num_nodes", POSITIVE),
    Key("cluster.component_placement", SECTION),
    Key("runner.logger.log_path", TEXT),
    Key("runner.max_steps", INTEGER, required=False),
    Key("runner.val_check_interval", INTEGER, required=False),
    Key("runner.only_eval", FLAG, required=False),
    Key("env.group_name", TEXT),
    Key("rollout.group_name", TEXT),
    Key("rollout.pipeline_stage_num", POSITIVE),
    Key("{model}.model_path", TEXT),
    Key("{model}.num_action_chunks", POSITIVE),
    Key("{model}.num_steps", POSITIVE, required=False),
    Key("{model}.action_dim", POSITIVE),
    Key("{model}.is_lora", FLAG, required=False),
    Key("{model}.lora_rank", POSITIVE, required=False),
    Key("{model}.openpi", SECTION),
    Key("{model}.openpi.config_name", TEXT),
    Key("{model}.openpi.num_steps", POSITIVE, required=False),
    Key("{model}.openpi.action_chunk", POSITIVE, required=False),
    Key("{model}.openpi.action_horizon", POSITIVE, required=False),
    Key("{model}.openpi.action_env_dim", POSITIVE, required=False),
    Key("{model}.openpi.noise_level", NUMBER, required=False),
    Key("{model}.openpi.ignore_last", FLAG, required=False),
    Key("{model}.openpi.joint_logprob", FLAG, required=False),
    Key("{model}.openpi.add_value_head", FLAG, required=False),
    Key("{model}.openpi.value_after_vlm", FLAG, required=False),
    Key("{model}.openpi.train_expert_only", FLAG, required=False),
)

_TRAINING = (
    Key("runner.max_epochs", POSITIVE),
    Key("algorithm", SECTION),
    Key("algorithm.adv_type", TEXT),
    Key("algorithm.loss_type", TEXT),
    Key("algorithm.reward_type", TEXT),
    Key("algorithm.logprob_type", TEXT),
    Key("algorithm.entropy_bonus", NUMBER),
    Key("algorithm.clip_ratio_low", NUMBER),
    Key("algorithm.clip_ratio_high", NUMBER),
    Key("algorithm.group_size", POSITIVE, required=False),
    Key("algorithm.update_epoch", POSITIVE, required=False),
    Key("algorithm.filter_rewards", FLAG, required=False),
    Key("algorithm.recompute_logprobs", FLAG, required=False),
    Key("algorithm.importance_sampling_fix", FLAG, required=False),
    Key("algorithm.importance_sampling_normalize", FLAG, required=False),
    Key("env.train.rollout_epoch", POSITIVE, required=False),
    Key("runner.weight_sync_interval", POSITIVE, required=False),
    Key("actor.group_name", TEXT),
    Key("rollout.model.model_path", TEXT),
    Key("actor.micro_batch_size", POSITIVE),
    Key("actor.global_batch_size", POSITIVE),
    Key("actor.seed", INTEGER),
    Key("actor.optim.lr", NUMBER),
    Key("actor.fsdp_config", SECTION),
    Key("actor.fsdp_config.mixed_precision", SECTION),
    Key("actor.model.add_value_head", FLAG, required=False),
    Key("weight_syncer", SECTION),
)

_CRITIC = (Key("algorithm.value_clip", POSITIVE_NUMBER), Key("algorithm.huber_delta", POSITIVE_NUMBER))

_ENVIRONMENTS = (
    Key("env.{section}.env_type", TEXT),
    Key("env.{section}.task_suite_name", TEXT),
    Key("env.{section}.total_num_envs", POSITIVE),
    Key("env.{section}.group_size", POSITIVE),
    Key("env.{section}.max_episode_steps", POSITIVE),
    Key("env.{section}.max_steps_per_rollout_epoch", POSITIVE),
    Key("env.{section}.seed", INTEGER),
    Key("env.{section}.auto_reset", FLAG),
    Key("env.{section}.ignore_terminations", FLAG),
    Key("env.{section}.use_fixed_reset_state_ids", FLAG),
    Key("env.{section}.use_ordered_reset_state_ids", FLAG),
    Key("env.{section}.use_rel_reward", FLAG),
    Key("env.{section}.video_cfg.save_video", FLAG),
    Key("env.{section}.init_params", SECTION),
)

_OPTIONAL_IN_EVALUATION = ("env.eval.group_size", "env.eval.use_ordered_reset_state_ids")


def keys_read(s: Settings) -> Iterator[Key]:
    """The keys that this run reads, with their places filled in."""
    yield from (Key(key.name.format(model=s.model), key.kind, key.required) for key in _ALWAYS)
    if s.trains:
        yield from _TRAINING
        if s.text("algorithm.loss_type") == "actor_critic":
            yield from _CRITIC
    for section in s.environments:
        for key in _ENVIRONMENTS:
            name = key.name.format(section=section.name)
            yield Key(name, key.kind, required=name not in _OPTIONAL_IN_EVALUATION)


def keys_and_types(s: Settings) -> Iterator[Problem]:
    """Keys that a worker reads minutes after the start must be there, with the right type."""
    missing: set[str] = set()
    for key in keys_read(s):
        value = s.get(key.name)
        if key.name in s.unresolved or key.kind.accepts(value):
            continue
        if value is not None:
            yield Problem(key.name, show(value), key.kind.name, f"set {key.name} to {key.kind.name}")
        elif key.required:
            name = _first_missing(s, key.name)
            if name in missing:
                continue  # one report for a missing section, not one for each of its keys
            missing.add(name)
            allowed = key.kind.name if name == key.name else f"a section with {key.name.removeprefix(f'{name}.')}"
            yield Problem(name, "null" if s.has(name) else "missing", allowed, f"set {name}", "the run reads this key")


def _first_missing(s: Settings, name: str) -> str:
    """The key itself, or the outermost section on the way to it that is not there."""
    parts = name.split(".")
    prefixes = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return next((prefix for prefix in prefixes if s.get(prefix) is None), name)


CHECKS = (keys_and_types,)
