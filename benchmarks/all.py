# SPDX-License-Identifier: Apache-2.0
"""Every GPU test and benchmark in one unattended call: each part is a process of its own with its own time limit, its output goes to
``<out>/logs/<part>.txt``, its figures to JSON files, and a summary comes last.

    python -m benchmarks.all --out benchmarks/results
    python -m benchmarks.all --parts tests,engine,fp8 --budget 540

``--budget`` bounds the whole call: parts that no longer fit are listed as skipped, a running one is stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS

ROOT = Path(__file__).resolve().parents[1]
Result = dict[str, Any]

FP8 = ("--prefix-precision", "fp8")
OWN = ("--contenders", "phyai")


@dataclass(frozen=True)
class Part:
    """One process.

    Attributes:
        arguments: of ``python -m``.
        seconds: time limit.
        figures: lines for the summary from the JSON that the process wrote.
        output: name of that JSON file; None where there is none.
        checkpoint: takes the random checkpoint that the session makes once, instead of making its own.
    """

    arguments: tuple[str, ...]
    seconds: int
    figures: Callable[[Result], str] = lambda _: ""
    output: str | None = None
    checkpoint: bool = False


def engine(output: str, *arguments: str, seconds: int = 150) -> Part:
    return Part(("benchmarks.engine", *arguments), seconds, engine_figures, output, OWN[1] in arguments)


def engine_figures(result: Result) -> str:
    """Milliseconds of each batch size and contender."""
    contenders = [name for name in ("phyai", "eager", "compile") if any(name in row for row in result["rows"])]
    lines = [
        f"{name} " + " ".join(f"B{row['batch']}={row[name]['median']:.2f}" for row in result["rows"] if name in row)
        for name in contenders
    ]
    stages = [
        f"B{batch}: " + " ".join(f"{name}={part['ms']:.2f}" for name, part in parts.items())
        for batch, parts in result.get("stages", {}).items()
    ]
    return "\n".join(lines + stages)


def parity_figures(result: Result) -> str:
    rows = [
        f"B{row['batch']} step {row['step']}: |p-q| {own['abs_gap_mean']:.4f} KL {own['kl_per_chunk']:.1e} "
        f"w {own['chunk_weight_mean']:.3f} ESS {own['effective_sample_size']:.4f} value {own['value_gap_max']:.3f}"
        for row in result["rows"]
        for own in (row["phyai"],)
    ]
    checks = result["checks"]
    same = all(value for name, value in checks.items() if name.startswith("graph_equals_eager"))
    return "\n".join([*rows, f"graphs equal eager: {same}, digest {checks['digest'][:16]}"])


def predict_figures(result: Result) -> str:
    rows = [
        f"B{row['batch']}: predict {row['predict']:.2f} (best {row['predict_best']:.2f}) step {row['rollout_step']:.2f} "
        f"(+{row['overhead_percent']:.1f}%) "
        f"inputs {row['inputs']:.2f} plan {row['plan']:.2f} replay {row['replay']:.2f} to_host {row['to_host']:.2f}"
        for row in result["rows"]
    ]
    return "\n".join([f"resize exact: {result['resize_exact']}", *rows])


def sync_figures(result: Result) -> str:
    rows = [f"{row['what']} {row['ms']:.2f} ms" for row in result["rows"]]
    return ", ".join(rows) + f"; {result['checks']}"


def actor_figures(result: Result) -> str:
    lines = []
    for name, row in result.items():
        if not isinstance(row, dict) or "rescoring_ms_per_observation" not in row:
            continue
        deviation = row["metrics"]["actor/first_update/ratio_max_dev"]
        gap = row.get("logprob_gap_to_dense", {}).get("mean", 0.0)
        lines.append(
            f"{name}: ratio max dev {deviation:g}, gap to dense {gap:.5f}, peak {row.get('peak_gib', 0):.1f} GiB"
        )
        for part in ("rescoring", "training"):
            stages = ", ".join(f"{stage} {ms:.2f}" for stage, ms in row[f"{part}_stages"].items())
            lines.append(f"  {part} {row[f'{part}_ms_per_observation']:.2f} ms/obs: {stages}")
    return "\n".join(lines)


def kernel_figures(result: Result) -> str:
    """The fastest backends of each case."""
    cases: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for record in result["records"]:
        label = record.get("backend", "failed")
        cases.setdefault((record["op"], record["shape"]), []).append((record.get("ms", 1e9) * 1e3, label))
    return "\n".join(
        f"{op} {shape}: " + ", ".join(f"{name} {us:.1f} us" for us, name in sorted(found)[:5])
        for (op, shape), found in cases.items()
    )


def gemm_figures(result: Result) -> str:
    """The two fastest variants of each product."""
    shown = ("error", "same", "warps", "registers")
    cases: dict[tuple[str, int], list[Result]] = {}
    for record in result["records"]:
        cases.setdefault((record["name"], record["rows"]), []).append(record)
    lines = []
    for (name, rows), records in cases.items():
        variants = [
            f"{r['ms'] * 1e3:.1f} us" + (f" {r['tflops']:.0f} TFLOP/s" if r["tflops"] else "")
            + "".join(f" {key}={r[key]:.3g}" for key in shown if isinstance(r.get(key), int | float))
            for r in sorted((r for r in records if isinstance(r.get("ms"), float)), key=lambda r: r["ms"])
        ]  # fmt: skip
        failed = [r["failed"][:100] for r in records if "failed" in r]
        lines.append(f"{name} M={rows}: " + " | ".join(variants[:2] + failed[:1]))
    return "\n".join(lines)


def pytest_part(seconds: int, *arguments: str) -> Part:
    return Part(("pytest", "-q", "-p", "no:cacheprovider", *arguments), seconds)


SOME = ("--batches", "1,8,32", "--stage-batches", "1,8,32")
PARTS: dict[str, Part] = {
    "tests": pytest_part(240, "tests/gpu"),
    "engine_tests": pytest_part(240, "tests/unit/engine", "-m", "gpu"),
    "fp8": engine("engine_fp8", *OWN, *FP8, "--batches", "1,8,32,64"),
    "engine": engine("engine", "--contenders", "phyai,eager", seconds=240),
    "predict": Part(("benchmarks.predict",), 120, predict_figures, "predict"),
    "gemms": Part(("benchmarks.gemms", "--parts", "fp8,split"), 240, gemm_figures, "gemms_fp8"),
    "kernels": Part(
        ("benchmarks.kernels", "--only", "attention", "--batches", "1,2,4,8"), 180, kernel_figures,
        "kernels_attention",
    ),
    "parity_fp8": Part(("benchmarks.parity", *FP8), 150, parity_figures, "parity_fp8"),
    "parity": Part(("benchmarks.parity",), 150, parity_figures, "parity"),
    "parity_again": Part(("benchmarks.parity", "--batches", "32"), 120, parity_figures, "parity_again"),
    "weight_sync": Part(("benchmarks.weight_sync", "--syncers", "bucket,patch"), 120, sync_figures, "weight_sync"),
    "weight_sync_fp8": Part(("benchmarks.weight_sync", *FP8), 120, sync_figures, "weight_sync_fp8"),
    "actor": Part(("benchmarks.actor", "--micro-batch", "128"), 300, actor_figures, "actor_mb128"),
    "compile": engine(
        "engine_compile", "--contenders", "phyai,eager,compile", "--compile-batches", "1,8,32", *SOME, seconds=560
    ),
}  # fmt: skip
"""In the order of what is wanted first."""


_SHORT_OPTION = ("benchmarks.kernels", "benchmarks.gemms")
"""Benchmarks whose output option is ``--out``."""


def run(part: Part, out: Path, log: Path, limit: float, checkpoint: Path) -> tuple[str, float]:
    """Runs a part; returns how it ended and its seconds."""
    command = [sys.executable, "-m", *part.arguments]
    if part.output is not None:
        command += ["--out" if part.arguments[0] in _SHORT_OPTION else "--output", str(out / f"{part.output}.json")]
    if part.checkpoint and (checkpoint / "config.json").is_file():
        command += ["--checkpoint", str(checkpoint)]
    # What other packages plug into pytest is not needed, and a machine may hold half of it.
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    begin = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"stopped after {limit:.0f} s", time.monotonic() - begin
    return ("ok" if code == 0 else f"exit {code}"), time.monotonic() - begin


def summary(part: Part, out: Path, log: Path, status: str) -> str:
    """What the summary says of a part that has run."""
    text = log.read_text(errors="replace")
    if part.arguments[0] == "pytest":
        failed = re.findall(r"^(?:FAILED|ERROR) (.*)", text, re.MULTILINE)
        return "\n".join([(text.strip().splitlines() or ["no output"])[-1], *failed[:12]])
    lines = []
    file = out / f"{part.output}.json"
    if file.is_file():
        try:
            lines.append(part.figures(json.loads(file.read_text())))
        except (KeyError, ValueError) as problem:
            lines.append(f"{file.name} is incomplete: {problem!r}")
    if status != "ok":
        lines += text.strip().splitlines()[-3:]
    return "\n".join(lines)


def digests(out: Path) -> str | None:
    """Whether two processes gave the same bits."""
    files = [out / f"{PARTS[name].output}.json" for name in ("parity", "parity_again")]
    if not all(file.is_file() for file in files):
        return None
    first, second = (json.loads(file.read_text())["checks"]["digest"] for file in files)
    return "same bits in two processes" if first == second else "two processes gave DIFFERENT bits"


def main() -> int:
    """Returns 1 when a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the JSON files and logs")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds for everything")
    args = parser.parse_args()
    names = [name for name in args.parts.split(",") if name]
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        parser.error(f"unknown parts {', '.join(unknown)}; there are: {', '.join(PARTS)}")
    logs = args.out.resolve() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.budget
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as scratch:
        if sum(PARTS[name].checkpoint for name in names) > 1:
            make = "import sys; from rlinf_phyai.models.pi05.random_checkpoint import make_random_checkpoint as make"
            subprocess.run(
                [sys.executable, "-c", f"{make}; make(sys.argv[1], device='cuda')", scratch], cwd=ROOT, check=False
            )
        return session(args, names, end, Path(scratch))


def session(args: argparse.Namespace, names: list[str], end: float, checkpoint: Path) -> int:
    """Runs the parts and prints the summary; returns 1 when a part failed."""
    logs = args.out.resolve() / "logs"
    table: list[str] = []
    failures = 0
    for name in names:
        part, left = PARTS[name], end - time.monotonic()
        if left < 15:
            table.append(f"== {name}: skipped, no time left")
            failures += 1
            continue
        out, log = args.out.resolve(), logs / f"{name}.txt"
        if part.output is not None:
            (out / f"{part.output}.json").unlink(missing_ok=True)  # or an old result would pass for a new one
        status, seconds = run(part, out, log, min(part.seconds, left), checkpoint)
        failures += status != "ok"
        print(f"{name}: {status}, {seconds:.0f} s", flush=True)
        table.append(f"== {name}: {status}, {seconds:.0f} s\n{summary(part, out, log, status)}")
    same = digests(args.out.resolve()) if {"parity", "parity_again"} & set(names) else None
    if same:
        table.append(f"== parity twice: {same}")
    print("\n" + "\n".join(table))
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
