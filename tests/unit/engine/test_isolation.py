# SPDX-License-Identifier: Apache-2.0
"""The engine alone: in a process where rlinf, openpi and transformers cannot be imported it computes the same numbers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from rlinf_phyai.engine import Engine

from .conftest import assert_same_bits, rollout_request, rollout_tensors, step_request

BLOCKED = ("rlinf", "openpi", "openpi_client", "transformers", "ray", "jax", "flax", "libero")

PROGRAM = """
import importlib.abc, sys

blocked, checkpoint, requests, results = sys.argv[1].split(","), *sys.argv[2:5]


class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ImportError(f"{name} is blocked in this process")


sys.meta_path.insert(0, Refuse())
for name in blocked:
    try:
        __import__(name)
    except ImportError:
        continue
    raise SystemExit(f"{name} could be imported: the block does not work")

import torch
from rlinf_phyai.engine import DeviceConfig, Engine, EngineArgs, EngineConfig, RuntimeConfig
from rlinf_phyai.models.pi05 import PI05Args, PI05Request, PI05RolloutRequest

torch.set_num_threads(1)
given = torch.load(requests, weights_only=True)
engine = Engine(
    EngineArgs(
        plugin="pi05",
        plugin_args=PI05Args(checkpoint_dir=checkpoint, max_batch_size=4, num_steps=3),
        config=EngineConfig(DeviceConfig("cpu", torch.float32), RuntimeConfig(progress=False)),
    )
)
output = engine.rollout_step(PI05RolloutRequest(**given["rollout"]))
found = {name: getattr(output, name) for name in ("actions", "chains", "log_probs", "values")}
found["step"] = engine.step(PI05Request(**given["step"]))
with engine.weight_update(version=1) as update:
    update({"action_out_proj.bias": engine.state_dict()["action_out_proj.bias"] + 1})
found["updated"] = engine.step(PI05Request(**given["step"]))
engine.close()
leaked = sorted({name.split(".")[0] for name in sys.modules} & set(blocked))
assert not leaked, leaked
torch.save(found, results)
"""


def tensors_of(request: object) -> dict[str, object]:
    return {name: value for name, value in vars(request).items() if isinstance(value, torch.Tensor)}


def test_same_numbers_without_rlinf_openpi_and_transformers(
    checkpoint: Path, make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    rollout, step = rollout_request(batch=3), step_request(batch=4)
    torch.save({"rollout": tensors_of(rollout), "step": tensors_of(step)}, tmp_path / "requests.pt")
    arguments = [",".join(BLOCKED), str(checkpoint), str(tmp_path / "requests.pt"), str(tmp_path / "results.pt")]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "results.pt", weights_only=True)

    engine = make_engine()
    expected = rollout_tensors(engine, rollout) | {"step": engine.step(step)}
    with engine.weight_update() as update:
        update({"action_out_proj.bias": engine.state_dict()["action_out_proj.bias"] + 1})
    assert_same_bits(found, expected | {"updated": engine.step(step)})
