# SPDX-License-Identifier: Apache-2.0
"""The layout as TensorBoard finds it in an event file that RLinf's own logger wrote, and WandB without a network beside it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlinf_phyai.driver.tensorboard_layout import CHARTS, add_layout, layout
from rlinf_phyai.run_summary import KEY_METRICS, KEY_TIMERS


def metric_logger(folder: Path, *backends: str) -> Any:
    from rlinf.utils.metric_logger import MetricLogger

    options = {"log_path": str(folder), "project_name": "test", "experiment_name": "test"}
    return MetricLogger(OmegaConf.create({"runner": {"logger": {**options, "logger_backends": list(backends)}}}))


def test_the_event_file_holds_the_layout_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar import layout_pb2, metadata

    logger = metric_logger(tmp_path, "tensorboard")
    add_layout(logger)
    logger.log({"env/success_once": 0.5}, 0)
    logger.finish()
    (file,) = tmp_path.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file))
    events.Reload()
    (event,) = events.Tensors(metadata.CONFIG_SUMMARY_TAG)
    found = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    assert [category.title for category in found.category] == list(CHARTS)
    charts = {chart.title: list(chart.multiline.tag) for category in found.category for chart in category.chart}
    assert charts == {title: tags for charts in layout().values() for title, (_, tags) in charts.items()}


def test_patterns_mean_one_scalar_or_one_family() -> None:
    patterns = [tag for charts in layout().values() for _, tags in charts.values() for tag in tags]
    assert len(patterns) == len(set(patterns))

    def hits(tag: str) -> int:
        return sum(re.search(pattern, tag) is not None for pattern in patterns)

    assert [tag for tag in (*KEY_METRICS, *KEY_TIMERS) if hits(tag) != 1] == []
    assert hits("train/actor/rollout_train_kl/step_2") == 1
    assert hits("train/actor/rollout_train_mean_shift/dim_6") == 1
    assert hits("train/actor/importance_sampling_weight_maximum") == 0
    assert hits("other/env/return") == 0


def test_without_tensorboard_there_is_nothing_to_do(tmp_path: Path) -> None:
    logger = metric_logger(tmp_path)
    add_layout(logger)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_wandb_offline_holds_what_tensorboard_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RLinf logs a step in four calls; none of them may push out the others."""
    from rlinf_phyai.run_summary import read_scalars
    from tests.wandb_files import wandb_history

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = metric_logger(tmp_path, "tensorboard", "wandb")
    for step in range(2):
        for metrics in ({"env/success_once": 0.5}, {"time/step": 3.0}, dict.fromkeys(KEY_METRICS, step + 0.25)):
            logger.log(metrics, step)
    logger.finish()
    history, scalars = wandb_history(tmp_path), read_scalars(tmp_path)
    assert set(KEY_METRICS) <= set(scalars)
    assert {tag: history[tag][-1] for tag in scalars} == {tag: series[-1][1] for tag, series in scalars.items()}


@pytest.mark.slow
def test_a_wandb_file_that_is_not_whole_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, without its last record, with half of a record, and with the header alone."""
    from tests.wandb_files import wandb_history

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = metric_logger(tmp_path, "wandb")
    logger.log({"env/success_once": 0.5}, 0)
    logger.finish()
    assert wandb_history(tmp_path)["env/success_once"] == [0.5]
    (file,) = tmp_path.rglob("run-*.wandb")
    size = file.stat().st_size
    for left in (size - 1, size // 2, 7):
        with file.open("r+b") as stream:
            stream.truncate(left)
        with pytest.raises(TimeoutError, match=r"no exit record after 0\.1 s"):
            wandb_history(tmp_path, limit_s=0.1)
