# SPDX-License-Identifier: Apache-2.0
"""Latency and throughput of ``rollout_step`` against the actor's own sampling, on one GPU, full-size random weights.

    python -m benchmarks.engine --batches 1,8,32 --contenders phyai,eager

Every figure is one call with log-probs, no value, N denoise steps, 2 cameras computed, prompts of 18 to 24 tokens, inputs on the device.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.common import RESULTS, random_actor, save_actor, write_json
from benchmarks.flops import stage_flops
from benchmarks.inputs import make_observations
from benchmarks.timing import copy_tbs, graph_of, matmul_tflops, time_ms
from rlinf_phyai.engine import DeviceConfig, Engine, EngineArgs, EngineConfig, RuntimeConfig
from rlinf_phyai.engine.kernel_policy import load_kernel_policy
from rlinf_phyai.models.pi05 import PI05Args
from rlinf_phyai.models.pi05.cache import KeyValueCache
from rlinf_phyai.models.pi05.expert import velocity
from rlinf_phyai.models.pi05.prefix import fill_cache
from rlinf_phyai.models.pi05.random_checkpoint import make_random_checkpoint
from rlinf_phyai.models.pi05.value import fill_cache_and_value
from rlinf_phyai.models.pi05.vision import embed_images


def build_engine(
    checkpoint: Path,
    max_batch: int,
    policy: str | Path | None,
    graphs: bool = True,
    prefix_precision: str | None = None,
) -> Engine:
    """An engine on the checkpoint, as the rollout worker builds it."""
    return Engine(
        EngineArgs(
            plugin="pi05",
            plugin_args=PI05Args(
                checkpoint,
                max_batch_size=max_batch,
                capture_rollout=True,
                num_steps=3,
                value_mode="mean_token",
                prefix_precision=prefix_precision,
            ),
            config=EngineConfig(
                DeviceConfig("cuda", torch.bfloat16),
                RuntimeConfig(use_cuda_graph=graphs, kernel_policy=policy, progress=False),
            ),
        )
    )


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """The options that choose the engine's kernels; :func:`chosen_policy` reads them."""
    parser.add_argument("--policy", default="rlinf_bf16", help="kernel policy of the engine")
    parser.add_argument(
        "--override", action="append", default=[], metavar="OPERATION=BACKEND", help="changes one entry of the policy"
    )
    parser.add_argument("--prefix-precision", choices=["fp8"], help="see PI05Args")


def chosen_policy(args: argparse.Namespace, scratch: Path) -> str | Path:
    """The policy, or with overrides a file in ``scratch`` that holds it with the changes."""
    if not args.override:
        return str(args.policy)
    operations = load_kernel_policy(args.policy).operations | dict(pair.split("=") for pair in args.override)
    file = scratch / "policy.yaml"
    file.write_text(json.dumps({"name": " ".join([args.policy, *args.override]), "operations": operations}))
    return file


def stage_times(engine: Engine, batch: int, num_steps: int, prompt: int) -> dict[str, float]:
    """Median milliseconds of each stage as its own CUDA graph."""
    model = engine._model
    assert model is not None
    kernels, weights, tables, c = model.scheduler.kernels, model.weights, model.tables, model.config
    tokens = 2 * c.vision.num_tokens + prompt
    pixels = torch.rand(batch * 2, 3, c.vision.image_size, c.vision.image_size, device=engine.device) * 2 - 1
    embedded = torch.randn(batch, tokens, c.prefix.width, device=engine.device, dtype=weights.params_dtype)
    lengths = torch.full((batch,), tokens - 2, dtype=torch.int32, device=engine.device)
    cache = KeyValueCache(c, batch, tokens, engine.device, weights.params_dtype)
    schedule = tables.schedule(num_steps)
    actions = torch.randn(batch, c.action_horizon, c.action_dim, device=engine.device)
    # The residual stream is overwritten, so each run starts from a copy; the copy's time is part of the stage.
    stages = {
        "vision": lambda: embed_images(kernels, weights, pixels),
        "prefix": lambda: fill_cache(kernels, weights, tables, embedded.clone(), lengths, cache),
        "prefix_value": lambda: fill_cache_and_value(kernels, weights, tables, embedded.clone(), lengths, cache, 2),
        "expert": lambda: [
            velocity(kernels, weights, tables.rotary, schedule, i, actions, lengths, cache) for i in range(num_steps)
        ],
    }
    with torch.no_grad(), engine._matmul_precision():
        return {name: time_ms(graph_of(function))["median"] for name, function in stages.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,2,4,8,16,32,64")
    parser.add_argument("--contenders", default="phyai,eager", help="of phyai, eager, compile")
    add_engine_options(parser)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--stage-batches", default="1,8,32")
    parser.add_argument("--compile-batches", default="32")
    parser.add_argument(
        "--compile-mode", default="max-autotune-no-cudagraphs", help="of torch.compile; default: that of RLinf's worker"
    )
    parser.add_argument("--checkpoint", type=Path, help="existing full-size checkpoint instead of random weights")
    parser.add_argument("--output", type=Path, default=RESULTS / "engine.json")
    args = parser.parse_args()
    batches = [int(b) for b in args.batches.split(",")]
    contenders = args.contenders.split(",")
    result: dict[str, Any] = {
        "policy": " ".join([args.policy, *args.override]),
        "prefix_precision": args.prefix_precision,
        "denoise_steps": args.steps,
        "horizon": 10,
        "cameras": 2,
        "dtype": "bfloat16",
    }
    result["peak"] = {"matmul_tflops": matmul_tflops(), "copy_tbs": copy_tbs()}
    actor = None
    if "eager" in contenders or "compile" in contenders:
        begin = time.time()
        actor = random_actor(args.steps)
        print(f"actor built in {time.time() - begin:.1f} s", flush=True)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as scratch:
        checkpoint = args.checkpoint
        if checkpoint is None:
            checkpoint = Path(scratch)
            if actor is None:
                make_random_checkpoint(checkpoint, device="cuda")
                torch.cuda.empty_cache()
            else:
                save_actor(actor, checkpoint)
        run(args, batches, contenders, checkpoint, chosen_policy(args, Path(scratch)), actor, result)
    show(result["rows"], contenders, result)


def run(
    args: argparse.Namespace,
    batches: list[int],
    contenders: list[str],
    checkpoint: Path,
    policy: str | Path,
    actor: Any,
    result: dict[str, Any],
) -> None:
    """Measures the contenders one after the other and writes the result after each."""
    rows: list[dict[str, Any]] = [{"batch": batch} for batch in batches]
    result["rows"] = rows
    if "phyai" in contenders:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        begin = time.time()
        engine = build_engine(checkpoint, max(batches), policy, prefix_precision=args.prefix_precision)
        torch.cuda.synchronize()
        result["start_seconds"] = time.time() - begin
        result["kernels"] = engine.kernel_backends
        for row in tqdm(rows, desc="engine"):
            request = make_observations(row["batch"], args.steps).request()
            row["phyai"] = time_ms(lambda r=request: engine.rollout_step(r))
        result["engine_peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
        result["stages"] = {}
        for batch in [int(b) for b in args.stage_batches.split(",") if b]:
            times = stage_times(engine, batch, args.steps, 24)
            flops = stage_flops(engine.model_config, batch, 2, 24, args.steps)
            result["stages"][batch] = {
                name: {"ms": ms, "tflops": flops[name] / ms / 1e9 if name in flops else None}
                for name, ms in times.items()
            }
        engine.close()
        del engine
        write_json(args.output, result)
    if "eager" in contenders:
        for row in tqdm(rows, desc="actor, eager"):
            observation = make_observations(row["batch"], args.steps).openpi()
            row["eager"] = time_ms(
                lambda o=observation: actor.sample_actions(o, mode="train", compute_values=False), 7, 2
            )
        write_json(args.output, result)
    if "compile" in contenders:
        actor.enable_torch_compile(mode=args.compile_mode)
        result["compile_mode"], result["compile_seconds"] = args.compile_mode, {}
        chosen = {int(b) for b in args.compile_batches.split(",")}
        for row in tqdm([r for r in rows if r["batch"] in chosen], desc="actor, torch.compile"):
            observation = make_observations(row["batch"], args.steps).openpi()
            begin = time.time()
            actor.sample_actions(observation, mode="train", compute_values=False)
            torch.cuda.synchronize()
            result["compile_seconds"][row["batch"]] = time.time() - begin
            row["compile"] = time_ms(
                lambda o=observation: actor.sample_actions(o, mode="train", compute_values=False), 7, 2
            )
            write_json(args.output, result)


def show(rows: list[dict[str, Any]], contenders: list[str], result: dict[str, Any]) -> None:
    console = Console(width=120)
    console.print(f"peak {result['peak']['matmul_tflops']:.0f} TFLOP/s, copy {result['peak']['copy_tbs']:.2f} TB/s")
    for batch, stages in result.get("stages", {}).items():
        parts = (
            f"{n} {s['ms']:.2f} ms" + (f" ({s['tflops']:.0f} TFLOP/s)" if s["tflops"] else "")
            for n, s in stages.items()
        )
        console.print(f"B={batch}: " + ", ".join(parts))
    if "start_seconds" in result:
        console.print(f"engine start {result['start_seconds']:.1f} s, peak memory {result['engine_peak_gib']:.1f} GiB")
    table = Table(title="rollout_step, median ms")
    for column in ("B", *contenders, "ms/obs", "vs eager"):
        table.add_column(column, justify="right")
    for row in rows:
        cells = [f"{row[c]['median']:.2f}" if c in row else "-" for c in contenders]
        own = row.get("phyai", {}).get("median")
        eager = row.get("eager", {}).get("median")
        ratio = f"{eager / own:.2f}x" if own and eager else "-"
        table.add_row(str(row["batch"]), *cells, f"{own / row['batch']:.2f}" if own else "-", ratio)
    console.print(table)


if __name__ == "__main__":
    main()
