# SPDX-License-Identifier: Apache-2.0
"""The end-to-end benchmark without a run: accounting, sizes, merging, and a run that ends before it begins."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import end_to_end
from benchmarks.training_run import TrainingRun

TINY = "libero_spatial_ppo_openpi_pi05_phyai_tiny"


def arguments(monkeypatch: pytest.MonkeyPatch, *given: str) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["end_to_end", *given])
    return end_to_end.parse()


def scalars(**seconds: list[float]) -> dict[str, Any]:
    tags = {
        "step": "time/step",
        "generate": "time/generate_rollouts",
        "reset": "time/env/env/bootstrap_step",
        "simulate": "time/env/env_interact_step",
        "predict": "time/rollout/predict",
        "advantages": "time/cal_adv_and_returns",
        "rescore": "time/actor/actor/recompute_logprobs",
        "training": "time/actor/run_training",
        "sync": "time/sync_weights",
    }
    return {tags[name]: list(enumerate(values)) for name, values in seconds.items()}


def test_parts_add_up_to_the_step() -> None:
    (parts,) = end_to_end.step_parts(
        scalars(
            step=[50.0], generate=[40.0], reset=[26.0], simulate=[7.0], predict=[5.0], advantages=[2.0], rescore=[1.5],
            training=[5.0], sync=[2.5],
        ),
        overlap=False,
    )  # fmt: skip
    assert list(parts) == [*end_to_end.PARTS, "total"]
    assert parts["environment reset"] == 26.0
    # 2 s of the rollout and 0.5 s of the advantages belong to nobody, and half a second passes between the phases
    assert parts["other"] == pytest.approx(2.0 + 0.5 + 0.5)
    assert sum(parts[name] for name in end_to_end.PARTS) == pytest.approx(parts["total"])


def test_an_overlapped_reset_counts_as_far_as_the_step_waits_for_it() -> None:
    """Step 0 resets in its rollout (26 s) and again beside training; step 1, the last, resets nothing."""
    first, last = end_to_end.step_parts(
        scalars(
            step=[70.0, 20.0], generate=[38.0, 12.0], reset=[52.0], simulate=[7.0, 7.0], predict=[5.0, 5.0],
            advantages=[1.0, 1.0], rescore=[1.0, 1.0], training=[5.0, 5.0], sync=[2.0, 2.0],
        ),
        overlap=True,
    )  # fmt: skip
    # 26 s of the rollout, and 29 - 5 s after training
    assert first["environment reset"] == pytest.approx(26.0 + 24.0)
    assert last["environment reset"] == pytest.approx(0.0)
    for parts in (first, last):
        assert sum(parts[name] for name in end_to_end.PARTS) == pytest.approx(parts["total"])


def test_overrides_make_a_valid_config(monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path) -> None:
    from hydra import compose, initialize_config_dir

    from benchmarks.training_run import CONFIG_DIR
    from rlinf_phyai.validation import validate_config

    args = arguments(monkeypatch, "--checkpoint", str(tiny_checkpoint), "--config", TINY, "--", "actor.optim.lr=0")
    sizes = end_to_end.shapes(args)
    assert (sizes["samples_per_step"], sizes["global_batch"], sizes["micro_batch"]) == (192, 192, 96)
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        cfg = compose(TINY, end_to_end.overrides(args, sizes))
    validate_config(cfg, gpus=0)
    assert cfg.env.train.total_num_envs == 16
    assert cfg.env.train.max_steps_per_rollout_epoch == 60
    assert cfg.actor.optim.lr == 0


def test_projection_to_the_recipe() -> None:
    recipe = end_to_end.recipe_sizes(end_to_end.CONFIG)
    assert recipe == {"environments": 64, "episodes": 512, "samples": 24576}
    mean = dict.fromkeys(end_to_end.PARTS, 1.0)
    sizes = {"samples_per_step": 192, "environments": 16, "rollout_epochs": 1}
    found = end_to_end.projection(mean, sizes, recipe)
    assert (found["environment reset"], found["predict"], found["sync"]) == (32.0, 128.0, 1.0)
    assert found["total"] == 32.0 + 5 * 128.0 + 1.0


def test_batches_that_do_not_divide_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(monkeypatch, "--checkpoint", ".", "--envs", "4", "--chunk-steps", "3", "--global-batch", "8")
    with pytest.raises(ValueError, match="12 samples a step, global batch 8"):
        end_to_end.shapes(args)


def test_merge(tmp_path: Path) -> None:
    def write(name: str, environments: int, *backends: str) -> Path:
        runs = [{"backend": backend, "from": name} for backend in backends]
        content = {"machine": {"gpu": "H"}, "shapes": {"environments": environments}, "runs": runs}
        (tmp_path / name).write_text(json.dumps(content))
        return tmp_path / name

    a, b, other = write("a", 16, "phyai", "huggingface"), write("b", 16, "huggingface"), write("other", 8, "phyai")
    merged = end_to_end.merge([a, b])
    assert [(run["backend"], run["from"]) for run in merged["runs"]] == [("phyai", "a"), ("huggingface", "b")]
    with pytest.raises(ValueError, match="other shapes"):
        end_to_end.merge([a, other])


def test_a_run_that_is_refused_says_why(
    monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole benchmark with the real program: what it said is in the record, and no time was measured."""
    given = ["--checkpoint", str(tiny_checkpoint), "--config", TINY, "--backends", "phyai"]
    folders = ["--out", str(tmp_path / "result.json"), "--logs", str(tmp_path / "logs")]
    monkeypatch.setattr(sys, "argv", ["end_to_end", *given, *folders, "--", "algorithm.recompute_logprobs=False"])
    with pytest.raises(SystemExit) as stopped:
        end_to_end.main()
    assert stopped.value.code == 1
    result = json.loads((tmp_path / "result.json").read_text())
    (record,) = result["runs"]
    assert (record["backend"], record["status"], record["exit_code"]) == ("phyai", "failed", 1)
    assert [record[name] for name in ("steps", "mean", "milestones")] == [[], {}, {}]
    assert any("algorithm.importance_sampling_fix" in line for line in record["last_lines"])
    assert "algorithm.importance_sampling_fix" in capsys.readouterr().out


def test_tables_and_picture_of_merged_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From runs as they are read back to everything that the benchmark shows."""
    sizes = {"config": end_to_end.CONFIG, "samples_per_step": 192, "environments": 16, "rollout_epochs": 1}
    for backend, predict in (("phyai", 2.0), ("huggingface", 5.0)):
        seconds = scalars(
            step=[90.0, 37.0 + predict], generate=[80.0, 33.0 + predict], reset=[60.0, 26.0], simulate=[9.0, 7.0],
            predict=[8.0, predict], advantages=[0.0, 0.0], training=[5.0, 2.0], sync=[2.0, 2.0],
        )  # fmt: skip
        seconds["env/success_once"] = [(0, 0.0), (1, 0.25)]
        run = TrainingRun(backend, "ok", 0, 100.0, {"first_step": 60.0}, None, 80.5, seconds)
        result = {"machine": {"gpu": "H"}, "shapes": sizes, "runs": [end_to_end.summary(run, False)]}
        (tmp_path / f"{backend}.json").write_text(json.dumps(result))
    files = [str(tmp_path / f"{backend}.json") for backend in ("phyai", "huggingface")]
    monkeypatch.setattr(sys, "argv", ["end_to_end", "--merge", *files, "--out", str(tmp_path / "both.json")])
    end_to_end.main()
    shown = capsys.readouterr().out
    assert "phyai against stock: predict 2.50 times as fast" in shown
    assert "whole step 1.08 times as fast" in shown  # 42 s against 39 s, the first step left out
    assert "GPU memory peak 80.5 GiB" in shown
    assert "simulators 33.00 s (85%)" in shown
    assert f"{26 * 32 + 7 * 128 + 2 * 128 + 2 * 128 + 2:.0f} s = environment reset 832" in shown
    assert (tmp_path / "both.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads((tmp_path / "both.json").read_text())["machine"] == {"gpu": "H"}


@pytest.mark.parametrize(
    "given",
    [
        ("--envs", "0"),
        ("--chunk-steps", "-1"),
        ("--steps", "0"),
        ("--micro-batch", "0"),
        ("--timeout-s", "nan"),
        ("--gpus", "a,b"),
        ("--backends", "phyai,phyai"),
        ("--backends", ","),
    ],
)
def test_arguments_that_measure_nothing(
    given: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        arguments(monkeypatch, "--checkpoint", "anywhere", *given)
    assert f"{given[0]} is" in capsys.readouterr().err


def test_merging_what_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ValueError, match=r"other\.json is no result"):
        end_to_end.merge([tmp_path / "other.json"])
