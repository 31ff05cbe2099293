# SPDX-License-Identifier: Apache-2.0
"""Every refusal and every warning: what triggers it, and what its message says.

A case changes a valid example config. The test demands exactly the listed reports: a case that sets off another check, or
none, fails.
"""

from collections.abc import Callable
from typing import Any

import pytest

from rlinf_phyai.validation import ANY_BACKEND, FILES, PHYAI_ONLY, ConfigError, find_problems, validate_config
from rlinf_phyai.validation.options import UNSUPPORTED
from tests.unit.validation.case import ENGINE, MODEL, ONLY_EVALUATION, OPENPI, Case
from tests.unit.validation.cases import ERRORS, WARNINGS
from tests.unit.validation.conftest import FULL, REMOVED, MakeConfig, change


@pytest.mark.parametrize("case", ERRORS, ids=lambda case: case.id)
def test_error(case: Case, config: MakeConfig) -> None:
    cfg = config(case.base, case.changes)
    problems = [p for p in find_problems(cfg, gpus=case.gpus) if p.severity == "error"]
    assert sorted(p.check for p in problems) == sorted((case.check, *case.also))
    problem = next(p for p in problems if p.check == case.check)
    assert problem.key == case.key
    with pytest.raises(ConfigError) as raised:
        validate_config(cfg, gpus=case.gpus)
    assert problem in raised.value.problems
    for word in case.words:
        assert word in str(problem)


@pytest.mark.parametrize("case", WARNINGS, ids=lambda case: case.id)
def test_warning(case: Case, config: MakeConfig) -> None:
    cfg = config(case.base, case.changes)
    problems = find_problems(cfg, gpus=case.gpus)
    assert [(p.check, p.key, p.severity) for p in problems] == [(case.check, case.key, "warning")]
    (text,) = validate_config(cfg, gpus=case.gpus)
    for word in (case.key, *case.words):
        assert word in text


def test_joint_logprob_takes_the_last_step_too(config: MakeConfig) -> None:
    cfg = config(FULL, {f"{OPENPI}.joint_logprob": True, f"{OPENPI}.ignore_last": True})
    assert [p.key for p in find_problems(cfg, gpus=2)] == [f"{OPENPI}.joint_logprob", f"{OPENPI}.ignore_last"]


def _neutral_and_other(option: Any) -> tuple[Any, Any]:
    return (True, False) if option.allowed == (True,) else (None, True)


@pytest.mark.parametrize("option", UNSUPPORTED, ids=lambda option: option.key)
def test_unsupported_option(option: Any, config: MakeConfig) -> None:
    key = option.key.format(model=MODEL, section="train")
    neutral, other = _neutral_and_other(option)
    assert find_problems(config(FULL, {key: neutral}), gpus=2) == []
    assert find_problems(config(FULL, {key: REMOVED} if _exists(config, key) else {}), gpus=2) == []
    (problem,) = find_problems(config(FULL, {key: other}), gpus=2)
    assert (problem.check, problem.key, problem.severity) == ("unsupported_options", key, "error")
    assert option.reason in str(problem)
    assert f"set {key}: " in str(problem)


def _exists(config: MakeConfig, key: str) -> bool:
    section = config()
    for name in key.split("."):
        if name not in section:
            return False
        section = section[name]
    return True


@pytest.mark.parametrize(
    "option", [option for option in UNSUPPORTED if option.training_only], ids=lambda option: option.key
)
def test_evaluation_may_set_options_of_training(option: Any, config: MakeConfig) -> None:
    key = option.key.format(model=MODEL, section="eval")
    cfg = config(FULL, {**ONLY_EVALUATION, key: _neutral_and_other(option)[1]})
    assert find_problems(cfg, gpus=2) == []


def test_unsupported_section_is_described(config: MakeConfig) -> None:
    (problem,) = find_problems(config(FULL, {"rollout.expert_model": {"model_path": "/x", "precision": None}}), gpus=2)
    assert "a section with model_path, precision" in str(problem)
    assert find_problems(config(FULL, {"algorithm.dagger": {}}), gpus=2) == []


def test_all_problems_come_at_once(config: MakeConfig) -> None:
    changes = {
        "algorithm.recompute_logprobs": False,
        "algorithm.importance_sampling_clip": -1,
        f"{OPENPI}.noise_method": "flow_ode",
        f"{MODEL}.gradient_checkpointing": True,
        "env.train.total_num_envs": 63,
        "actor.global_batch_size": 100,
        f"{ENGINE}.kernel_plicy": "x",
        "runner.ckpt_path": "/no/weights.pt",
    }
    with pytest.raises(ConfigError) as raised:
        validate_config(config(FULL, changes), gpus=2)
    keys = [problem.key for problem in raised.value.problems]
    expected = {
        "algorithm.importance_sampling_fix",
        "algorithm.importance_sampling_clip",
        f"{OPENPI}.noise_method",
        f"{MODEL}.gradient_checkpointing",
        "env.train.total_num_envs",
        "actor.global_batch_size",
        f"{ENGINE}.kernel_plicy",
        "runner.ckpt_path",
    }
    assert set(keys) == expected
    assert len(keys) == len(expected)
    text = str(raised.value)
    assert text.startswith("the config has 8 problems; nothing was started.")
    for number, key in enumerate(keys, 1):
        assert f"\n{number}. {key}\n     found:   " in text
    assert text.count("     allowed: ") == text.count("     change:  ") == 8


def test_every_check_is_tested(request: pytest.FixtureRequest) -> None:
    """The tables here and the tests of files reach every registered check."""
    from tests.unit.validation import test_files

    tested = {case.check for case in ERRORS + WARNINGS} | set(test_files.CHECKS_TESTED) | {"unsupported_options"}
    registered: tuple[Callable[..., Any], ...] = ANY_BACKEND + PHYAI_ONLY + FILES
    assert {check.__name__ for check in registered} - tested == set()


def test_a_missing_section_is_reported_once(config: MakeConfig) -> None:
    cfg = config()
    change(cfg, {"actor.fsdp_config": REMOVED})
    keys = [p.key for p in find_problems(cfg, gpus=2)]
    assert keys == ["actor.fsdp_config"]
