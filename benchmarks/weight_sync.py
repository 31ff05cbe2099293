# SPDX-License-Identifier: Apache-2.0
"""Cost of a weight update, full size, on one GPU: engine-side, through RLinf's syncers, and as finished runs timed it.

    python -m benchmarks.weight_sync --syncers bucket,patch
    python -m benchmarks.weight_sync --runs phyai=logs/A stock=logs/B

The first form measures. The source tensors lie on the same GPU, as in a collocated run. The floor is the bytes read and written over
the measured copy rate. The second form needs no GPU: it adds the ``time/sync_weights`` timer of finished runs to the measured
results. A run's first sync is listed apart: it also builds the connections, and compares all parameters on both sides.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.common import RESULTS, random_actor, save_actor, write_json
from benchmarks.engine import add_engine_options, build_engine, chosen_policy
from benchmarks.inputs import make_observations
from benchmarks.timing import copy_tbs
from rlinf_phyai.actor.worker import UNUSED_BY_ACTIONS
from rlinf_phyai.engine import Engine
from rlinf_phyai.run_summary import read_scalars

ROOT = Path(__file__).resolve().parent.parent
SYNC_TIMER = "time/sync_weights"


def wall_ms(function: Callable[[], Any], repeats: int = 10) -> float:
    """Median wall milliseconds of a call, device work included."""
    samples = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        function()
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(samples[1:])


def commit(engine: Engine, weights: dict[str, Tensor]) -> None:
    """One whole session."""
    with engine.weight_update() as update:
        update(weights)


def moved_bytes(engine: Engine, weights: dict[str, Tensor]) -> int:
    """Bytes read plus written."""
    views = engine.state_dict()
    return sum(t.numel() * (t.element_size() + views[name].element_size()) for name, t in weights.items())


def train(state: dict[str, Tensor], names: list[str], share: int = 20) -> None:
    """Moves every ``share``-th entry, as an update of bf16 weights by a small learning rate does; a patch holds these."""
    for name in names:
        state[name].view(-1)[::share] += 0.125


def through_syncer(engine: Engine, kind: str, state: dict[str, Tensor], trainable: list[str]) -> float:
    """Median milliseconds of the receiver's part in RLinf's own syncer class, commit included; the sender is in this process."""
    from omegaconf import OmegaConf
    from rlinf.hybrid_engines.weight_syncer import WeightSyncer

    from rlinf_phyai.rollout.weight_sync import EngineWeights

    options = OmegaConf.load(ROOT / "examples" / "embodiment" / "config" / "weight_syncer" / f"{kind}.yaml")
    sender, receiver = (WeightSyncer.create(options) for _ in range(2))  # type: ignore[arg-type]
    target = EngineWeights(engine)
    state = {name: tensor.clone() for name, tensor in state.items()}
    if kind == "bucket":  # as our actor does; a patch needs the same names on both sides
        trainable = [name for name in trainable if not name.endswith(UNUSED_BY_ACTIONS)]

    async def all_syncs(count: int) -> list[float]:
        to_receiver: asyncio.Queue[Any] = asyncio.Queue()
        to_sender: asyncio.Queue[Any] = asyncio.Queue()
        with target.session():  # connects, and brings the engine to this state whatever it held
            if kind == "bucket":
                target.load_state_dict(state)
            await asyncio.gather(
                sender.init_sender(
                    state_dict=state, send=to_receiver.put, recv=to_sender.get, param_names_need_sync=trainable
                ),
                receiver.init_receiver(state_dict=target.state_dict(), recv=to_receiver.get, send=to_sender.put),
            )
        took = []
        for version in range(1, count + 1):
            train(state, trainable)
            await sender.sync(state, to_receiver.put, version=version)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            with target.session():
                await receiver.apply(target, to_receiver.get)
            torch.cuda.synchronize()
            took.append((time.perf_counter() - begin) * 1e3)
        return took

    took = asyncio.run(all_syncs(5))
    views = target.state_dict()
    held = [name for name in trainable if not views[name].is_meta]
    wrong = [name for name in held if not torch.equal(views[name], state[name].to(views[name].dtype))]
    if wrong:
        raise RuntimeError(f"after the {kind} syncs the engine differs from the actor in {wrong[:4]}")
    return statistics.median(took[1:])


def sync_timer(log_dir: Path) -> dict[str, Any]:
    """Seconds of a finished run's ``time/sync_weights``: the first sync, and median, smallest and largest of the others.

    Raises:
        SystemExit: the folder holds no such timer.
    """
    try:
        series = read_scalars(log_dir).get(SYNC_TIMER)
    except FileNotFoundError as error:
        raise SystemExit(str(error)) from None
    if not series:
        raise SystemExit(f"{log_dir}: the run logged no {SYNC_TIMER}; it must have finished one training step")
    first, *later = (value for _, value in series)
    found: dict[str, Any] = {"log_dir": log_dir.name, "syncs": len(series), "first_s": first}
    return found | ({"median_s": statistics.median(later), "min_s": min(later), "max_s": max(later)} if later else {})


def add_runs(arguments: list[str], output: Path) -> None:
    """Prints the timers of ``NAME=DIR`` and writes them beside the measured results, if there are any."""
    runs = []
    for argument in arguments:
        name, equals, folder = argument.partition("=")
        if not equals:
            raise SystemExit(f"--runs {argument!r}: expected NAME=LOG_DIR, for example phyai=logs/my-run")
        runs.append({"run": name, **sync_timer(Path(folder))})
    measured = json.loads(output.read_text()) if output.is_file() else {}
    write_json(output, {**measured, "runs": runs})
    table = Table(title=f"{SYNC_TIMER}, ms")
    for column in ("run", "syncs", "first", "median", "min", "max"):
        table.add_column(column, justify="right")
    for run in runs:
        times = (run.get(key) for key in ("first_s", "median_s", "min_s", "max_s"))
        table.add_row(run["run"], str(run["syncs"]), *("-" if t is None else f"{1e3 * t:.1f}" for t in times))
    console = Console(width=110)
    console.print(table)
    for row in measured.get("rows", ()):
        if row["what"] == "trainable":
            console.print(
                f"engine-side commit {row['ms']:.2f} ms, floor of the trainable weights {row['floor_ms']:.2f} ms"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser)
    parser.add_argument("--syncers", default="", help="of bucket, patch")
    parser.add_argument(
        "--runs", nargs="+", metavar="NAME=DIR", help="read the timers of finished runs; measure nothing"
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "weight_sync.json")
    args = parser.parse_args()
    if args.runs:
        add_runs(args.runs, args.output)
        return
    rate = copy_tbs()
    actor = random_actor()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as scratch:
        save_actor(actor, Path(scratch))
        policy = chosen_policy(args, Path(scratch))
        engine = build_engine(Path(scratch), 8, policy, prefix_precision=args.prefix_precision)
    request = make_observations(8).request(compute_value=True)
    engine.rollout_step(request)
    graphs = {key: id(graph.graph) for key, graph in engine.captured_graphs().items()}
    pointers = {name: view.data_ptr() for name, view in engine.state_dict().items()}
    state = {name: tensor.detach() for name, tensor in actor.state_dict().items()}
    trainable = [name for name, p in actor.named_parameters() if p.requires_grad]
    sent = {name: tensor for name, tensor in state.items() if not name.endswith(UNUSED_BY_ACTIONS)}

    sets = {"trainable": {name: sent[name] for name in trainable if name in sent}, "everything": sent}
    rows: list[dict[str, Any]] = []
    for name, weights in sets.items():
        moved = moved_bytes(engine, weights)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        took = wall_ms(lambda w=weights: commit(engine, w))
        extra = (torch.cuda.max_memory_allocated() - before) / 2**20
        rows.append({"what": name, "gb": moved / 2e9, "ms": took, "floor_ms": moved / rate / 1e9, "extra_mib": extra})
    for kind in filter(None, args.syncers.split(",")):
        took = through_syncer(engine, kind, state, trainable)
        rows.append(
            {
                "what": f"syncer {kind}",
                "gb": rows[0]["gb"],
                "ms": took,
                "floor_ms": rows[0]["floor_ms"],
                "extra_mib": None,
            }
        )
    engine.rollout_step(request)
    unchanged = {
        "same_graphs": graphs == {key: id(graph.graph) for key, graph in engine.captured_graphs().items()},
        "same_pointers": pointers == {name: view.data_ptr() for name, view in engine.state_dict().items()},
    }
    write_json(
        args.output, {"prefix_precision": args.prefix_precision, "copy_tbs": rate, "rows": rows, "checks": unchanged}
    )
    table = Table(title=f"weight update, copy rate {rate:.2f} TB/s")
    for column in ("what", "GB", "ms", "floor ms", "extra MiB"):
        table.add_column(column, justify="right")
    for row in rows:
        extra = "-" if row["extra_mib"] is None else f"{row['extra_mib']:.0f}"
        table.add_row(row["what"], f"{row['gb']:.2f}", f"{row['ms']:.2f}", f"{row['floor_ms']:.2f}", extra)
    console = Console(width=110)
    console.print(table)
    console.print(unchanged)


if __name__ == "__main__":
    main()
