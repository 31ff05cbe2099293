# SPDX-License-Identifier: Apache-2.0
"""Refusals: the engine's options."""

from tests.unit.validation.case import ENGINE, GRPO, NO_CORRECTION, OPENPI, Case, change_one
from tests.unit.validation.conftest import REMOVED, TINY

ENGINE_ERRORS = [
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
    Case(
        "stall_timeout",  # of the default
        f"{ENGINE}.stall_timeout",
        {f"{ENGINE}.simulator_timeout": 7200, f"{ENGINE}.stall_timeout": REMOVED},
        ("is 3600", "more than rollout.phyai.simulator_timeout (7200)"),
    ),
    Case(
        "stall_timeout",  # than the default
        f"{ENGINE}.stall_timeout",
        {f"{ENGINE}.stall_timeout": 300, f"{ENGINE}.simulator_timeout": REMOVED},
        ("is 300", "more than rollout.phyai.simulator_timeout (600)"),
    ),
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
    *(
        change_one("actor_prefix_cache", f"{ENGINE}.actor_prefix_cache_gib", value, "at least 0, at most 1000000")
        for value in (-1, 1e12, float("inf"), float("nan"), True, "4")
    ),
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
