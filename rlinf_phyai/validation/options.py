# SPDX-License-Identifier: Apache-2.0
"""Options of RLinf that this version does not support, each with the reason: refused, never silently approximated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig

from rlinf_phyai.validation.problems import Problem, one_of, show
from rlinf_phyai.validation.settings import Settings


@dataclass(frozen=True)
class Unsupported:
    """An option that must keep its neutral value.

    Attributes:
        key: dotted key; ``{model}`` is the section of the model, ``{section}`` each environment section in use.
        reason: why another value cannot work.
        allowed: the neutral values; an absent key is neutral too.
        training_only: a run that only evaluates may set it.
    """

    key: str
    reason: str
    allowed: tuple[Any, ...] = (False, None)
    training_only: bool = False


CHECKPOINTING_REASON = (
    "activations recomputed in the backward pass change the log-probs, so PPO does not start at ratio 1"
)

UNSUPPORTED: tuple[Unsupported, ...] = (
    # the model
    Unsupported(
        "{model}.lora_path", "RLinf adapts the whole model then, under names and a scale that cannot be merged safely"
    ),
    Unsupported(
        "{model}.openpi.use_dsrl", "DSRL lets a SAC agent choose the initial noise, which the engine draws itself"
    ),
    Unsupported("{model}.openpi.is_nft", "NFT needs intermediate denoising states that the engine does not return"),
    Unsupported("{model}.openpi.double_layer", "RLinf 0.3.0 declares this option and computes nothing with it"),
    Unsupported(
        "{model}.openpi.safe_get_logprob",
        "it replaces the Gaussian log-prob by a squared distance, from which no importance weight follows",
    ),
    # the actor
    Unsupported(
        "{model}.gradient_checkpointing",
        CHECKPOINTING_REASON,
        training_only=True,
    ),
    Unsupported(
        "actor.fsdp_config.gradient_checkpointing",
        CHECKPOINTING_REASON,
        training_only=True,
    ),
    Unsupported(
        "actor.fsdp_config.amp_autocast.enabled",
        "autocast rounds the actor at other places than the engine rounds, so their log-probs drift apart",
        training_only=True,
    ),
    Unsupported(
        "actor.enable_sft_co_train", "the supervised loss is mixed in where the correction acts", training_only=True
    ),
    Unsupported(
        "critic.use_critic_model",
        "PI0.5 carries its critic as a value head; there is no separate critic model",
        training_only=True,
    ),
    # the rollout
    Unsupported(
        "rollout.enable_torch_compile",
        "it compiles the Hugging Face model; the engine brings its own kernels and CUDA graphs",
    ),
    Unsupported(
        "rollout.enable_cuda_graph",
        "it captures the Hugging Face model; the engine's own switch is rollout.phyai.use_cuda_graph",
    ),
    Unsupported("rollout.expert_model", "DAgger's second model has no engine"),
    Unsupported(
        "rollout.collect_transitions",
        "replay of single transitions belongs to off-policy algorithms; only synchronous PPO runs",
    ),
    Unsupported(
        "rollout.collect_prev_infos",
        "training needs the rollout's log-probs and values",
        allowed=(True,),
        training_only=True,
    ),
    # the algorithm and the runner
    Unsupported("algorithm.dagger", "DAgger needs an expert model in the rollout", training_only=True),
    Unsupported(
        "algorithm.staleness_threshold",
        "it belongs to RLinf's asynchronous runner; only synchronous PPO runs",
        training_only=True,
    ),
    Unsupported(
        "runner.use_training_pipeline",
        "the pipeline computes advantages before the actor holds the whole step, so nothing can be rescored first",
        training_only=True,
    ),
    Unsupported(
        "runner.enable_decoupled_mode",
        "decoupled environments call the rollout with changing batches; not supported yet",
    ),
    # the environments
    Unsupported("env.{section}.enable_offload", "LIBERO environments cannot be offloaded"),
)


def _is_neutral(value: Any, allowed: tuple[Any, ...]) -> bool:
    return any(value is neutral for neutral in allowed) or (False in allowed and _is_empty(value))


def _is_empty(value: Any) -> bool:
    return isinstance(value, DictConfig | ListConfig) and len(value) == 0


def _describe(value: Any) -> str:
    return f"a section with {', '.join(map(str, value))}" if isinstance(value, DictConfig) else show(value)


def unsupported_options(s: Settings) -> Iterator[Problem]:
    """Options that the engine or the correction does not support must keep their neutral values."""
    for option in UNSUPPORTED:
        if option.training_only and s.only_eval:
            continue
        sections = [section.name for section in s.environments] if "{section}" in option.key else [""]
        for section in sections:
            key = option.key.format(model=s.model, section=section)
            value = s.get(key, option.allowed[0])
            if _is_neutral(value, option.allowed):
                continue
            yield Problem(
                key,
                _describe(value),
                one_of([show(neutral) for neutral in option.allowed]),
                f"set {key}: {show(option.allowed[0])}, or run with rollout.rollout_backend: huggingface",
                option.reason,
            )


CHECKS = (unsupported_options,)
