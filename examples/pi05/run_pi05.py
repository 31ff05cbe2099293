# SPDX-License-Identifier: Apache-2.0
"""Runs a PI0.5 checkpoint on one device, measures it, and checks that batches agree with single observations.

    python examples/pi05/run_pi05.py --checkpoint /path/to/pi05
    python examples/pi05/run_pi05.py --checkpoint /path/to/tiny --device cpu

For max_batch_size 1 and 4 it builds an engine, prints latency statistics of every stage (3 warm-ups, 30 timed calls by default),
and compares each batch size up to the maximum with the same observations one by one. The last line is PASS or FAIL, and so is the
exit code (0 or 1). Inputs are made up but deterministic; the weights are yours.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from rlinf_phyai.engine import DeviceConfig, Engine, EngineArgs, EngineConfig, PhyaiError, RuntimeConfig
from rlinf_phyai.models.pi05 import PI05Args, PI05Config, PI05Request, load_config

MAX_BATCH_SIZES = (1, 4)
# Another batch size may take another matrix kernel, whose sums are rounded elsewhere: float32 differs in its last bits, bfloat16
# by a few units in its third digit, relative to actions of order one.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder with *.safetensors")
    parser.add_argument("--device", default=None, help="cuda, cuda:1 or cpu; default: cuda where there is one")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="default: bfloat16 on cuda, float32 on cpu")
    parser.add_argument("--no-cuda-graph", action="store_true", help="launch kernels one by one")
    parser.add_argument("--kernel-policy", default=None, help="name or YAML file; default: the torch reference kernels")
    parser.add_argument("--num-steps", type=int, default=None, help="denoise steps; default: the checkpoint's")
    parser.add_argument("--warm-up", type=int, default=3, help="calls before timing")
    parser.add_argument("--repeats", type=int, default=30, help="timed calls")
    chosen = parser.parse_args(arguments)
    if chosen.warm_up < 0 or chosen.repeats < 1:
        parser.error("--warm-up must be at least 0 and --repeats at least 1")
    if chosen.device is None:
        chosen.device = "cuda" if torch.cuda.is_available() else "cpu"
    if chosen.dtype is None:
        chosen.dtype = "float32" if chosen.device == "cpu" else "bfloat16"
    return chosen


def build_engine(chosen: argparse.Namespace, max_batch_size: int) -> Engine:
    return Engine(
        EngineArgs(
            plugin="pi05",
            plugin_args=PI05Args(
                checkpoint_dir=chosen.checkpoint, max_batch_size=max_batch_size, num_steps=chosen.num_steps
            ),
            config=EngineConfig(
                device=DeviceConfig(target=chosen.device, params_dtype=DTYPES[chosen.dtype]),
                runtime=RuntimeConfig(
                    use_cuda_graph=not chosen.no_cuda_graph,
                    kernel_policy=chosen.kernel_policy,
                    progress=sys.stderr.isatty(),
                ),
            ),
        )
    )


def make_request(config: PI05Config, batch: int, device: torch.device) -> PI05Request:
    """Deterministic inputs: every camera used, prompts of different lengths, noise given so that calls can be compared."""
    gen = torch.Generator().manual_seed(0)
    size, length = config.vision.image_size, config.tokenizer_max_length
    pixels = torch.rand(batch, config.num_cameras, 3, size, size, generator=gen) * 2 - 1
    lens = torch.tensor([1 + (7 * i + 5) % min(length, 24) for i in range(batch)], dtype=torch.int64)
    ids = torch.randint(1, config.vocab_size, (batch, length), generator=gen)
    ids[torch.arange(length)[None] >= lens[:, None]] = 0
    noise = torch.randn(batch, config.action_horizon, config.action_dim, generator=gen)
    return PI05Request(pixels.to(device), ids.to(device), lens, noise.to(device))


def rows_of(request: PI05Request, rows: slice) -> PI05Request:
    """A part of a request's observations."""
    assert request.noise is not None
    return PI05Request(
        request.pixel_values[rows], request.input_ids[rows], request.lang_lens[rows], request.noise[rows]
    )


def time_call(call: Callable[[], Any], device: torch.device, warm_up: int, repeats: int, label: str) -> list[float]:
    """Milliseconds of each timed call, the device's work included."""
    times = []
    for i in tqdm(range(warm_up + repeats), desc=label, leave=False, disable=not sys.stderr.isatty()):
        synchronise(device)
        begin = time.perf_counter()
        call()
        synchronise(device)
        if i >= warm_up:
            times.append(1e3 * (time.perf_counter() - begin))
    return times


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def latency_table(engine: Engine, request: PI05Request, chosen: argparse.Namespace) -> Table:
    """Statistics of the whole step and of its stages."""
    batch = request.pixel_values.shape[0]
    calls = {"step": lambda: engine.step(request), **engine.stages(request)}
    table = Table(title=f"latency in ms, batch {batch} ({chosen.warm_up} warm-ups, {chosen.repeats} timed)")
    for column in ("stage", "mean", "median", "std", "min", "max"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for name, call in calls.items():
        times = time_call(call, engine.device, chosen.warm_up, chosen.repeats, name)
        spread = statistics.stdev(times) if len(times) > 1 else 0.0
        figures = (statistics.mean(times), statistics.median(times), spread, min(times), max(times))
        table.add_row(name, *(f"{figure:.3f}" for figure in figures))
    return table


def largest_batch_difference(engine: Engine, request: PI05Request) -> float:
    """Largest difference between a batch's actions and those of its observations alone, over all batch sizes.

    The whole request is also repeated: with noise given it must agree bit for bit, else the result is infinite.
    """
    whole = engine.step(request)
    if not torch.equal(whole, engine.step(request)):
        return float("inf")
    difference = 0.0
    for size in range(1, engine.max_batch_size + 1):
        for begin in range(0, whole.shape[0] - size + 1, size):
            rows = slice(begin, begin + size)
            difference = max(difference, float((engine.step(rows_of(request, rows)) - whole[rows]).abs().max()))
    return difference


def run(chosen: argparse.Namespace, console: Console) -> bool:
    """Everything for both batch limits; True when every check passed."""
    config = load_config(chosen.checkpoint, PI05Config)
    tolerance = TOLERANCES[DTYPES[chosen.dtype]]
    passed = True
    for max_batch_size in MAX_BATCH_SIZES:
        console.rule(f"max_batch_size {max_batch_size}")
        begin = time.perf_counter()
        with build_engine(chosen, max_batch_size) as engine:
            console.print(
                f"engine on {engine.device}, {chosen.dtype}, kernel policy {engine.kernel_policy.name}, "
                f"{engine.model_config.num_steps} denoise steps, ready in {time.perf_counter() - begin:.1f} s "
                f"({engine.load_report.summary()})"
            )
            request = make_request(config, max_batch_size, engine.device)
            actions = engine.step(request)
            console.print(f"actions {tuple(actions.shape)}, {actions.dtype}")
            console.print(latency_table(engine, request, chosen))
            difference = largest_batch_difference(engine, request)
            good = difference <= tolerance and bool(torch.isfinite(actions).all())
            console.print(
                f"batches against single observations: largest difference {difference:.2e}, allowed {tolerance:.0e}: "
                f"{'PASS' if good else 'FAIL'}"
            )
            passed = passed and good
    return passed


def main(arguments: list[str] | None = None) -> int:
    chosen = parse_arguments(arguments)
    console = Console(width=120, highlight=False)
    try:
        passed = run(chosen, console)
    except (PhyaiError, ValueError) as error:
        console.print(f"[red]{type(error).__name__}[/red]: {error}")
        passed = False
    console.print("PASS" if passed else "FAIL")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
