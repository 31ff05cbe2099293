# SPDX-License-Identifier: Apache-2.0
"""Every shipped example composes, passes validation, and has a tiny form that runs on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from rlinf_phyai.models.pi05.stated_sizes import TINY_SIZES
from rlinf_phyai.models.pi05.tiny import make_tiny_checkpoint
from rlinf_phyai.validation import find_problems

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "embodiment" / "config"
NAMES = sorted(file.stem for file in EXAMPLES.glob("*.yaml"))
# Environment steps of an episode, executed actions per prediction and denoise steps, as in RLinf's PI0.5 recipes.
SUITES = {"spatial": (240, 5, 3), "object": (240, 5, 3), "goal": (320, 5, 5), "10": (480, 10, 5)}
RECIPES = {f"libero_{suite}_{alg}_openpi_pi05_phyai": (suite, alg) for suite in SUITES for alg in ("ppo", "grpo")}
# Two environments in one group; two chunks a step.
TINY = ("+size=tiny", "env.train.max_steps_per_rollout_epoch=20", "env.train.max_episode_steps=20")


PI0 = "libero_spatial_ppo_openpi_pi0_phyai"


@pytest.fixture(scope="module")
def tiny_pi0(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = TINY_SIZES["pi0"]
    return make_tiny_checkpoint(tmp_path_factory.mktemp("pi0"), config=config)


def composed(name: str, *overrides: str) -> DictConfig:
    with initialize_config_dir(str(EXAMPLES), version_base=None):
        return compose(name, list(overrides))


def test_every_suite_with_every_algorithm() -> None:
    base = "libero_spatial_ppo_openpi_pi05_phyai"
    assert set(NAMES) == {*RECIPES, PI0, f"{base}_tiny", f"{base}_quickstart", f"{base}_flow_noise"}


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("_tiny")])
@pytest.mark.parametrize("gpus", [1, 4])
def test_example_is_valid(name: str, gpus: int, tiny_checkpoint: Path, tiny_pi0: Path) -> None:
    checkpoint = tiny_pi0 if name == PI0 else tiny_checkpoint
    cfg = composed(name, f"actor.model.model_path={checkpoint}", "rollout.phyai.kernel_policy=torch_reference")
    assert [str(problem) for problem in find_problems(cfg, gpus=gpus)] == []
    assert cfg.runner.logger.experiment_name == name
    assert cfg.runner.logger.log_path.endswith(name)
    assert cfg.env.eval.task_suite_name == cfg.env.train.task_suite_name


@pytest.mark.parametrize("name", RECIPES)
def test_recipe(name: str) -> None:
    suite, algorithm = RECIPES[name]
    steps, chunk, denoise = SUITES[suite]
    cfg = composed(name)
    for env in (cfg.env.train, cfg.env.eval):
        assert (env.task_suite_name, env.max_episode_steps) == (f"libero_{suite}", steps)
        assert env.max_steps_per_rollout_epoch == steps
    assert (cfg.actor.model.num_action_chunks, cfg.actor.model.num_steps) == (chunk, denoise)
    assert cfg.env.train.group_size == (8 if algorithm == "grpo" else 1)
    assert cfg.actor.model.openpi.add_value_head == (algorithm == "ppo")


@pytest.mark.parametrize("name", RECIPES)
def test_tiny_form(name: str, tiny_checkpoint: Path) -> None:
    group = 2 if RECIPES[name][1] == "grpo" else 1
    cfg = composed(name, *TINY, f"algorithm.group_size={group}", f"actor.model.model_path={tiny_checkpoint}")
    assert [str(problem) for problem in find_problems(cfg, gpus=0)] == []
    assert cfg.env.train.task_suite_name == f"libero_{RECIPES[name][0]}"
    assert cfg.actor.micro_batch_size == 2
