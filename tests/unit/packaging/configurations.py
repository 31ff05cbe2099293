# SPDX-License-Identifier: Apache-2.0
"""Writes ``docs/configurations.md``, what has been run of each example: ``python -m tests.unit.packaging.configurations``."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from tests.integration import test_examples, test_flow_noise, test_training
from tests.integration.conftest import TINY
from tests.unit.validation.page import row

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples" / "embodiment" / "config"
PAGE = ROOT / "docs" / "configurations.md"
SPATIAL_PPO = TINY.removesuffix("_tiny")

INTRODUCTION = """\
# Configurations

Every file of `examples/embodiment/config`, its sizes as composed, and the tests that show how far it has been taken:

- **checked**: `unit/packaging/test_examples.py` composes each of them and finds nothing to refuse, for one GPU and for four; the tiny
  one, which has no GPU, is checked in `unit/validation/test_valid.py`.
- **real steps**: the training program with Ray, LIBERO's own tasks of that suite and a tiny random model on a CPU (`+size=tiny`):
  the correction finds nothing to correct, and the weights that should learn move.
- **against RLinf's model**: in the same run, the log-probabilities that the engine reported are those that RLinf's own model class
  computes from the recorded data, to 1e-5.

*Every change* means that `bash tests/run.sh` runs the test, *long* that only `bash tests/run.sh --long` does. A tiny random model
solves nothing: these runs show that a configuration works, not that it learns its task. Full-size figures are in
[performance.md](performance.md), single options in [options.md](options.md), what a start refuses and why in [refusals.md](refusals.md).

This page is generated: `python -m tests.unit.packaging.configurations`. Tests lie below `tests`.
"""


@dataclass(frozen=True)
class Shown:
    """The tests of one example.

    Attributes:
        steps: number of training steps.
        run: of the run.
        scored: that compares it with RLinf's model.
        in_ci: both run on every change.
    """

    steps: int
    run: str
    scored: str
    in_ci: bool


def shown() -> dict[str, Shown]:
    """Example's name -> its tests."""
    file, function = "integration/test_examples.py", test_examples.test_one_training_step.__name__
    single = {
        one.config: Shown(1, name := f"{file}::{function}[{one.config}]", name, in_ci=False)
        for one in test_examples.EXAMPLES
    }
    main = Shown(
        2,
        "integration/test_training.py::test_metrics_of_an_exact_rollout",
        "integration/test_training.py::test_recorded_trajectories_replay_in_rlinfs_model",
        in_ci=True,
    )
    noise_run = "integration/test_flow_noise.py::test_learned_noise_is_trained_synced_and_scored_alike"
    noise = Shown(2, noise_run, noise_run, in_ci=False)
    long = Shown(
        1,
        "integration/test_training.py::test_bootstrapped_rewards",
        "integration/test_training.py::test_long_tasks_are_scored_as_by_rlinfs_model",
        in_ci=True,
    )
    others = {TINY: main, SPATIAL_PPO: main, test_training.LONG_PPO: long, test_flow_noise.CONFIG: noise}
    return {**single, **others}


def names() -> list[str]:
    """The shipped examples."""
    return sorted(file.stem for file in EXAMPLES.glob("*.yaml"))


def page() -> str:
    """The whole page as Markdown."""
    return "\n".join([INTRODUCTION, *_sizes(), "", *_tests()]) + "\n"


def _sizes() -> Iterator[str]:
    yield row(
        "example", "suite", "algorithm", "model", "noise", "environments x epochs", "chunk", "denoise steps", "episode"
    )
    yield "|---|---|---|---|---|---:|---:|---:|---:|"
    with initialize_config_dir(str(EXAMPLES), version_base=None):
        for name in names():
            yield row(_link(name), *_cells(compose(name)))


def _cells(cfg: DictConfig) -> Iterator[str]:
    model, train = cfg.actor.model, cfg.env.train
    yield train.task_suite_name
    yield {"gae": "PPO", "grpo": f"GRPO, groups of {cfg.algorithm.group_size}"}[cfg.algorithm.adv_type]
    yield {"pi05_libero": "PI0.5", "pi0_libero": "PI0"}[model.openpi.config_name]
    yield model.openpi.noise_method.replace("_", "-")
    yield f"{train.total_num_envs} x {train.rollout_epoch}"
    yield str(model.num_action_chunks)
    yield str(model.num_steps)
    yield str(train.max_episode_steps)


def _tests() -> Iterator[str]:
    yield row("example", "real steps", "when", "run", "against RLinf's model")
    yield "|---|---:|---|---|---|"
    tests = shown()
    for name in names():
        one = tests[name]
        when = "every change" if one.in_ci else "long"
        yield row(
            f"`{name}`",
            str(one.steps),
            when,
            f"`{one.run}`",
            "the same" if one.scored == one.run else f"`{one.scored}`",
        )


def _link(name: str) -> str:
    return f"[`{name}`](../{(EXAMPLES / f'{name}.yaml').relative_to(ROOT)})"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
