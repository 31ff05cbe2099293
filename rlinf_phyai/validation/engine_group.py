# SPDX-License-Identifier: Apache-2.0
"""The group ``rollout.phyai``: options of the engine inside a rollout worker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rlinf_phyai import env
from rlinf_phyai.driver import stall
from rlinf_phyai.validation.correction import RECOMPUTE
from rlinf_phyai.validation.problems import Problem, did_you_mean, one_of, show, warning
from rlinf_phyai.validation.settings import Settings

GROUP = "rollout.phyai"
OPTIONS = (
    "max_batch_size",
    "kernel_policy",
    "use_cuda_graph",
    "params_dtype",
    "prefix_precision",
    "value_source",
    "actor_prefix",
    "actor_prefix_cache_gib",
    "debug_logprob_offset",
    "self_check",
    "simulator_timeout",
    "stall_timeout",
    "progress",
)
FLAGS = ("use_cuda_graph", "progress")
PARAMS_DTYPES = ("bfloat16", "bf16", "float32", "fp32")
FP32_DTYPES = PARAMS_DTYPES[2:]
VALUE_SOURCES = ("auto", "rollout", "actor")
ACTOR_PREFIXES = ("auto", "fused", "real_tokens", "dense")
_LONGEST_TIMEOUT_S = 1_000_000  # the system's wait on a pipe takes 2**31 ms at most
_MOST_PREFIX_GIB = 1_000_000  # ranks exchange it as int64 bytes
SELF_CHECKS = ("off", "warn", "stop")


def group_present(s: Settings) -> Iterator[Problem]:
    """The group must be in the config: it supplies the kernel policy."""
    if not s.keys(GROUP):
        yield Problem(
            GROUP,
            "missing" if not s.has(GROUP) else show(s.get(GROUP)),
            "a section with the engine's options",
            "add `- hybrid_engines/phyai@rollout.phyai` to the defaults list of the config",
            "it says which kernels the engine uses; none are taken silently",
        )


def unknown_options(s: Settings) -> Iterator[Problem]:
    """Every option of the group must exist."""
    for name in s.keys(GROUP):
        if name not in OPTIONS:
            hint = did_you_mean(name, OPTIONS)
            yield Problem(f"{GROUP}.{name}", "an unknown option", one_of(OPTIONS), hint or f"remove {GROUP}.{name}")


def max_batch_size(s: Settings) -> Iterator[Problem]:
    """The largest batch of an engine: automatic, or at least 1."""
    key = f"{GROUP}.max_batch_size"
    value, number = s.get(key), s.integer(key)
    if value is not None and (number is None or number < 1):
        yield Problem(
            key,
            show(value),
            "null (the environments of one worker and stage) or an integer of at least 1",
            f"set {key}: null",
        )


def value_source(s: Settings) -> Iterator[Problem]:
    """Values come from the rollout, or from the rescoring where that computes the same value."""
    key = f"{GROUP}.value_source"
    value = s.get(key, VALUE_SOURCES[0])
    if value not in VALUE_SOURCES:
        hint = did_you_mean(str(value), VALUE_SOURCES)
        yield Problem(key, show(value), one_of(VALUE_SOURCES), hint or f"set {key}: auto")
    elif value == "actor":
        lacking = [text for text, there in _needed_for_actor_values(s) if not there]
        if lacking:
            yield Problem(
                key,
                "'actor'",
                f"auto or rollout, or actor together with {', '.join(lacking)}",
                f"set {key}: auto",
                "the actor's values come from the rescoring, and only the critic after the VLM does not depend on the denoise step",
            )


def _needed_for_actor_values(s: Settings) -> Iterator[tuple[str, bool]]:
    yield f"{s.openpi}.value_after_vlm: true", s.has_critic and s.critic_after_vlm
    if s.trains:
        yield f"{RECOMPUTE}: true", s.flag(RECOMPUTE)
        yield "algorithm.adv_type: gae", s.adv_type == "gae"


def simulator_timeout(s: Settings) -> Iterator[Problem]:
    """The time that one simulator may take for one command."""
    key = f"{GROUP}.simulator_timeout"
    value, number = s.get(key), s.number(key)
    if s.has(key) and key not in s.unresolved and (number is None or not 0 < number <= _LONGEST_TIMEOUT_S):
        yield Problem(
            key,
            show(value),
            f"a number of seconds above 0, at most {_LONGEST_TIMEOUT_S}",
            f"set {key}: 600",
            "a simulator that never answers would stop the run without a word",
        )


def stall_timeout(s: Settings) -> Iterator[Problem]:
    """The time without any progress after which the run ends: longer than one simulator may take, which is no progress."""
    key, simulators = f"{GROUP}.stall_timeout", f"{GROUP}.simulator_timeout"
    value = s.get(key, stall.DEFAULT_S)
    if value is None or key in s.unresolved:
        return
    number = s.number(key) if s.has(key) else stall.DEFAULT_S
    of_simulator = s.number(simulators) if s.has(simulators) else env.DEFAULT_TIMEOUT_S
    if number is None or not 0 < number <= _LONGEST_TIMEOUT_S:
        yield Problem(
            key,
            show(value),
            f"null (never), or a number of seconds above 0, at most {_LONGEST_TIMEOUT_S}",
            f"set {key}: 3600",
        )
    elif of_simulator is not None and number <= of_simulator <= _LONGEST_TIMEOUT_S:
        yield Problem(
            key,
            show(value),
            f"null (never), or more than {simulators} ({of_simulator:g})",
            f"raise {key}, or lower {simulators}",
            "the run would end while a simulator may still answer",
        )


def debug_logprob_offset(s: Settings) -> Iterator[Problem]:
    """The debugging offset falsifies every reported log-prob."""
    key = f"{GROUP}.debug_logprob_offset"
    value, number = s.get(key, 0.0), s.number(key, 0.0 if not s.has(key) else None)
    if key in s.unresolved:
        return
    if number is None:
        yield Problem(key, show(value), "a finite number, 0 in real runs", f"set {key}: 0.0")
    elif number != 0:
        yield warning(
            key,
            show(value),
            "0",
            f"set {key}: 0.0",
            "it adds a constant to every reported log-prob, to show the correction at work",
        )


def self_check(s: Settings) -> Iterator[Problem]:
    """What a failed comparison of engine and actor at the start does. (YAML reads a bare ``off`` as false.)"""
    key = f"{GROUP}.self_check"
    value = s.get(key, "off")
    if value is not False and value not in SELF_CHECKS:
        yield Problem(
            key, show(value), one_of(SELF_CHECKS), did_you_mean(str(value), SELF_CHECKS) or f"set {key}: 'off'"
        )


def self_check_needs_recompute(s: Settings) -> Iterator[Problem]:
    """The comparison at the start is between the engine's scores and the actor's rescoring."""
    key = f"{GROUP}.self_check"
    if s.trains and s.get(key) in ("warn", "stop") and not s.flag(RECOMPUTE):
        yield Problem(
            key,
            show(s.get(key)),
            f"off, or {one_of(SELF_CHECKS[1:])} together with {RECOMPUTE}: true",
            f"set {RECOMPUTE}: true, or {key}: 'off'",
            "without rescoring there is nothing to compare with",
        )


def actor_prefix(s: Settings) -> Iterator[Problem]:
    """How the actor runs the frozen prefix when it rescores and trains."""
    key = f"{GROUP}.actor_prefix"
    value = s.get(key, "auto")
    if value not in ACTOR_PREFIXES:
        hint = did_you_mean(str(value), ACTOR_PREFIXES)
        yield Problem(key, show(value), one_of(ACTOR_PREFIXES), hint or f"set {key}: auto")


def actor_prefix_cache(s: Settings) -> Iterator[Problem]:
    """Device memory for prefixes that training reuses."""
    key = f"{GROUP}.actor_prefix_cache_gib"
    value, number = s.get(key, 0), s.number(key, 0 if s.get(key) is None else None)
    if value != "auto" and key not in s.unresolved and (number is None or not 0 <= number <= _MOST_PREFIX_GIB):
        yield Problem(
            key,
            show(value),
            f"auto (what the actor leaves free on the GPU) or a number of GiB of at least 0, at most {_MOST_PREFIX_GIB}",
            f"set {key}: auto",
        )


def params_dtype(s: Settings) -> Iterator[Problem]:
    """Type of the engine's large matrices."""
    key = f"{GROUP}.params_dtype"
    value = s.get(key)
    if value is not None and value not in PARAMS_DTYPES:
        yield Problem(
            key,
            show(value),
            f"null (as the actor holds the checkpoint), {one_of(PARAMS_DTYPES)}",
            did_you_mean(str(value), PARAMS_DTYPES) or f"set {key}: null",
        )


def prefix_precision(s: Settings) -> Iterator[Problem]:
    """FP8 for the prefix's MLPs, whose results are bfloat16."""
    key = f"{GROUP}.prefix_precision"
    value = s.get(key)
    if value not in (None, "fp8"):
        yield Problem(key, show(value), "null (as params_dtype) or fp8", f"set {key}: null")
        return
    dtype = s.get(f"{GROUP}.params_dtype")
    if value == "fp8" and (dtype in FP32_DTYPES or (dtype is None and _held_in_float32(s))):
        yield Problem(
            key,
            "'fp8'",
            f"null, or fp8 together with {GROUP}.params_dtype: bfloat16",
            f"set {key}: null",
            "FP8 products are rounded to bfloat16, in a float32 model they would be its only coarse part",
        )


def _held_in_float32(s: Settings) -> bool:
    """Whether the checkpoint says that the actor holds it in float32; what cannot be read is reported elsewhere."""
    from rlinf_phyai.models.pi05.stated_sizes import actor_params_dtype

    folder = s.path(f"{s.model}.model_path")
    with contextlib.suppress(ValueError, OSError):
        return folder is not None and actor_params_dtype(folder) == "float32"
    return False


def switches(s: Settings) -> Iterator[Problem]:
    """Switches of the group are true or false."""
    for name in FLAGS:
        key = f"{GROUP}.{name}"
        value = s.get(key, True)
        if not isinstance(value, bool):
            yield Problem(key, show(value), "true or false", f"set {key}: true")


def cuda_graphs_off(s: Settings) -> Iterator[Problem]:
    """Training without CUDA graphs works, slowly."""
    key = f"{GROUP}.use_cuda_graph"
    if s.get(key) is False and (s.gpus or 0) > 0:
        yield warning(
            key,
            "false",
            "true on a GPU",
            f"set {key}: true",
            "without graphs every denoise step pays its launch overhead",
        )


CHECKS = (
    group_present,
    unknown_options,
    max_batch_size,
    value_source,
    debug_logprob_offset,
    self_check,
    self_check_needs_recompute,
    simulator_timeout,
    stall_timeout,
    actor_prefix,
    actor_prefix_cache,
    params_dtype,
    prefix_precision,
    switches,
    cuda_graphs_off,
)
