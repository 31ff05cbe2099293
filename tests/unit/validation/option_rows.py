# SPDX-License-Identifier: Apache-2.0
"""Writes ``docs/options.md``, what becomes of every option of RLinf's PI0.5: ``python -m tests.unit.validation.option_rows``.

Whether a row is supported is what validation says of it; where it is, the row names the tests that compare engine and actor.
"""

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rlinf_phyai.validation import find_problems
from rlinf_phyai.validation.problems import show
from tests.unit.validation.case import CPS, LEARNED, MODEL, OPENPI, annealed
from tests.unit.validation.conftest import FULL, MakeConfig
from tests.unit.validation.page import row, write_page

TESTS = Path(__file__).resolve().parents[2]
PAGE = TESTS.parent / "docs" / "options.md"

INTRODUCTION = """\
# Options of the policy

Every option of RLinf's PI0.5 and PI0 (`actor.model.openpi`), with the values that make a difference. Supported means: validation
accepts it, and the tests named compare the engine with RLinf's own model class, both what it samples and what the actor finds
when it scores the sample again. Refused means: the run stops before anything starts, for the reason given.

This page is generated: `python -m tests.unit.validation.option_rows`. Tests lie below `tests/unit`.
"""

SAMPLED = "parity/test_rollout_parity.py::test_critic_after_the_vlm"
EXPERT = "parity/test_rollout_parity.py::test_critic_after_the_expert"
RESCORED = "parity/test_rescoring.py::test_get_log_prob_value"
REPLAYED = "rollout/test_policy.py::test_the_actor_finds_the_reported_log_probabilities_and_values"
UPDATED = "check/test_check.py::test_other_samplers_and_critics_pass"
DENSE = "actor/test_real_tokens.py::test_log_probs_and_values_equal_the_dense_actors"


@dataclass(frozen=True)
class Row:
    """One value of one or more options.

    Attributes:
        options: names below ``openpi``.
        value: as the page shows it.
        changes: of the full example.
        tests: that compare engine and actor with it; none where it is refused.
    """

    options: tuple[str, ...]
    value: str
    changes: dict[str, Any]
    tests: tuple[str, ...] = ()


def one(option: str, value: Any, *tests: str, **also: Any) -> Row:
    changes = {f"{OPENPI}.{option}": value, **{f"{OPENPI}.{name}": other for name, other in also.items()}}
    return Row((option,), f"`{show(value)}`", changes, tests)


def refused_configs(*names: str) -> list[Row]:
    return [one("config_name", name) for name in names]


ROWS = [
    # -- noise
    one("noise_method", "flow_sde", SAMPLED, RESCORED),
    Row(
        ("noise_method",),
        "`'flow_noise'`, with the noise head",
        LEARNED,
        (
            "parity/test_noise_methods.py::test_flow_noise",
            "parity/test_noise_methods.py::test_entropy_is_that_of_the_engines_noise",
            "parity/test_noise_methods.py::test_after_an_update_the_engine_equals_a_fresh_one",
            UPDATED,
        ),
    ),
    Row(("noise_method",), "`'flow_cps'`", CPS, ("parity/test_noise_methods.py::test_flow_cps", UPDATED)),
    one("noise_method", "flow_ode"),
    one("noise_level", 0.2, SAMPLED),
    one("noise_level", 0.0),
    Row(
        ("noise_anneal", "noise_params"),
        "`true`, `[start, end, steps]`",
        annealed(0.7, 0.3, 400),
        (
            "parity/test_noise_methods.py::test_annealed_noise_follows_the_global_step",
            "rollout/test_policy.py::test_annealed_noise_follows_the_step_that_rlinf_sets",
        ),
    ),
    Row(
        ("noise_logvar_range",),
        "`[0.05, 0.2]`",
        {**LEARNED, f"{OPENPI}.noise_logvar_range": [0.05, 0.2]},
        ("parity/test_noise_methods.py::test_after_an_update_the_engine_equals_a_fresh_one",),
    ),
    one("joint_logprob", True, SAMPLED, RESCORED, "actor/test_real_tokens.py::test_joint_log_probs"),
    one("ignore_last", True, SAMPLED, REPLAYED),
    Row(("num_steps",), "`1`, `3`, `10`", {f"{MODEL}.num_steps": 10}, (SAMPLED, RESCORED)),
    one("safe_get_logprob", True),
    one("double_layer", True),
    one("use_dsrl", True),
    one("is_nft", True),
    # -- critic
    Row(
        ("add_value_head",),
        "`false`, with GRPO",
        {
            f"{MODEL}.add_value_head": False,
            "algorithm.adv_type": "grpo",
            "algorithm.loss_type": "actor",
            "algorithm.group_size": 8,
        },
        ("rollout/test_policy.py::test_without_a_critic_no_value_is_computed_and_rlinf_asks_for_no_bootstrap",),
    ),
    one("value_after_vlm", True, SAMPLED, RESCORED),
    one(
        "value_after_vlm",
        False,
        EXPERT,
        "parity/test_rescoring.py::test_value_of_each_step_after_the_expert",
        "actor/test_real_tokens.py::test_value_after_the_expert",
        UPDATED,
    ),
    one("chunk_critic_input", True, EXPERT, UPDATED, value_after_vlm=False),
    one("detach_critic_input", True, UPDATED, value_after_vlm=False),
    *(one("value_vlm_mode", mode, SAMPLED, REPLAYED, DENSE) for mode in ("mean_token", "last_token", "first_token")),
    # -- inputs
    one("discrete_state_input", False, SAMPLED),
    one(
        "discrete_state_input",
        True,
        REPLAYED,
        "rollout/test_policy_input.py::test_both_ways_give_the_same_bits",
        UPDATED,
    ),
    one(
        "num_images_in_input",
        2,
        SAMPLED,
        "parity/test_rollout_parity.py::test_three_cameras_with_a_mask_equal_two_cameras",
    ),
    one("num_images_in_input", 1),
    one("num_images_in_input", 3),
    one("max_token_len", 48),
    # -- sizes
    Row(
        ("action_chunk", "action_env_dim"),
        "`num_action_chunks`, `7`",
        {f"{MODEL}.num_action_chunks": 10},
        (SAMPLED, REPLAYED, "parity/test_rescoring.py::test_default_forward"),
    ),
    one("action_horizon", 4),
    # -- model
    one("train_expert_only", False, RESCORED, "actor/test_real_tokens.py::test_choice_of_the_prefix"),
    one("paligemma_variant", "gemma_2b_lora"),
    one("action_expert_variant", "gemma_300m_lora"),
    one("pi05", False),
    one("config_name", "pi05_libero", SAMPLED, RESCORED, REPLAYED),
    one(
        "config_name",
        "pi0_libero",
        "parity/test_pi0.py::test_pi0",
        "parity/test_pi0.py::test_critic_after_the_expert",
        "parity/test_pi0.py::test_after_an_update_the_engine_equals_a_fresh_one",
        "rollout/test_policy.py::test_pi0_is_replayed_by_the_actor",
    ),
    *refused_configs(
        "pi05_maniskill",
        "pi05_maniskill_sim_real_co_training",
        "pi05_franka",
        "pi05_dualfranka_tcp_rot6d",
        "pi05_metaworld",
        "pi05_calvin",
        "pi05_aloha_robotwin",
        "pi05_behavior",
        "pi05_gsenv",
        "pi05_isaaclab_stack_cube",
        "pi05_droid_polaris",
    ),
]

NOT_CHOSEN = {
    "action_dim": "the checkpoint's own size",
    "dtype": "RLinf's loader casts to bfloat16 with float32 islands whatever it says",
}
NOT_CHOSEN |= {
    f"dsrl_{name}": "belongs to `use_dsrl`"
    for name in (
        "action_noise_dim", "agg_q", "hidden_dims", "image_latent_dim", "num_q_heads", "state_dim", "state_latent_dim",
    )
}  # fmt: skip
"""Options without a row, and why."""


def judgement(entry: Row, config: MakeConfig) -> str:
    """``supported``, or the reason of the refusal; what validation says."""
    problems = find_problems(config(FULL, entry.changes), gpus=2, look_at_files=False)
    errors = [problem for problem in problems if problem.severity == "error"]
    if not errors:
        return "supported"
    return "refused: " + (errors[0].reason or f"allowed is {errors[0].allowed}")


def page(config: MakeConfig) -> str:
    """The whole page as Markdown."""
    lines = [INTRODUCTION, row("option", "value", "", "shown by"), "|---|---|---|---|"]
    for (options, verdict, tests), alike in groupby(
        ROWS, lambda entry: (entry.options, judgement(entry, config), entry.tests)
    ):
        names = ", ".join(f"`{name}`" for name in options)
        values = ", ".join(entry.value for entry in alike)
        lines.append(row(names, values, verdict, "<br>".join(f"`{test}`" for test in tests)))
    lines += ["\nWithout a choice here:\n", row("option", "why"), "|---|---|"]
    lines += [row(f"`{name}`", why) for name, why in NOT_CHOSEN.items()]
    lines.append(
        "\nThe engine alone takes one to three used cameras (`parity/test_rollout_parity.py::test_one_or_three_used_cameras`); LIBERO"
        "\nhas two."
    )
    return "\n".join(lines)


if __name__ == "__main__":
    write_page(PAGE, page)
