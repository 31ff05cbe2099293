# SPDX-License-Identifier: Apache-2.0
"""The importance-sampling correction: keys of ``algorithm`` that belong together."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rlinf_phyai import backends
from rlinf_phyai.validation.problems import Problem, did_you_mean, one_of, show, warning
from rlinf_phyai.validation.settings import Settings

RECOMPUTE = "algorithm.recompute_logprobs"
FIX = "algorithm.importance_sampling_fix"
CLIP = "algorithm.importance_sampling_clip"
CLIP_LOW = "algorithm.importance_sampling_clip_low"
MODE = "algorithm.importance_sampling_mode"
NORMALIZE = "algorithm.importance_sampling_normalize"
KEYS = (RECOMPUTE, FIX, CLIP, CLIP_LOW, MODE, NORMALIZE)

MODES = ("truncate", "mask", "off")
REWARD_TYPES = ("chunk_level", "action_level")
LOGPROB_TYPES = ("token_level", "action_level", "chunk_level")


def fix_needs_recompute(s: Settings) -> Iterator[Problem]:
    """The weight compares the actor's own score with the rollout's, so the actor must rescore."""
    if s.trains and s.flag(FIX) and not s.flag(RECOMPUTE):
        yield Problem(
            FIX,
            "true",
            f"true together with {RECOMPUTE}: true",
            f"set {RECOMPUTE}: true, or turn {FIX} off",
            "the weight is exp(actor's score - rollout's score); without rescoring there is no actor's score",
        )


def correction_keys_missing(s: Settings) -> Iterator[Problem]:
    """A phyai run without the correction keys trains on the kernel difference."""
    if not s.trains:
        return
    # `clip` reports a missing bound itself where the fix is on.
    wanted = (RECOMPUTE, FIX) if s.flag(FIX) else (RECOMPUTE, FIX, CLIP)
    missing = [key for key in wanted if s.get(key) is None and key not in s.unresolved]
    if missing:
        yield warning(
            ", ".join(missing),
            "missing or null",
            f"{RECOMPUTE}: true, {FIX}: true and {CLIP} a number above 0, together",
            f"set {RECOMPUTE}: true, {FIX}: true and {CLIP}: 1.0",
            "engine and actor compute with different kernels; uncorrected, their difference enters every PPO ratio",
        )


def recompute_switched_off(s: Settings) -> Iterator[Problem]:
    """Rescoring switched off on purpose is allowed, and said aloud."""
    if s.trains and s.get(RECOMPUTE) is False:
        yield warning(
            RECOMPUTE,
            "false",
            "true (recommended)",
            f"set {RECOMPUTE}: true",
            "PPO's old log-probs are then the engine's; the ratio before the first update is not exactly 1",
        )


def clip(s: Settings) -> Iterator[Problem]:
    """The bound of the weight must be a finite number above 0."""
    value = s.get(CLIP)
    if not s.trains or CLIP in s.unresolved or (value is None and not s.flag(FIX)):
        return
    number = s.number(CLIP)
    if number is None or number <= 0:
        yield Problem(
            CLIP,
            show(value) if s.has(CLIP) else "missing",
            "a finite number above 0",
            f"set {CLIP}: 1.0",
            "min(w, clip) multiplies the advantage: 0 would remove all samples, a negative bound flip their sign",
        )


def clip_low(s: Settings) -> Iterator[Problem]:
    """The optional lower bound must lie between 0 and the upper one."""
    value = s.get(CLIP_LOW)
    if not s.trains or value is None:
        return
    low, high = s.number(CLIP_LOW), s.number(CLIP, math.inf)
    if low is None or high is None or not 0 <= low <= high:
        upper = "" if high in (None, math.inf) else f" and at most {CLIP} ({show(high)})"
        yield Problem(
            CLIP_LOW, show(value), f"null, or a number of at least 0{upper}", f"set {CLIP_LOW}: null or lower it"
        )


def mode(s: Settings) -> Iterator[Problem]:
    """The correction mode must exist. (YAML reads a bare ``off`` as false, which is taken as ``off``.)"""
    value = s.get(MODE)
    if s.trains and value is not None and value is not False and value not in MODES:
        yield Problem(MODE, show(value), one_of(MODES), did_you_mean(str(value), MODES) or f"set {MODE}: truncate")


def misspelt_keys(s: Settings) -> Iterator[Problem]:
    """A key that nearly spells one of the correction would be ignored silently."""
    known = [key.removeprefix("algorithm.") for key in KEYS]
    for name in s.keys("algorithm"):
        hint = did_you_mean(name, known, cutoff=0.85)
        if name not in known and hint:
            yield Problem(
                f"algorithm.{name}", "an unknown key", one_of(known), hint, "RLinf ignores unknown keys silently"
            )


def ignored_by_the_stock_backend(s: Settings) -> Iterator[Problem]:
    """The correction belongs to the phyai actor; RLinf's own ignores the keys."""
    on = [key for key in (RECOMPUTE, FIX) if s.flag(key)]
    if s.trains and s.backend == backends.DEFAULT and on:
        yield warning(
            on[0],
            "true",
            "true with rollout.rollout_backend: phyai",
            f"set {on[0]}: false, or choose rollout.rollout_backend: phyai",
            f"the {s.backend} backend trains with RLinf's own actor, which ignores it",
        )


def rollout_recompute_key(s: Settings) -> Iterator[Problem]:
    """``rollout.recompute_logprobs`` is an old key that nothing reads."""
    if s.get("rollout.recompute_logprobs"):
        yield warning(
            "rollout.recompute_logprobs",
            show(s.get("rollout.recompute_logprobs")),
            "false or absent",
            f"use {RECOMPUTE}",
            "nothing reads this key",
        )


def reward_type(s: Settings) -> Iterator[Problem]:
    """Rewards per chunk or per action."""
    value = s.text("algorithm.reward_type")
    if s.trains and value is not None and value not in REWARD_TYPES:
        yield Problem(
            "algorithm.reward_type", show(value), one_of(REWARD_TYPES), "set algorithm.reward_type: chunk_level"
        )


def logprob_type(s: Settings) -> Iterator[Problem]:
    """Log-probs per element, per action or per chunk."""
    value = s.text("algorithm.logprob_type")
    if s.trains and value is not None and value not in LOGPROB_TYPES:
        yield Problem(
            "algorithm.logprob_type", show(value), one_of(LOGPROB_TYPES), "set algorithm.logprob_type: chunk_level"
        )


def reward_and_logprob_shapes(s: Settings) -> Iterator[Problem]:
    """Rewards per action need log-probs per action or finer, and no critic with one value per chunk."""
    if not s.trains or s.text("algorithm.reward_type") != "action_level":
        return
    if s.adv_type == "gae":
        yield Problem(
            "algorithm.reward_type",
            "'action_level'",
            "chunk_level with algorithm.adv_type: gae",
            "set algorithm.reward_type: chunk_level",
            "PI0.5's critic gives one value per chunk, GAE over single actions needs one per action",
        )
    elif s.text("algorithm.logprob_type") == "chunk_level":
        yield Problem(
            "algorithm.logprob_type",
            "'chunk_level'",
            "token_level or action_level with algorithm.reward_type: action_level",
            "set algorithm.reward_type: chunk_level, or algorithm.logprob_type: action_level",
            "advantages per action do not broadcast to one log-prob per chunk",
        )


CHECKS_ANY = (fix_needs_recompute, ignored_by_the_stock_backend)
CHECKS = (
    correction_keys_missing,
    recompute_switched_off,
    clip,
    clip_low,
    mode,
    misspelt_keys,
    rollout_recompute_key,
    reward_type,
    logprob_type,
    reward_and_logprob_shapes,
)
