# SPDX-License-Identifier: Apache-2.0
"""Time of one action-expert layer: fused launches against single operations, 18 layers x 3 steps in one CUDA graph.

python benchmarks/expert_layer.py [--batches 1,2,4,8,16,32,64] [--out benchmarks/results/expert_layer.json]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.common import RESULTS, write_json
from benchmarks.timing import time_graph
from rlinf_phyai.kernels import expert_layer as composed
from rlinf_phyai.kernels import resolve, torch_ops, triton_expert
from rlinf_phyai.kernels.triton_suffix_linear import SuffixGemm

LAYERS, STEPS, PREFIX, HORIZON, WIDTH, HIDDEN, HEADS, HEAD_DIM = 18, 3, 536, 10, 1024, 4096, 8, 256
SINGLE = ("ada_rms_norm", "add_ada_rms_norm", "gated_gelu", "rope_cache", "suffix_attention")


def rand(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random GPU tensor."""
    return torch.randn(*shape, device="cuda", dtype=dtype) * scale


def layers(batch: int) -> list[tuple[Any, ...]]:
    """Arguments of every layer behind x."""
    angle = torch.rand(1024, HEAD_DIM // 2, device="cuda") * 6.28
    rotary = (angle.cos().bfloat16(), angle.sin().bfloat16())
    starts = PREFIX - torch.randint(0, 9, (batch,), dtype=torch.int32, device="cuda")
    found = []
    for _ in range(LAYERS):
        shapes = ((HEADS + 2) * HEAD_DIM, WIDTH), (WIDTH, HEADS * HEAD_DIM), (2 * HIDDEN, WIDTH), (WIDTH, HIDDEN)
        weights = tuple(rand(n, k, scale=k**-0.5) for n, k in shapes)
        norms = [
            (rand(WIDTH, dtype=torch.float32), rand(WIDTH, dtype=torch.float32), rand(WIDTH, scale=0.2))
            for _ in range(2)
        ]
        caches = [rand(batch, PREFIX + HORIZON, 1, HEAD_DIM) for _ in range(2)]
        found.append((weights, *norms, rotary, starts, *caches, HEADS, HEAD_DIM**-0.5, 1e-6))
    return found


def gemm_variants() -> dict[str, dict[str, SuffixGemm]]:
    """Tile choices to compare for one sample: name -> kind of GEMM -> tiles."""
    return {
        "n16": {"qkv": SuffixGemm(16, 16, 256, 1, 2, 3), "gated": SuffixGemm(16, 16, 256, 1, 2, 3),
                "o": SuffixGemm(16, 16, 256, 2, 2, 4), "down": SuffixGemm(16, 16, 256, 2, 2, 4)},
        "k256": {"qkv": SuffixGemm(16, 32, 256, 1, 4, 3), "gated": SuffixGemm(16, 32, 256, 1, 4, 3),
                 "o": SuffixGemm(16, 32, 256, 4, 4, 2), "down": SuffixGemm(16, 32, 256, 4, 4, 4)},
        "s8": {"qkv": SuffixGemm(16, 32, 128, 1, 4, 5), "gated": SuffixGemm(16, 32, 128, 1, 4, 4),
               "o": SuffixGemm(16, 32, 128, 8, 4, 2), "down": SuffixGemm(16, 32, 128, 8, 4, 4)},
        "n64": {"qkv": SuffixGemm(16, 32, 128, 1, 4, 4), "gated": SuffixGemm(16, 64, 64, 1, 8, 4),
                "o": SuffixGemm(16, 64, 128, 8, 4, 2), "down": SuffixGemm(16, 64, 128, 8, 4, 4)},
    }  # fmt: skip


def with_tiles(tiles: dict[str, SuffixGemm] | None) -> Callable[[], None]:
    """Installs tile choices in place of the packaged table and returns the undo."""
    original = triton_expert.suffix_gemm_config

    def choose(
        rows: int, columns: int, inner: int, device: torch.device, element_size: int, gated: bool, may_split: bool
    ) -> SuffixGemm:
        assert tiles is not None
        return tiles["gated" if gated else "down" if inner == HIDDEN else "o" if may_split else "qkv"]

    if tiles is not None:
        triton_expert.suffix_gemm_config = choose

    def undo() -> None:
        triton_expert.suffix_gemm_config = original

    return undo


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,2,4,8,16,32,64")
    parser.add_argument("--out", type=Path, default=RESULTS / "expert_layer.json")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    device = torch.device("cuda")
    single, _ = resolve(dict.fromkeys(SINGLE, "triton"), device)
    split, _ = resolve(dict.fromkeys((*SINGLE, "suffix_linear"), "triton"), device)
    records = []
    for batch in map(int, options.batches.split(",")):
        work, counters, start = layers(batch), triton_expert.new_counters(device), rand(batch * HORIZON, WIDTH)
        contenders: dict[str, tuple[Callable[..., None], dict[str, Any], dict[str, SuffixGemm] | None]] = {
            "torch": (composed.expert_layer, {"kernels": torch_ops}, None),
            "triton+cublas": (composed.expert_layer, {"kernels": single}, None),
            "triton": (composed.expert_layer, {"kernels": split}, None),
            "fused": (triton_expert.expert_layer, {"counters": counters, "kernels": single}, None),
        }
        if batch == 1:
            for name, tiles in gemm_variants().items():
                extra = {"counters": counters}
                contenders[f"fused {name}"] = (triton_expert.expert_layer, extra, tiles)
        reference = start.clone()
        composed.expert_layer(reference, *work[0])
        for name, (layer, extra, tiles) in contenders.items():
            undo = with_tiles(tiles)
            record: dict[str, Any] = {"batch": batch, "contender": name}
            try:
                outputs = []
                for _ in range(3):
                    x = start.clone()
                    layer(x, *work[0], **extra)
                    outputs.append(x)
                record["error"] = float((outputs[0].double() - reference.double()).norm() / reference.double().norm())
                record["repeatable"] = all(torch.equal(outputs[0], o) for o in outputs)
                x = start.clone()
                calls = [lambda w=w, layer=layer, extra=extra, x=x: layer(x, *w, **extra) for w in work] * STEPS
                record["us_per_layer"] = 1e3 * time_graph(calls)
                record["counters_zero"] = not bool(counters.any())
                print(f"B={batch:3} {name:22} {record['us_per_layer']:7.1f} us/layer, x54 = {record['us_per_layer'] * 0.054:5.2f} ms, "
                      f"error {record['error']:.1e}, repeatable {record['repeatable']}", flush=True)  # fmt: skip
            except Exception as problem:  # one contender that fails must not hide the others
                record["failed"] = f"{type(problem).__name__}: {problem}"[:300]
                print(f"B={batch:3} {name:22} FAILED {record['failed'][:150]}", flush=True)
            finally:
                undo()
            records.append(record)
    write_json(options.out, {"records": records, "weights_bytes_per_layer": 2 * 17301504})
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        raise SystemExit(main())
