# SPDX-License-Identifier: Apache-2.0
"""Every operation with every backend at the model's real shapes: error against the reference, time, share of the card's peak.

python benchmarks/kernels.py [--batches 1,8,32] [--only gated_gelu,attention] [--out benchmarks/results/kernels.json]

Times are CUDA graph replays over rotating inputs. ``floor`` is what the shape costs at the measured copy bandwidth or matmul
rate, whichever is larger; ``share`` is floor / time.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.common import RESULTS, machine, write_json
from benchmarks.timing import Ceilings, measure_ceilings, time_graph
from rlinf_phyai.kernels import BACKENDS, torch_ops
from rlinf_phyai.kernels.registry import load

BF16 = torch.bfloat16
PREFIX, HORIZON, IMAGES = 536, 10, 2
ROTATE_BYTES = 200 << 20
"""Inputs rotate over at least this much memory, several times the L2 cache."""


def rand(*shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
    """Random GPU tensor."""
    return torch.randn(*shape, device="cuda", dtype=dtype) * scale


@dataclass(frozen=True)
class Case:
    """One operation at one shape. ``make`` draws fresh inputs; ``moved`` and ``flops`` are the least bytes and operations."""

    op: str
    label: str
    make: Callable[[], tuple[Any, ...]]
    moved: float
    flops: float = 0.0
    extra: dict[str, Callable[..., Any]] = field(default_factory=dict)


def prefix_cases(batch: int) -> Iterator[Case]:
    """Gemma prefix of ``batch`` observations."""
    rows, width, hidden = batch * PREFIX, 2048, 16384
    x = rows * width * 2
    norm = lambda: (rand(rows, width), rand(width, dtype=torch.float32), 1e-6)  # noqa: E731
    yield Case("rms_norm", f"prefix B={batch}", norm, 2 * x)
    add = lambda: (rand(rows, width), rand(rows, width), rand(width, dtype=torch.float32), 1e-6)  # noqa: E731
    yield Case("add_rms_norm", f"prefix B={batch}", add, 4 * x)
    yield Case("gated_gelu", f"prefix B={batch}", lambda: (rand(rows, 2 * hidden),), rows * hidden * 6)
    for name, n, k in (
        ("qkv", 2560, width),
        ("o", width, width),
        ("gate_up", 2 * hidden, width),
        ("down", width, hidden),
    ):
        make = lambda n=n, k=k: (rand(rows, k), rand(n, k, scale=k**-0.5))  # noqa: E731
        yield Case("linear", f"prefix {name} B={batch}", make, 2 * (rows * (n + k) + n * k), 2 * rows * n * k)
    yield Case("rope_cache", f"prefix B={batch}", lambda: rope_inputs(batch, PREFIX, None), 2 * x * 2560 / 2048)
    flops = 4 * batch * 8 * PREFIX**2 * 256
    inputs = lambda: attention_inputs(batch, PREFIX, PREFIX)  # noqa: E731
    yield Case("attention", f"prefix B={batch}", inputs, 2.5 * x, flops, attention_tiles())


def attention_tiles() -> dict[str, Callable[..., Any]]:
    """Other row blocks, key blocks, splits and warps than the default's 128 x 64, 1, 8."""
    from rlinf_phyai.kernels.triton_attention import _run

    chosen = (
        (64, 64, 1, 4),
        (64, 64, 1, 8),
        (64, 32, 1, 4),
        (32, 64, 1, 4),
        (64, 64, 2, 4),
        (128, 64, 2, 8),
        (128, 128, 1, 8),
    )
    return {
        f"{m}x{n} s{splits} w{warps}": lambda q, k, v, lengths, scale, t=(m, n, splits, warps): _run(
            q, k, v, lengths, scale, *t
        )
        for m, n, splits, warps in chosen
    }


def rope_inputs(batch: int, length: int, start: int | None) -> tuple[Any, ...]:
    """qkv, tables, starts, caches, heads."""
    angle = torch.rand(1024, 128, device="cuda") * 6.28
    starts = None if start is None else torch.full((batch,), start, dtype=torch.int32, device="cuda")
    caches = [rand(batch, PREFIX + HORIZON, 1, 256) for _ in range(2)]
    return rand(batch, length, 2560), angle.cos().to(BF16), angle.sin().to(BF16), starts, *caches, 8


def attention_inputs(batch: int, length: int, keys: int) -> tuple[Any, ...]:
    """q, caches, ragged lengths (up to 8 shorter), scale."""
    lengths = keys - torch.randint(0, 9, (batch,), dtype=torch.int32, device="cuda")
    return rand(batch, length, 8, 256), rand(batch, keys, 1, 256), rand(batch, keys, 1, 256), lengths, 1 / 16


def suffix_cases(batch: int) -> Iterator[Case]:
    """Action expert of ``batch`` observations."""
    rows, width, hidden, keys = batch * HORIZON, 1024, 4096, PREFIX + HORIZON
    f32 = lambda: rand(width, dtype=torch.float32)  # noqa: E731
    yield Case(
        "add_ada_rms_norm", f"suffix B={batch}",
        lambda: (rand(rows, width), rand(rows, width), rand(width), f32(), f32(), 1e-6), 8 * rows * width,
    )  # fmt: skip
    yield Case("ada_rms_norm", f"suffix B={batch}", lambda: (rand(rows, width), f32(), f32(), 1e-6), 4 * rows * width)
    yield Case("gated_gelu", f"suffix B={batch}", lambda: (rand(rows, 2 * hidden),), rows * hidden * 6)
    for name, n, k in (
        ("qkv", 2560, width),
        ("o", width, 2048),
        ("gate_up", 2 * hidden, width),
        ("down", width, hidden),
    ):
        make = lambda n=n, k=k: (rand(rows, k), rand(n, k, scale=k**-0.5))  # noqa: E731
        yield Case("suffix_linear", f"suffix {name} B={batch}", make, 2 * (rows * (n + k) + n * k), 2 * rows * n * k)
    yield Case("rope_cache", f"suffix B={batch}", lambda: rope_inputs(batch, HORIZON, PREFIX), 2 * 2 * rows * 2560)
    flops, moved = 4 * rows * 8 * keys * 256, 2 * batch * (2 * keys * 256 + 2 * HORIZON * 2048)
    yield Case("suffix_attention", f"suffix B={batch}", lambda: attention_inputs(batch, HORIZON, keys), moved, flops)


def vision_cases(batch: int) -> Iterator[Case]:
    """SigLIP over both cameras of ``batch`` observations."""
    images, width, hidden = IMAGES * batch, 1152, 4304
    rows = images * 256
    x = 2 * rows * width
    norm = lambda: (rand(rows, width), rand(width), rand(width), 1e-6)  # noqa: E731
    add = lambda: (rand(rows, width), rand(rows, width), rand(width), rand(width), 1e-6)  # noqa: E731
    yield Case("layer_norm", f"vision B={batch}", norm, 2 * x)
    yield Case("add_layer_norm", f"vision B={batch}", add, 4 * x)
    for name, n, k in (("qkv", 3 * width, width), ("out", width, width), ("fc2", width, hidden)):
        make = lambda n=n, k=k: (rand(rows, k), rand(n, k, scale=k**-0.5), rand(n))  # noqa: E731
        yield Case("linear", f"vision {name} B={batch}", make, 2 * (rows * (n + k) + n * k), 2 * rows * n * k)
    fc1 = lambda: (rand(rows, width), rand(hidden, width, scale=width**-0.5), rand(hidden))  # noqa: E731
    yield Case("linear_gelu", f"vision fc1 B={batch}", fc1, 2 * (rows + hidden) * width, 2 * rows * hidden * width)
    attend = lambda: (rand(images, 256, 3, 16, 72), 72**-0.5)  # noqa: E731
    yield Case("vision_attention", f"vision B={batch}", attend, 4 * x, 4 * images * 16 * 256 * 256 * 72)


def clone(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies of the tensors: some operations write their inputs."""
    return tuple(value.clone() if isinstance(value, Tensor) else value for value in inputs)


def error(op: Callable[..., Any], inputs: tuple[Any, ...], case: Case) -> dict[str, float]:
    """Relative error against the reference and the share of bitwise equal elements, over outputs and written inputs."""
    ours, theirs = clone(inputs), clone(inputs)
    got, want = op(*ours), getattr(torch_ops, case.op)(*theirs)
    pairs = [(got, want)]
    if case.op.startswith("add_"):
        pairs.append((ours[0], theirs[0]))
    if case.op == "rope_cache":
        pairs += [(ours[4], theirs[4]), (ours[5], theirs[5])]
    worst, equal = 0.0, 1.0
    for a, b in pairs:
        difference = (a.double() - b.double()).norm() / b.double().norm()
        worst = max(worst, float(difference)) if math.isfinite(float(difference)) else math.inf
        equal = min(equal, float((a == b).double().mean()))
    return {"error": worst, "equal": equal}


def backends(case: Case) -> dict[str, Callable[..., Any]]:
    """Registered backends that run here, and the case's own."""
    found: dict[str, Callable[..., Any]] = {}
    for name in BACKENDS[case.op]:
        function, reason = load(case.op, name, torch.device("cuda"))
        if function is None:
            print(f"  {case.op}/{name}: {reason}", flush=True)
        else:
            found[name] = function
    return found | case.extra


def run_case(case: Case, ceilings: Ceilings) -> Iterator[dict[str, Any]]:
    """One record per backend."""
    copies = max(2, min(32, math.ceil(ROTATE_BYTES / case.moved)))
    inputs = [case.make() for _ in range(copies)]
    floor = max(case.moved / ceilings.copy / 1e9, case.flops / ceilings.matmul / 1e9)
    for name, op in backends(case).items():
        record: dict[str, Any] = {"op": case.op, "shape": case.label, "backend": name}
        try:
            record |= error(op, inputs[0], case)
            record["ms"] = time_graph([lambda i=i, op=op: op(*i) for i in inputs])
        except Exception as problem:  # a backend that fails on a shape is a result, and the others still run
            yield record | {"failed": f"{type(problem).__name__}: {problem}"[:300]}
            continue
        ms = record["ms"]
        record |= {"tflops": case.flops / ms / 1e9, "tbs": case.moved / ms / 1e9, "share": floor / ms}
        yield record


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark; returns 1 when a backend failed or differs from the reference by more than 2%."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--only", default="", help="comma-separated operations")
    parser.add_argument("--out", type=Path, default=RESULTS / "kernels.json")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    ceilings = measure_ceilings()
    print(f"{machine().get('gpu')}: matmul {ceilings.matmul:.0f} TFLOP/s burst, {ceilings.matmul_sustained:.0f} sustained, "
          f"copy {ceilings.copy:.2f} TB/s", flush=True)  # fmt: skip
    only = set(filter(None, options.only.split(",")))
    importlib.import_module("rlinf_phyai.kernels")
    records = []
    with torch.inference_mode():
        for batch in map(int, options.batches.split(",")):
            for cases in (vision_cases, prefix_cases, suffix_cases):
                for case in cases(batch):
                    if not only or case.op in only:
                        records += run_case(case, ceilings)
                torch.cuda.empty_cache()
    write_json(options.out, {"ceilings": vars(ceilings), "records": records})
    bad = 0
    for r in records:
        if "failed" in r:
            print(f"{r['op']:17} {r['shape']:22} {r['backend']:10} FAILED {r['failed'][:120]}")
            bad += 1
            continue
        bad += r["error"] > 0.02
        print(f"{r['op']:17} {r['shape']:22} {r['backend']:10} {r['ms'] * 1e3:8.1f} us {r['tflops']:5.0f} TF/s "
              f"{r['tbs']:5.2f} TB/s {100 * r['share']:4.0f}% err {r['error']:.1e} eq {100 * r['equal']:5.1f}%")  # fmt: skip
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
