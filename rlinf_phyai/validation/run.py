# SPDX-License-Identifier: Apache-2.0
"""What kind of run it is: backend, task, model, simulator, algorithm."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig

from rlinf_phyai import backends
from rlinf_phyai.validation.problems import Problem, did_you_mean, one_of, show, warning
from rlinf_phyai.validation.settings import Settings

TASK_TYPES = ("embodied", "embodied_eval")
MODEL_TYPE = "openpi"
CONFIG_NAMES = ("pi05_libero", "pi0_libero")
SIMULATOR = "libero"
TASK_SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90", "libero_130")
ALGORITHMS = {"gae": "actor_critic", "grpo": "actor"}
"""Advantage type -> policy loss: PPO with a critic, and GRPO without one."""
_ALGORITHM_NAMES = {"gae": "PPO", "grpo": "GRPO"}

_ADVANTAGE_REASONS = {
    "opd": "on-policy distillation compares with a teacher's log-probs, which are no rollout log-probs to correct for",
    "grpo_dynamic": "it groups turns of dialogues, which robot episodes do not have",
}
_LOSS_REASONS = {
    "decoupled_actor_critic": "it belongs to RLinf's asynchronous PPO runner; only the synchronous one runs",
    "embodied_dagger": "DAgger needs an expert model in the rollout",
}


def rollout_backend(s: Settings) -> Iterator[Problem]:
    """The rollout backend must be installed."""
    if s.backend in (backends.PHYAI_BACKEND.name, backends.DEFAULT):
        return  # built in: no need to search the installed packages
    names = backends.available()
    if s.backend not in names:
        yield Problem(
            "rollout.rollout_backend",
            show(s.backend),
            one_of(names),
            did_you_mean(s.backend, names) or "choose an installed backend, or install the package that brings it",
            f"backends are found through the entry-point group {backends.ENTRY_POINT_GROUP!r}",
        )


def sections(s: Settings) -> Iterator[Problem]:
    """A training config has all of RLinf's sections; an evaluation needs neither the actor's nor the algorithm's."""
    for name in ("runner", "cluster", "env", "rollout", *(("actor", "algorithm") if s.trains else ())):
        if not isinstance(s.get(name), DictConfig):
            yield Problem(
                name,
                show(s.get(name)) if s.has(name) else "missing",
                "a section",
                "start from one of examples/embodiment/config, or take the section from there",
            )


def task_type(s: Settings) -> Iterator[Problem]:
    """Only RLinf's embodied tasks use a robot policy."""
    value = s.get("runner.task_type")
    if value not in TASK_TYPES:
        yield Problem(
            "runner.task_type",
            show(value) if s.has("runner.task_type") else "missing",
            one_of(TASK_TYPES),
            "set runner.task_type: embodied (training) or embodied_eval",
        )


def model_type(s: Settings) -> Iterator[Problem]:
    """The model must be openpi's: RLinf's rollout passes the sampling mode on for that type only."""
    key = f"{s.model}.model_type"
    value = s.get(key)
    if value != MODEL_TYPE:
        yield Problem(
            key,
            show(value) if s.has(key) else "missing",
            MODEL_TYPE,
            f"set {key}: {MODEL_TYPE}; other models run with rollout.rollout_backend: huggingface",
            "the engine implements PI0.5 as openpi and RLinf define it",
        )


def config_name(s: Settings) -> Iterator[Problem]:
    """The openpi config must be PI0.5 or PI0 on LIBERO."""
    key = f"{s.openpi}.config_name"
    name = s.text(key)
    if name is None or name in CONFIG_NAMES:
        return
    if name.startswith(("pi05_", "pi0_")):
        reason = "its cameras, state and action layout are not LIBERO's; only LIBERO is supported so far"
    else:
        reason = f"RLinf knows no such config; {did_you_mean(name, CONFIG_NAMES) or 'see openpi_action_model'}"
    fix = f"use a LIBERO checkpoint and set {key}: {CONFIG_NAMES[0]}"
    yield Problem(key, show(name), one_of(CONFIG_NAMES), fix, reason)


def model_family(s: Settings) -> Iterator[Problem]:
    """The option ``pi05`` must not turn a PI0.5 config into PI0, or the other way round."""
    key, name = f"{s.openpi}.pi05", s.text(f"{s.openpi}.config_name")
    wanted = name is None or not name.startswith("pi0_")
    if s.get(key, wanted) is not wanted:
        yield Problem(
            key,
            show(s.get(key)),
            show(wanted),
            f"remove {key}",
            f"it would build another network than {name} names, with that one's prompt and transforms",
        )


def simulator(s: Settings) -> Iterator[Problem]:
    """Environments must be LIBERO's."""
    for section in s.environments:
        key = section.key("env_type")
        value = s.get(key)
        if value is not None and value != SIMULATOR:
            yield Problem(
                key,
                show(value),
                SIMULATOR,
                f"set {key}: {SIMULATOR}, or run with rollout.rollout_backend: huggingface",
                "observations and actions of other simulators are not supported yet",
            )


def task_suite(s: Settings) -> Iterator[Problem]:
    """The LIBERO task suite must exist."""
    for section in s.environments:
        key = section.key("task_suite_name")
        value = s.text(key)
        if s.get(section.key("env_type")) == SIMULATOR and value is not None and value.lower() not in TASK_SUITES:
            yield Problem(
                key,
                show(value),
                one_of(TASK_SUITES),
                did_you_mean(value, TASK_SUITES) or f"set {key} to a LIBERO suite",
            )


def advantage_type(s: Settings) -> Iterator[Problem]:
    """The advantage must be PPO's or GRPO's."""
    value = s.adv_type
    if s.trains and value is not None and value not in ALGORITHMS:
        yield Problem(
            "algorithm.adv_type",
            show(value),
            one_of(ALGORITHMS),
            "set algorithm.adv_type: gae (PPO) or grpo",
            _ADVANTAGE_REASONS.get(value, "only PPO and GRPO are supported"),
        )


def loss_type(s: Settings) -> Iterator[Problem]:
    """The policy loss must be the one that goes with the advantage."""
    value, adv = s.text("algorithm.loss_type"), s.adv_type
    if not s.trains or value is None:
        return
    if value not in ALGORITHMS.values():
        yield Problem(
            "algorithm.loss_type",
            show(value),
            one_of(ALGORITHMS.values()),
            "set algorithm.loss_type: actor_critic (PPO) or actor (GRPO)",
            _LOSS_REASONS.get(value, "the correction exists for these losses only"),
        )
    elif adv in ALGORITHMS and ALGORITHMS[adv] != value:
        yield Problem(
            "algorithm.loss_type",
            show(value),
            f"{ALGORITHMS[adv]} with algorithm.adv_type: {adv}",
            f"set algorithm.loss_type: {ALGORITHMS[adv]}, or change algorithm.adv_type",
            f"{_ALGORITHM_NAMES[adv]}'s advantages come {'with' if adv == 'gae' else 'without'} returns for a critic",
        )


def training_backend(s: Settings) -> Iterator[Problem]:
    """The actor trains with FSDP."""
    value = s.get("actor.training_backend")
    if s.trains and value != "fsdp":
        yield Problem(
            "actor.training_backend",
            show(value) if s.has("actor.training_backend") else "missing",
            "fsdp",
            "set actor.training_backend: fsdp",
            "RLinf trains robot policies with FSDP only",
        )


def entropy_bonus(s: Settings) -> Iterator[Problem]:
    """An entropy bonus needs noise that is learned."""
    value = s.number("algorithm.entropy_bonus")
    if s.trains and value and s.get(f"{s.openpi}.noise_method") != "flow_noise":
        yield warning(
            "algorithm.entropy_bonus",
            show(value),
            "0",
            "set algorithm.entropy_bonus: 0",
            "only flow_noise learns its noise; with a fixed noise level the entropy has no gradient, the bonus changes nothing",
        )


def entropy_type(s: Settings) -> Iterator[Problem]:
    """RLinf's PI0.5 reports one entropy per chunk."""
    key = "algorithm.entropy_type"
    if s.trains and s.number("algorithm.entropy_bonus") and s.get(key) != "token_level":
        yield Problem(
            key,
            show(s.get(key)) if s.has(key) else "missing",
            "token_level",
            f"set {key}: token_level",
            "the entropy is a mean over the chunk already; summed again, it would not fit the loss mask",
        )


def reward_model(s: Settings) -> Iterator[Problem]:
    """Our entry points start environments, rollout and actor; nothing would answer a reward model's callers."""
    key = "reward.use_reward_model"
    if s.flag(key):
        yield Problem(
            key,
            "true",
            "false",
            f"set {key}: false, or train with RLinf's own entry point",
            "no reward workers are started here, so the environments would wait for rewards forever",
        )


def other_actors(s: Settings) -> Iterator[Problem]:
    """With the stock backend: RLinf's further actor classes (SAC, DAgger, NFT, IQL, pipelined training) are not started here."""
    if not s.trains or s.backend != backends.DEFAULT:
        return
    reason = "it needs another actor class of RLinf than its PPO and GRPO actor, which would train something else"
    fix = "use RLinf's own program for this config"
    key = "algorithm.loss_type"
    loss = s.text(key)
    if loss is not None and loss.startswith("embodied_"):
        yield Problem(key, show(loss), one_of(ALGORITHMS.values()), fix, reason)
    key = "runner.use_training_pipeline"
    if s.flag(key):
        yield Problem(key, "true", "false", fix, reason)


CHECKS_ANY = (sections, rollout_backend, reward_model, other_actors)
CHECKS = (
    task_type,
    model_type,
    config_name,
    model_family,
    simulator,
    task_suite,
    advantage_type,
    loss_type,
    training_backend,
    entropy_bonus,
    entropy_type,
)
