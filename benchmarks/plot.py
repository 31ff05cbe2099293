# SPDX-License-Identifier: Apache-2.0
"""Latency and throughput over batch size from ``benchmarks/results/engine.json``.

python -m benchmarks.plot
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.common import RESULTS

_LABELS = {"phyai": "engine", "eager": "actor, eager", "compile": "actor, torch.compile"}


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, default=RESULTS / "engine.json")
    parser.add_argument("--output", type=Path, default=Path("docs/images/engine_speed.png"))
    args = parser.parse_args()
    result = json.loads(args.input.read_text())
    figure, (latency, throughput) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for name, label in _LABELS.items():
        rows = [(row["batch"], row[name]["median"]) for row in result["rows"] if name in row]
        if not rows:
            continue
        batches, times = zip(*rows, strict=True)
        latency.plot(batches, times, marker="o", label=label)
        throughput.plot(batches, [1e3 * b / t for b, t in rows], marker="o", label=label)
    for axis, title in ((latency, "one rollout step, ms"), (throughput, "observations per second")):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks([row["batch"] for row in result["rows"]], [str(row["batch"]) for row in result["rows"]])
        axis.set_xlabel("batch size")
        axis.set_title(title)
        axis.grid(alpha=0.3)
    latency.legend()
    figure.suptitle(f"{result['machine'].get('gpu', 'CPU')}, bf16, {result['denoise_steps']} denoise steps, 2 cameras")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, dpi=130)


if __name__ == "__main__":
    main()
