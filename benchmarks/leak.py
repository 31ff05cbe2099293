# SPDX-License-Identifier: Apache-2.0
"""Does memory stay flat? Predictions and weight syncs by the thousand, or the processes of a real training run.

    python -m benchmarks.leak cycles --checkpoint DIR     # 2,040 cycles in this process
    python -m benchmarks.leak training --checkpoint DIR   # ten real steps: Ray, LIBERO, every worker's memory
    python -m benchmarks.leak plot

A cycle is one weight sync through RLinf's own bucket syncer and one prediction, with a batch size and prompts that
change every time. Caches are bounded and overfilled before the first sample, so nothing has a reason to grow. Both results
go to ``benchmarks/results/leak.json``, a JSON object with the keys ``cycles`` and ``training``.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from benchmarks.common import RESULTS, machine

CONFIGS = Path(__file__).resolve().parent.parent / "examples" / "embodiment" / "config"
TINY = "libero_spatial_ppo_openpi_pi05_phyai_tiny"
RESULT = RESULTS / "leak.json"
PLOT = Path("docs/images/memory.png")
LARGEST_BATCH = 6  # above the engine's 4: split
LENGTHS = 17  # of prompts
PERIOD = LARGEST_BATCH * LENGTHS
"""Cycles after which the same batch sizes and prompt lengths come again: samples one period apart hold the same buffers."""
PROMPT_CACHE = 1024  # sentences that the tokenizer keeps


@dataclass(frozen=True)
class Sample:
    """Memory after ``cycle`` cycles.

    Attributes:
        rss: resident bytes; moves with what the allocator keeps and the kernel takes back.
        heap: bytes that were allocated and not freed, in native code and by torch on the CPU.
        cuda: bytes of tensors on the GPU.
        tensors, objects: live tensors, and all objects that gc tracks.
    """

    cycle: int
    rss: int
    heap: int
    cuda: int
    tensors: int
    objects: int


class _MallInfo2(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


def heap_in_use() -> int:
    """Bytes that the C library has given out, in arenas and as mappings of their own."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _MallInfo2
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def sample(cycle: int) -> Sample:
    gc.collect()
    objects = gc.get_objects()
    tensors = sum(issubclass(type(one), torch.Tensor) for one in objects)
    cuda = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    return Sample(cycle, psutil.Process().memory_info().rss, heap_in_use(), cuda, tensors, len(objects))


def slope(samples: list[Sample], field: str) -> float:
    """Least-squares growth of a field per cycle."""
    return float(np.polyfit([s.cycle for s in samples], [getattr(s, field) for s in samples], 1)[0])


def load_config(checkpoint: Path, *overrides: str, config: str = TINY) -> DictConfig:
    """The example config as the launcher would compose it."""
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose(config, [f"actor.model.model_path={checkpoint}", *overrides])


class Cycles:
    """A real policy and RLinf's sender and receiver of weights, in one process.

    Args:
        checkpoint: of the tiny model.
        device: of engine and sender.
    """

    def __init__(self, checkpoint: Path, device: str = "cpu") -> None:
        from rlinf.hybrid_engines.weight_syncer.bucket_syncer import BucketWeightSyncer
        from rlinf.models import get_model
        from rlinf.utils.utils import collect_param_names_need_sync

        from rlinf_phyai import plugin
        from rlinf_phyai.rollout.build import build_policy

        plugin.register()
        os.environ.setdefault("OPENPI_DATA_HOME", str(checkpoint))
        cfg = load_config(checkpoint)
        actor = get_model(cfg.actor.model).to(device)
        self._state = {name: tensor.detach() for name, tensor in actor.state_dict().items()}
        self._names = list(collect_param_names_need_sync(actor))
        self._sender, self._receiver = (
            BucketWeightSyncer(bucket_size=2**20, bucket_dtype=None, bucket_device=device, load_instant=True)
            for _ in range(2)
        )
        self.policy = build_policy(cfg, cfg.actor.model, device, 0, 4)
        generator = torch.Generator().manual_seed(0)
        self._images = torch.randint(0, 256, (2, LARGEST_BATCH, 256, 256, 3), generator=generator, dtype=torch.uint8)
        self._states = torch.randn(LARGEST_BATCH, 8, generator=generator)
        self._numbers = itertools.count()
        self._sentences = (f"put the {'very ' * (n % LENGTHS)}old cup {n} into the drawer" for n in itertools.count())

    def fill_caches(self) -> None:
        """More shapes (batch size, prompt length) and more prompts than are kept: from here on, old ones are dropped."""
        for _ in range(2 * PERIOD):
            self.run()
        tokenizer = self.policy.transforms.processor.tokenizer  # type: ignore[attr-defined]
        tokenizer([next(self._sentences) for _ in range(PROMPT_CACHE + 1)])

    def run(self) -> dict[str, Any]:
        """One cycle; returns what the rollout worker would send on."""
        number = next(self._numbers)
        asyncio.run(self._sync(number))
        batch = 1 + number % LARGEST_BATCH
        observation = {
            "main_images": self._images[0, :batch],
            "wrist_images": self._images[1, :batch],
            "extra_view_images": None,
            "states": self._states[:batch],
            "task_descriptions": [next(self._sentences) for _ in range(batch)],
        }
        self.policy.set_global_step(number)
        return self.policy.predict_action_batch(observation, mode="train")[1]

    async def _sync(self, version: int) -> None:
        wire: asyncio.Queue[Any] = asyncio.Queue()
        if not self._sender.sender_initialized():
            await self._sender.init_sender(self._state, self._names, wire.put)
        await self._sender.sync(self._state, wire.put, version)
        with self.policy.weight_session() as session:
            if not self._receiver.receiver_initialized():
                await self._receiver.init_receiver(state_dict=self.policy.state_dict(), recv=wire.get, send=wire.put)
            session.version = await self._receiver.apply(self.policy, wire.get)


def measure_cycles(
    cycles: Cycles, count: int, every: int = PERIOD, seen: Callable[[dict[str, Any]], object] = lambda result: None
) -> list[Sample]:
    """``count`` cycles, one sample each ``every``. Call ``fill_caches`` before.

    Args:
        seen: is given what every prediction returns.
    """
    samples = [sample(0)]
    for number in range(1, count + 1):
        seen(cycles.run())
        if number % every == 0:
            samples.append(sample(number))
    return samples


def measure_training(checkpoint: Path, steps: int, log_path: Path) -> list[dict[str, float]]:
    """Resident MB of every kind of process after each step of a real run; simulators are counted together."""
    import ray

    from rlinf_phyai.driver.runner import PhyaiRunner
    from rlinf_phyai.train import train

    rows: list[dict[str, float]] = []

    class WatchingRunner(PhyaiRunner):
        def _maybe_eval_and_checkpoint(self, step: int) -> dict[str, Any]:  # RLinf calls it at the end of a step
            pids = {
                name: ray.get(group.worker_info_list[0].worker.__ray_call__.remote(_pid))
                for name, group in (("rollout", self.rollout), ("env", self.env), ("actor", self.actor))
            }
            processes = {"driver": psutil.Process(), **{name: psutil.Process(pid) for name, pid in pids.items()}}
            row = {name: process.memory_info().rss / 1e6 for name, process in processes.items()}
            simulators = psutil.Process(pids["env"]).children(recursive=True)
            row["simulators"] = sum(process.memory_info().rss for process in simulators) / 1e6
            rows.append({"step": self.global_step, **row})
            return super()._maybe_eval_and_checkpoint(step)

    overrides = (
        f"runner.max_epochs={steps}",
        "env.train.max_steps_per_rollout_epoch=5",
        "env.train.max_episode_steps=5",
    )
    train(
        load_config(checkpoint, *overrides, "actor.global_batch_size=2", f"runner.logger.log_path={log_path}"),
        WatchingRunner,
    )
    return rows


def _pid(worker: object) -> int:
    return os.getpid()


def show_cycles(samples: list[Sample]) -> None:
    table = Table(title="one weight sync and one prediction per cycle")
    for column in ("cycle", "RSS MB", "heap MB", "GPU MB", "tensors", "gc objects"):
        table.add_column(column, justify="right")
    for s in samples:
        table.add_row(
            str(s.cycle),
            f"{s.rss / 1e6:.1f}",
            f"{s.heap / 1e6:.2f}",
            f"{s.cuda / 1e6:.1f}",
            str(s.tensors),
            str(s.objects),
        )
    console = Console(width=100)
    console.print(table)
    heap = slope(samples, "heap")
    console.print(f"per cycle: {heap / 1024:+.3f} KiB heap, {slope(samples, 'tensors'):+.4f} tensors")


WARM_UP = 5  # training steps after which every buffer has been allocated


def growth(rows: list[dict[str, float]]) -> dict[str, float]:
    """Least-squares growth in MB a step of every kind of process, after the warm-up; empty for runs shorter than that."""
    steady = [row for row in rows if row["step"] > WARM_UP]
    if len(steady) < 2:
        return {}
    steps = [row["step"] for row in steady]
    return {name: float(np.polyfit(steps, [row[name] for row in steady], 1)[0]) for name in rows[0] if name != "step"}


def show_training(rows: list[dict[str, float]]) -> None:
    table = Table(title="resident MB after each training step")
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(f"{value:.0f}" for value in row.values()))
    console = Console(width=100)
    console.print(table)
    for name, slope_mb in growth(rows).items():
        console.print(f"{name}: {slope_mb:+.3f} MB per step, from step {WARM_UP + 1} on")


def plot(result: dict[str, Any], path: Path) -> None:
    """What has been measured, over cycles and over training steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parts = [part for part in ("cycles", "training") if part in result]
    figure, axes = pyplot.subplots(1, len(parts), figsize=(4.5 * len(parts), 3.2), layout="constrained", squeeze=False)
    for axis, part in zip(axes[0], parts, strict=True):
        if part == "cycles":
            samples = [Sample(**one) for one in result["cycles"]["samples"]]
            for field, label in (("rss", "resident"), ("heap", "heap in use")):
                axis.plot(
                    [s.cycle for s in samples], [getattr(s, field) / 1e6 for s in samples], marker=".", label=label
                )
            axis.set_xlabel("weight syncs and predictions")
        else:
            rows = result["training"]["rows"]
            for name in [name for name in rows[0] if name != "step"]:
                axis.plot([row["step"] for row in rows], [row[name] for row in rows], marker=".", label=name)
            axis.set_xlabel("training step")
        axis.legend()
        axis.set_title("rollout policy in one process, MB" if part == "cycles" else "processes of a run, resident MB")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def merge(part: str, content: dict[str, Any]) -> None:
    """Replace one part of the result file."""
    old = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps({**old, part: {"machine": machine(), **content}}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cycles", "training", "plot"))
    parser.add_argument("--checkpoint", type=Path, help="of the tiny model: rlinf-phyai make-tiny-checkpoint DIR")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="of the cycles")
    parser.add_argument("--count", type=int, help="cycles (2,040) or steps (10)")
    parser.add_argument("--log-path", type=Path, default=Path("logs") / "leak")
    args = parser.parse_args()
    if args.what == "plot":
        return plot(json.loads(RESULT.read_text()), PLOT)
    if args.checkpoint is None:
        sys.exit("--checkpoint is needed")
    checkpoint = args.checkpoint.resolve()
    if args.what == "cycles":
        torch.set_num_threads(1)
        begin = time.monotonic()
        cycles = Cycles(checkpoint, args.device)
        cycles.fill_caches()
        samples = measure_cycles(cycles, args.count or 20 * PERIOD)
        show_cycles(samples)
        merge("cycles", {"seconds": time.monotonic() - begin, "samples": [asdict(one) for one in samples]})
    else:
        rows = measure_training(checkpoint, args.count or 10, args.log_path.resolve())
        show_training(rows)
        merge("training", {"rows": rows, "growth_mb_per_step": growth(rows)})
    return None


if __name__ == "__main__":
    main()
