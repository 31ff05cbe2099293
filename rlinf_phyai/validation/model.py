# SPDX-License-Identifier: Apache-2.0
"""PI0.5 as policy: sampler, action chunk, cameras and critic, as ``<model>.openpi`` configures them."""

from __future__ import annotations

from collections.abc import Iterator

from rlinf_phyai.validation.problems import Problem, did_you_mean, one_of, show, warning
from rlinf_phyai.validation.run import CONFIG_NAMES
from rlinf_phyai.validation.settings import Settings

NOISE_METHODS = ("flow_sde", "flow_cps", "flow_noise")
"""The first one is the model's own default."""
NO_NOISE = "without noise every log-prob is 0, so PPO would learn nothing"
NOISE_LEVEL = 0.5
NOISE_PARAMS = [0.7, 0.3, 400]
NOISE_STD_RANGE = [0.08, 0.16]
"""The model's own defaults."""

ACTION_HORIZON = {"pi05_libero": 10, "pi0_libero": 50}
ACTION_CHUNK = 5
ENV_ACTION_DIM = dict.fromkeys(CONFIG_NAMES, 7)
VALID_CAMERAS = dict.fromkeys(CONFIG_NAMES, 2)
"""Unmasked cameras of the data config: LIBERO has a third-person and a wrist view; the third slot is padding."""
PROMPT_TOKENS = {"pi05_libero": 200, "pi0_libero": 48}
VLM_VALUE_MODES = ("mean_token", "last_token", "first_token")

OPENPI_OPTIONS = frozenset(
    {
        "action_chunk",
        "action_dim",
        "action_env_dim",
        "action_expert_variant",
        "action_horizon",
        "add_value_head",
        "chunk_critic_input",
        "config_name",
        "detach_critic_input",
        "discrete_state_input",
        "double_layer",
        "dsrl_action_noise_dim",
        "dsrl_agg_q",
        "dsrl_hidden_dims",
        "dsrl_image_latent_dim",
        "dsrl_num_q_heads",
        "dsrl_state_dim",
        "dsrl_state_latent_dim",
        "dtype",
        "ignore_last",
        "is_nft",
        "joint_logprob",
        "max_token_len",
        "noise_anneal",
        "noise_level",
        "noise_logvar_range",
        "noise_method",
        "noise_params",
        "num_images_in_input",
        "num_steps",
        "paligemma_variant",
        "pi05",
        "safe_get_logprob",
        "train_expert_only",
        "use_dsrl",
        "value_after_vlm",
        "value_vlm_mode",
    }
)
"""Options that RLinf 0.3.0's PI0.5 reads; it accepts any other name and ignores it."""


def noise_method(s: Settings) -> Iterator[Problem]:
    """The engine samples with flow-SDE, flow-CPS and flow-noise."""
    key, default = f"{s.openpi}.noise_method", NOISE_METHODS[0]
    value = s.get(key, default)
    if value in NOISE_METHODS:
        return
    hint = did_you_mean(str(value), NOISE_METHODS)
    reason = NO_NOISE if value == "flow_ode" else "RLinf knows no such method"
    yield Problem(key, show(value), one_of(NOISE_METHODS), hint or f"set {key}: {default}", reason)


def _method(s: Settings) -> str:
    return str(s.get(f"{s.openpi}.noise_method", NOISE_METHODS[0]))


def noise_level(s: Settings) -> Iterator[Problem]:
    """Training needs noise: with none, every log-prob is 0."""
    key = f"{s.openpi}.noise_level"
    value = s.number(key, NOISE_LEVEL if not s.has(key) else None)
    if s.trains and value is not None and _method(s) != "flow_noise" and not s.flag(f"{s.openpi}.noise_anneal"):
        yield from _level(s, key, value, show(value), f"set {key}: {NOISE_LEVEL}")


def _level(s: Settings, key: str, level: float, found: str, fix: str) -> Iterator[Problem]:
    if level <= 0:
        yield Problem(key, found, "a number above 0", fix, NO_NOISE)
    elif level > 1 and _method(s) == "flow_cps":
        reason = "flow_cps turns a quarter circle from actions to noise; beyond it the noise would weaken again"
        yield Problem(key, found, "a number above 0 and at most 1", fix, reason)


def noise_annealing(s: Settings) -> Iterator[Problem]:
    """Annealing takes the noise level from ``noise_params``: at global step 0, at the end, and steps until then."""
    switch, key = f"{s.openpi}.noise_anneal", f"{s.openpi}.noise_params"
    if not (s.trains and s.flag(switch)):
        return
    if _method(s) == "flow_noise":
        yield warning(
            switch, "true", "false", f"set {switch}: false", "flow_noise learns its noise and reads no noise level"
        )
        return
    values = s.numbers(key, NOISE_PARAMS)
    if values is None or len(values) != 3 or values[2] < 1 or values[2] != int(values[2]):
        allowed = "[noise level at the start, at the end, global steps until then (at least 1)]"
        yield Problem(key, show(s.get(key)), allowed, f"set {key}: {NOISE_PARAMS}")
        return
    for level in sorted(set(values[:2])):
        yield from _level(s, key, level, show(s.get(key, NOISE_PARAMS)), f"set {key}: {NOISE_PARAMS}")


def noise_range(s: Settings) -> Iterator[Problem]:
    """flow-noise learns deviations between two bounds, which RLinf's key gives as deviations (not as log-variances)."""
    key = f"{s.openpi}.noise_logvar_range"
    values = s.numbers(key, NOISE_STD_RANGE)
    if _method(s) == "flow_noise" and (values is None or len(values) != 2 or not 0 < values[0] < values[1]):
        yield Problem(
            key,
            show(s.get(key)),
            "[smallest, largest standard deviation], both above 0",
            f"set {key}: {NOISE_STD_RANGE}",
            "the noise head chooses each deviation between them; without room it would learn nothing",
        )


def cps_steps(s: Settings) -> Iterator[Problem]:
    """flow-CPS adds no noise at its last step."""
    if not s.trains or _method(s) != "flow_cps" or s.flag(f"{s.openpi}.joint_logprob"):
        return
    key = f"{s.openpi}.ignore_last"
    reason = "the last step of flow_cps has no noise, so a sample that draws it has log-probs 0 and teaches nothing"
    if s.num_steps == 1:
        steps = f"{s.openpi}.num_steps"
        yield Problem(steps, "1", "at least 2 with flow_cps", f"raise {steps}", reason)
    elif not s.flag(key):
        yield warning(key, "false", "true with flow_cps", f"set {key}: true", reason)


def ignore_last(s: Settings) -> Iterator[Problem]:
    """Leaving out the last denoise step needs a second one."""
    key = f"{s.openpi}.ignore_last"
    if s.trains and s.flag(key) and s.num_steps == 1 and not s.flag(f"{s.openpi}.joint_logprob"):
        yield Problem(
            key,
            "true with num_steps 1",
            "false, or at least 2 denoise steps",
            f"set {key}: false, or raise {s.openpi}.num_steps",
            "the noisy step is drawn from all but the last, and there is no other",
        )


def joint_logprob(s: Settings) -> Iterator[Problem]:
    """Joint log-probs over all steps suit flow-noise; with flow-SDE they work, diluted."""
    key = f"{s.openpi}.joint_logprob"
    if not (s.trains and s.flag(key)):
        return
    if _method(s) != "flow_noise":
        yield warning(
            key,
            "true",
            f"false (recommended with {_method(s)})",
            f"set {key}: false",
            "the log-prob becomes the mean over the initial noise and all steps, as RLinf uses it with flow_noise",
        )
    if s.flag(f"{s.openpi}.ignore_last"):
        yield warning(
            f"{s.openpi}.ignore_last",
            "true with joint_logprob",
            "false",
            f"set {s.openpi}.ignore_last: false",
            "joint log-probs take every step, the last one included; the key does nothing",
        )


def denoise_steps(s: Settings) -> Iterator[Problem]:
    """The model reads ``openpi.num_steps``; the same key beside it must not say something else."""
    outer, inner = f"{s.model}.num_steps", f"{s.openpi}.num_steps"
    asked = s.integer(outer)
    if asked is not None and s.num_steps is not None and asked != s.num_steps:
        found = show(s.num_steps) if s.has(inner) else f"missing (the model takes {s.num_steps})"
        yield Problem(
            inner,
            found,
            f"the value of {outer} ({asked})",
            f"set {inner}: ${{{outer}}}",
            f"the model reads {inner} only, {outer} would do nothing",
        )


def action_chunk(s: Settings) -> Iterator[Problem]:
    """Environments and model must agree on the actions per chunk."""
    key = f"{s.openpi}.action_chunk"
    inner = s.integer(key) if s.has(key) else ACTION_CHUNK
    if s.chunk is not None and inner is not None and inner != s.chunk:
        found = show(inner) if s.has(key) else f"missing (the model takes {inner})"
        yield Problem(
            key,
            found,
            f"the value of {s.model}.num_action_chunks ({s.chunk})",
            f"set {key}: ${{{s.model}.num_action_chunks}}",
            "the environments step through num_action_chunks actions, the model hands out action_chunk",
        )


def chunk_within_horizon(s: Settings) -> Iterator[Problem]:
    """A chunk cannot be longer than what the expert denoises at once."""
    default = ACTION_HORIZON.get(s.text(f"{s.openpi}.config_name") or "")
    horizon = s.integer(f"{s.openpi}.action_horizon", default)
    if s.chunk is not None and horizon is not None and s.chunk > horizon:
        yield Problem(
            f"{s.model}.num_action_chunks",
            show(s.chunk),
            f"1 to {horizon} (the model's action horizon)",
            f"lower {s.model}.num_action_chunks",
            f"the action expert predicts {horizon} actions at once",
        )


def action_dimension(s: Settings) -> Iterator[Problem]:
    """Environment, loss and model must agree on the action dimensions."""
    outer, inner = f"{s.model}.action_dim", f"{s.openpi}.action_env_dim"
    wanted = ENV_ACTION_DIM.get(s.text(f"{s.openpi}.config_name") or "")
    if wanted is None:
        return
    for key, value in ((outer, s.integer(outer)), (inner, s.integer(inner) if s.has(inner) else wanted)):
        if value is not None and value != wanted:
            yield Problem(
                key,
                show(value),
                f"{wanted}",
                f"set {key}: {wanted}",
                "LIBERO takes 7 numbers: a 6-D motion and the gripper",
            )


def cameras(s: Settings) -> Iterator[Problem]:
    """The cameras that count must be the ones that the data config does not mask."""
    key = f"{s.openpi}.num_images_in_input"
    valid = VALID_CAMERAS.get(s.text(f"{s.openpi}.config_name") or "")
    value = s.get(key, valid)
    if valid is None or value == valid:
        return
    more = isinstance(value, int) and value > valid
    yield Problem(
        key,
        show(value),
        f"{valid} (the cameras that the LIBERO data config does not mask)",
        f"set {key}: {valid}",
        "a masked camera would be pooled into the value"
        if more
        else "the value would leave out a camera that the policy sees",
    )


def critic_flags(s: Settings) -> Iterator[Problem]:
    """RLinf and the model read ``add_value_head`` at two places."""
    outer, inner = f"{s.model}.add_value_head", f"{s.openpi}.add_value_head"
    if s.trains and s.flag(outer) != s.flag(inner):
        yield Problem(
            inner,
            show(s.get(inner)) if s.has(inner) else "missing (false)",
            f"the value of {outer} ({show(s.flag(outer))})",
            f"set {inner}: ${{{outer}}}",
            "RLinf reads the outer key for the optimizer, the model reads the inner one to build the head",
        )


def critic_for_ppo(s: Settings) -> Iterator[Problem]:
    """PPO's advantages need a critic."""
    if s.trains and s.adv_type == "gae" and not s.has_critic:
        yield Problem(
            f"{s.openpi}.add_value_head",
            "false",
            "true with algorithm.adv_type: gae",
            f"set {s.model}.add_value_head: true and {s.openpi}.add_value_head: true, or use algorithm.adv_type: grpo",
            "generalised advantages are differences of values",
        )


def value_pooling(s: Settings) -> Iterator[Problem]:
    """The critic after the VLM must pool the prefix in a way that exists."""
    key = f"{s.openpi}.value_vlm_mode"
    value = s.get(key, VLM_VALUE_MODES[0])
    if s.has_critic and s.critic_after_vlm and value not in VLM_VALUE_MODES:
        yield Problem(
            key,
            show(value),
            one_of(VLM_VALUE_MODES),
            did_you_mean(str(value), VLM_VALUE_MODES) or f"set {key}: mean_token",
        )


def prompt_length(s: Settings) -> Iterator[Problem]:
    """The critic after the VLM counts on the data config's number of prompt positions."""
    key = f"{s.openpi}.max_token_len"
    value, wanted = s.get(key), PROMPT_TOKENS.get(s.text(f"{s.openpi}.config_name") or "")
    if None not in (value, wanted) and value != wanted and s.has_critic and s.critic_after_vlm:
        yield Problem(
            key,
            show(value),
            f"{wanted}",
            f"remove {key}",
            f"RLinf's critic pools over {wanted} prompt positions, whatever this key says",
        )


def lora_variants(s: Settings) -> Iterator[Problem]:
    """openpi's LoRA variants have other parameters."""
    for name in ("paligemma_variant", "action_expert_variant"):
        key = f"{s.openpi}.{name}"
        value = s.text(key)
        if value is not None and "lora" in value:
            yield Problem(
                key,
                show(value),
                value.replace("_lora", ""),
                f"remove {key}",
                "the engine holds PI0.5's plain parameters, no LoRA adapters",
            )


def misspelt_options(s: Settings) -> Iterator[Problem]:
    """The model takes any option name and ignores those it does not know."""
    for name in s.keys(s.openpi):
        if name in OPENPI_OPTIONS:
            continue
        hint = did_you_mean(name, OPENPI_OPTIONS, cutoff=0.75)
        key, reason = f"{s.openpi}.{name}", "RLinf's PI0.5 has no such option and ignores it silently"
        if hint:
            yield Problem(key, "an unknown option", "an option of RLinf's PI0.5", hint, reason)
        else:
            yield warning(key, "an unknown option", "an option of RLinf's PI0.5", f"remove {key}", reason)


def one_checkpoint(s: Settings) -> Iterator[Problem]:
    """Rollout and actor must read the same checkpoint: frozen parameters are never synchronised."""
    rollout, actor = s.text("rollout.model.model_path"), s.text("actor.model.model_path")
    if s.trains and rollout is not None and actor is not None and rollout.rstrip("/") != actor.rstrip("/"):
        yield Problem(
            "rollout.model.model_path",
            show(rollout),
            f"the value of actor.model.model_path ({actor!r})",
            "set rollout.model.model_path: ${actor.model.model_path}",
            "only trainable parameters are sent to the rollout, frozen ones would differ for the whole run",
        )


CHECKS = (
    noise_method,
    noise_level,
    noise_annealing,
    noise_range,
    cps_steps,
    ignore_last,
    joint_logprob,
    denoise_steps,
    action_chunk,
    chunk_within_horizon,
    action_dimension,
    cameras,
    critic_flags,
    critic_for_ppo,
    value_pooling,
    prompt_length,
    lora_variants,
    misspelt_options,
    one_checkpoint,
)
