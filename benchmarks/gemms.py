# SPDX-License-Identifier: Apache-2.0
"""GEMM study: what limits the prefix and vision products, and what other routes give.

python benchmarks/gemms.py [--parts shapes,fused,fp8,rows,split,lt] [--out benchmarks/results/gemms.json]

* shapes: every product of prefix and vision, cuBLAS and cuBLASLt.
* fused: gate|up with the gated GELU inside (own kernel) against product + activation.
* fp8: the prefix MLP's products on quantised rows, their activation and quantisation, and the accuracy of the sums.
* split: products in two calls where the last wave of tiles is nearly empty, against one call.
* rows: does padding or splitting the rows help (wave quantisation)?
* lt: best of cuBLASLt's candidates against its first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import RESULTS, write_json
from benchmarks.cublaslt import Lt
from benchmarks.timing import measure_ceilings, time_graph

PREFIX = 536
PREFIX_GEMMS = {"qkv": (2560, 2048), "o": (2048, 2048), "gate_up": (32768, 2048), "down": (2048, 16384)}
VISION_GEMMS = {"v.qkv": (3456, 1152), "v.out": (1152, 1152), "v.fc1": (4304, 1152), "v.fc2": (1152, 4304)}
records: list[dict[str, Any]] = []


def rand(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random GPU tensor."""
    return torch.randn(*shape, device="cuda", dtype=dtype) * scale


def report(part: str, name: str, rows: int, flops: float, calls: list[Callable[[], object]], **more: Any) -> float:
    """Times, prints and records one contender; a failure is recorded too."""
    record: dict[str, Any] = {"part": part, "name": name, "rows": rows, **more}
    records.append(record)
    try:
        ms = time_graph(calls, target_ms=60.0, rounds=3)
    except Exception as problem:  # the other contenders still run
        record["failed"] = f"{type(problem).__name__}: {problem}"[:300]
        print(f"{part:7} {name:34} M={rows:6} FAILED {record['failed'][:140]}", flush=True)
        torch.cuda.synchronize()
        return float("inf")
    record |= {"ms": ms, "tflops": flops / ms / 1e9}
    print(f"{part:7} {name:34} M={rows:6} {ms * 1e3:9.1f} us {record['tflops']:6.0f} TFLOP/s {more or ''}", flush=True)
    return ms


def operands(rows: int, n: int, k: int) -> list[tuple[Tensor, Tensor]]:
    """Enough (x, w) pairs to leave the cache behind."""
    copies = max(1, min(8, (160 << 20) // (2 * n * k)))
    x = rand(rows, k)
    return [(x, rand(n, k, scale=k**-0.5)) for _ in range(copies)]


def part_shapes(batches: list[int]) -> None:
    """Every product with both libraries."""
    for batch in batches:
        for table, per_sample in ((PREFIX_GEMMS, PREFIX), (VISION_GEMMS, 512)):
            for name, (n, k) in table.items():
                rows = batch * per_sample
                pairs = operands(rows, n, k)
                for library in ("cublas", "cublaslt"):
                    torch.backends.cuda.preferred_blas_library(library)
                    calls = [lambda x=x, w=w: F.linear(x, w) for x, w in pairs]
                    report("shapes", f"{name} {library}", rows, 2.0 * rows * n * k, calls)
                torch.backends.cuda.preferred_blas_library("cublas")


FUSED = (
    {"block_m": 128, "block_n": 128, "block_k": 64, "stages": 4, "group": 8},
    {"block_m": 128, "block_n": 128, "block_k": 64, "stages": 4, "group": 16},
    {"block_m": 128, "block_n": 128, "block_k": 64, "stages": 3, "group": 8, "flatten": True},
    {"block_m": 128, "block_n": 128, "block_k": 64, "stages": 4, "group": 8, "wide": False},
    {"block_m": 128, "block_n": 64, "block_k": 64, "stages": 4, "group": 8, "warps": 8},
    {"block_m": 64, "block_n": 128, "block_k": 64, "stages": 4, "group": 8, "warps": 4},
)


def part_fused(batches: list[int]) -> None:
    """Gate|up and its activation in one kernel or two."""
    from rlinf_phyai.kernels import torch_ops, triton_activations
    from rlinf_phyai.kernels.triton_gated_gemm import fused_linear_gated_gelu

    n, k = PREFIX_GEMMS["gate_up"]
    for batch in batches:
        rows = batch * PREFIX
        pairs = operands(rows, n, k)
        flops = 2.0 * rows * n * k
        calls = [lambda x=x, w=w: triton_activations.gated_gelu(F.linear(x, w)) for x, w in pairs]
        report("fused", "cublas + triton gelu", rows, flops, calls)
        want = torch_ops.gated_gelu(F.linear(*pairs[0])).double()
        for options in FUSED:
            error = None
            try:
                got = fused_linear_gated_gelu(*pairs[0], **options).double()
                error = float((got - want).norm() / want.norm())
            except Exception as problem:  # timed below, where the failure is recorded
                print(f"  {options}: {problem!r}"[:200], flush=True)
            calls = [lambda x=x, w=w, o=options: fused_linear_gated_gelu(x, w, **o) for x, w in pairs]
            report("fused", "one kernel", rows, flops, calls, error=error, **options)


def part_rows() -> None:
    """Rows around the real counts: time per row shows what padding costs or saves."""
    for name in ("gate_up", "down"):
        n, k = PREFIX_GEMMS[name]
        for rows in (512, 528, 536, 544, 560, 576, 640, 768, 4096, 4224, 4288, 4352, 16896, 17152, 17408):
            pairs = operands(rows, n, k)
            report("rows", name, rows, 2.0 * rows * n * k, [lambda x=x, w=w: F.linear(x, w) for x, w in pairs])


def part_fp8(batches: list[int]) -> None:
    """Products of the prefix MLP in FP8 and everything that it adds; ``error`` is against the same FP8 values in float32."""
    from rlinf_phyai.kernels import scaled_mm, torch_ops, triton_fp8
    from rlinf_phyai.kernels import triton_activations as activations

    bf16 = torch.bfloat16
    for batch in batches:
        rows = batch * PREFIX
        for name in ("gate_up", "down"):
            n, k = PREFIX_GEMMS[name]
            flops = 2.0 * rows * n * k
            pairs = [tuple(map(torch_ops.quantize_rows, pair)) for pair in operands(rows, n, k)]
            x, w = pairs[0]
            want = torch_ops.linear_fp8(torch_ops.Quantized(x.values[:512], x.scale[:512]), w, bf16).double()
            for fast in (True, False):
                error = float((scaled_mm.linear_fp8(x, w, bf16, fast)[:512].double() - want).norm() / want.norm())
                calls = [lambda x=x, w=w, fast=fast: scaled_mm.linear_fp8(x, w, bf16, fast) for x, w in pairs]
                label = f"{name}, {'fast' if fast else 'full'} sums"
                report("fp8", label, rows, flops, calls, error=error)
            plain = [lambda x=x, w=w: F.linear(x, w) for x, w in operands(rows, n, k)]
            report("fp8", f"{name}, bf16", rows, flops, plain)
            if name == "gate_up":
                calls = [lambda x=x, w=w: scaled_mm.linear_gated_gelu_fp8(x, w, bf16) for x, w in pairs]
                report("fp8", "gate_up, then gelu to fp8", rows, flops, calls)
        hidden, width = PREFIX_GEMMS["gate_up"][0] // 2, PREFIX_GEMMS["gate_up"][1]
        copies = range(max(2, min(8, (400 << 20) // (rows * hidden * 4))))
        gate_ups = [rand(rows, 2 * hidden) for _ in copies]
        report("fp8", "gelu to bf16", rows, 0, [lambda g=g: activations.gated_gelu(g) for g in gate_ups])
        hs = [g[:, :hidden].contiguous() for g in gate_ups]
        for warps, registers in ((8, None), (16, None), (16, 64), (32, None), (32, 32)):
            bound: dict[str, Any] = {"warps": warps, "registers": registers}
            calls = [lambda g=g, b=bound: triton_fp8.gated_gelu_fp8(g, **b) for g in gate_ups]
            report("fp8", "gelu to fp8", rows, 0, calls, **bound)
            calls = [lambda h=h, b=bound: triton_fp8.quantize_rows(h, **b) for h in hs]
            report("fp8", "rows to fp8", rows, 0, calls, **bound)
        norms = [(rand(rows, width), rand(rows, width), rand(width, dtype=torch.float32)) for _ in range(8)]
        report("fp8", "norm to fp8", rows, 0, [lambda p=p: triton_fp8.add_rms_norm_fp8(*p, 1e-6) for p in norms])


def part_split(batches: list[int]) -> None:
    """The prefix's plain products with and without the split of ``split_linear``; ``same`` is the share of equal bits."""
    from rlinf_phyai.kernels import split_linear
    from rlinf_phyai.kernels.triton_common import multiprocessors

    for batch in batches:
        for name in ("down", "qkv", "o"):
            n, k = PREFIX_GEMMS[name]
            rows = batch * PREFIX
            head = split_linear.whole_waves(rows, n, multiprocessors(torch.device("cuda")))
            if head == rows:
                continue
            pairs = operands(rows, n, k)
            flops = 2.0 * rows * n * k
            same = float((split_linear.linear(*pairs[0]) == F.linear(*pairs[0])).double().mean())
            for _ in range(2):  # twice, alternating: the difference must exceed the spread
                report("split", f"{name}, one call", rows, flops, [lambda x=x, w=w: F.linear(x, w) for x, w in pairs])
                calls = [lambda x=x, w=w: split_linear.linear(x, w) for x, w in pairs]
                report("split", f"{name}, {head} + {rows - head}", rows, flops, calls, same=same)


def part_lt(batches: list[int]) -> None:
    """All candidates of cuBLASLt's heuristic."""
    lt = Lt()
    for batch in batches:
        for table, per_sample in ((PREFIX_GEMMS, PREFIX), (VISION_GEMMS, 512)):
            for name, (n, k) in table.items():
                rows = batch * per_sample
                x, w = operands(rows, n, k)[0]
                out = rand(rows, n)
                flops, times = 2.0 * rows * n * k, []
                for candidate in lt.candidates(x, w, out, 12):
                    times.append(time_graph([candidate], target_ms=8.0 if batch == 1 else 25.0, rounds=3))
                want = F.linear(x, w).double()
                error = float((out.double() - want).norm() / want.norm())
                best = min(times)
                default = time_graph([lambda x=x, w=w: F.linear(x, w)], target_ms=25.0, rounds=3)
                records.append(
                    {"part": "lt", "name": name, "rows": rows, "ms": times, "torch_ms": default, "error": error}
                )
                print(
                    f"lt      {name:8} M={rows:6} torch {default * 1e3:8.1f} us, first {times[0] * 1e3:8.1f}, best "
                    f"{best * 1e3:8.1f} (#{times.index(best)}, {flops / best / 1e9:.0f} TFLOP/s), error {error:.1e}",
                    flush=True,
                )


def main(arguments: list[str] | None = None) -> int:
    """Runs the chosen parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="shapes,fused,fp8,rows,split,lt")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--out", type=Path, default=RESULTS / "gemms.json")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    batches = [int(b) for b in options.batches.split(",")]
    ceilings = measure_ceilings()
    print(
        f"matmul {ceilings.matmul:.0f} TFLOP/s burst, {ceilings.matmul_sustained:.0f} sustained, copy {ceilings.copy:.2f} TB/s"
    )
    parts: dict[str, Callable[[], None]] = {
        "shapes": lambda: part_shapes(batches), "fused": lambda: part_fused(batches), "fp8": lambda: part_fp8(batches),
        "rows": part_rows, "split": lambda: part_split(batches), "lt": lambda: part_lt(batches),
    }  # fmt: skip
    for name in options.parts.split(","):
        try:
            parts[name]()
        except Exception as problem:  # keep what the other parts measured
            print(f"{name} stopped: {problem!r}", flush=True)
        write_json(options.out, {"ceilings": vars(ceilings), "records": records})
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        raise SystemExit(main())
