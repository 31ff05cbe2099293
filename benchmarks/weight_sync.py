# SPDX-License-Identifier: Apache-2.0
"""Engine-side cost of a weight update on one GPU, full size: trainable parameters, everything, and through RLinf's syncers.

    python -m benchmarks.weight_sync

The source tensors lie on the same GPU, as in a collocated run. The floor is the bytes read and written over the measured copy rate.
"""

from __future__ import annotations

import argparse
import asyncio
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

from benchmarks.common import RESULTS, copy_bandwidth_tbs, random_actor, save_actor, write_json
from benchmarks.engine import build_engine
from benchmarks.inputs import make_observations
from rlinf_phyai.engine import Engine

_DROPPED = "gemma_expert.lm_head.weight"


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


def through_syncer(engine: Engine, kind: str, state: dict[str, Tensor], trainable: list[str]) -> float:
    """Median milliseconds of the receiver's ``apply`` in RLinf's own syncer class, sender in the same process."""
    from omegaconf import OmegaConf
    from rlinf.hybrid_engines.weight_syncer import WeightSyncer

    from rlinf_phyai.rollout.weight_sync import EngineWeights

    options: dict[str, Any] = {
        "bucket": {
            "type": "bucket",
            "bucket": {
                "bucket_size": 2**29,
                "bucket_dtype": None,
                "bucket_device": "cuda",
                "is_agent": False,
                "load_instant": True,
            },
        },
        "patch": {
            "type": "patch",
            "patch": {
                "snapshot_device": "cuda",
                "transport_device": "cuda",
                "delta_encoding": True,
                "compression": "none",
            },
            "init_sync": {"enabled": True},
        },
    }
    sender, receiver = (WeightSyncer.create(OmegaConf.create(options[kind])) for _ in range(2))
    target = EngineWeights(engine)

    async def once(version: int) -> float:
        to_receiver: asyncio.Queue[Any] = asyncio.Queue()
        to_sender: asyncio.Queue[Any] = asyncio.Queue()
        send, recv = to_receiver.put, to_receiver.get
        if not sender.sender_initialized():
            await asyncio.gather(
                sender.init_sender(state_dict=state, send=send, recv=to_sender.get, param_names_need_sync=trainable),
                receiver.init_receiver(state_dict=target.state_dict(), recv=recv, send=to_sender.put),
            )
        await sender.sync(state, send, version=version)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with target.session():
            await receiver.apply(target, recv)
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e3

    return statistics.median([asyncio.run(once(version)) for version in range(4)][1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="rlinf_bf16")
    parser.add_argument("--syncers", default="", help="of bucket, patch")
    parser.add_argument("--output", type=Path, default=RESULTS / "weight_sync.json")
    args = parser.parse_args()
    rate = copy_bandwidth_tbs()
    actor = random_actor()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as scratch:
        save_actor(actor, Path(scratch))
        engine = build_engine(Path(scratch), 8, args.policy)
    request = make_observations(8).request(compute_value=True)
    engine.rollout_step(request)
    graphs = {key: id(graph.graph) for key, graph in engine.captured_graphs().items()}
    pointers = {name: view.data_ptr() for name, view in engine.state_dict().items()}
    state = {name: tensor.detach() for name, tensor in actor.state_dict().items() if _DROPPED not in name}
    trainable = [name for name, p in actor.named_parameters() if p.requires_grad and _DROPPED not in name]

    sets = {"trainable": {name: state[name] for name in trainable}, "everything": state}
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
    write_json(args.output, {"copy_tbs": rate, "rows": rows, "checks": unchanged})
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
