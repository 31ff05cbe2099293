# SPDX-License-Identifier: Apache-2.0
"""R13: the single-device example, and the engine's stages that it measures."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf_phyai.engine import Engine, EngineClosedError, WeightUpdateError
from rlinf_phyai.kernels import torch_ops

from .conftest import Target, step_request

SCRIPT = Path(__file__).parents[3] / "examples" / "pi05" / "run_pi05.py"
QUICK = ["--warm-up", "1", "--repeats", "2", "--num-steps", "2"]


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_pi05", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_script_passes(checkpoint: Path, target: Target) -> None:
    arguments = ["--checkpoint", str(checkpoint), "--device", target.device, *QUICK]
    if target.device == "cuda" and not target.graphs:
        arguments.append("--no-cuda-graph")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "PASS"
    for size in (1, 4):
        assert f"max_batch_size {size}" in done.stdout
        assert f"latency in ms, batch {size} (1 warm-ups, 2 timed)" in done.stdout
    for column in ("mean", "median", "std", "min", "max"):
        assert len(re.findall(rf"\b{column}\b", done.stdout)) == 2
    for stage in ("step", "vision", "prefix", "denoise"):
        assert len(re.findall(rf"^\W*{stage}\W+\d", done.stdout, re.MULTILINE)) == 2, stage
    assert len(re.findall(r"largest difference .*: PASS", done.stdout)) == 2


def test_defaults_are_3_warm_ups_and_30_timed_calls() -> None:
    chosen = load_script().parse_arguments(["--checkpoint", "x"])
    assert (chosen.warm_up, chosen.repeats) == (3, 30)
    assert load_script().MAX_BATCH_SIZES == (1, 4)


def test_script_fails_when_a_sample_depends_on_its_batch(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Attention that sees the padding of shorter prompts: wrong in batches of different prompts only."""
    original = torch_ops.attention

    def unmasked(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
        return original(q, k, v, torch.full_like(lengths, k.shape[1]), scale)

    monkeypatch.setattr(torch_ops, "attention", unmasked)
    assert load_script().main(["--checkpoint", str(checkpoint), "--device", "cpu", *QUICK]) == 1
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == "FAIL"
    assert len(re.findall(r"largest difference .*: PASS", printed)) == 1  # a batch limit of 1 cannot show it
    assert len(re.findall(r"largest difference .*: FAIL", printed)) == 1


@pytest.mark.parametrize(
    "arguments", [["--checkpoint", "nowhere"], ["--kernel-policy", "fastest"], ["--num-steps", "0"]], ids=lambda a: a[0]
)
def test_script_reports_a_wrong_argument_in_one_line(
    arguments: list[str], checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--checkpoint", str(checkpoint), "--device", "cpu", *arguments]
    assert load_script().main(given) == 1
    printed = capsys.readouterr().out
    assert "Traceback" not in printed
    assert "Error" in printed
    assert printed.splitlines()[-1] == "FAIL"


def test_stages_give_the_actions_of_step(make_engine: Callable[..., Engine], target: Target) -> None:
    engine = make_engine(target=target)
    request = step_request(batch=3)
    expected = engine.step(request)
    stages = engine.stages(request)
    assert list(stages) == ["vision", "prefix", "denoise"]
    found: dict[str, Any] = {}
    for _ in range(2):
        found = {name: call() for name, call in stages.items()}
    assert torch.equal(found["denoise"], expected)
    assert torch.equal(engine.step(request), expected)


def test_stages_obey_the_life_cycle(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    stages = engine.stages(step_request())
    engine.begin_weight_update()
    with pytest.raises(WeightUpdateError, match="in progress"):
        stages["vision"]()
    engine.close()
    with pytest.raises(EngineClosedError):
        stages["denoise"]()
