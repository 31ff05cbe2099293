# SPDX-License-Identifier: Apache-2.0
"""Pictures of results: latency and throughput over batch size (``engine.json``), parts of a training step.

python -m benchmarks.plot
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS

_STEP_COLORS = ("#bdbdbd", "#dedede", "#1f6f8b", "#5aa9c4", "#f2a65a", "#c8553d", "#f0efeb")  # greys: the simulators
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


def draw_steps(result: dict[str, Any], file: Path) -> None:
    """Stacked bars of ``benchmarks.end_to_end``: the mean step of every backend, part by part."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = [run for run in result["runs"] if run["mean"]]
    labels = [{"huggingface": "stock RLinf"}.get(run["backend"], run["backend"]) for run in runs]
    figure, axis = pyplot.subplots(figsize=(9, 1.4 + 0.7 * len(runs)), layout="constrained")
    left = [0.0] * len(runs)
    parts = [name for name in runs[0]["mean"] if name != "total"]
    for part, color in zip(parts, _STEP_COLORS, strict=True):
        widths = [max(run["mean"][part], 0.0) for run in runs]
        bars = axis.barh(labels, widths, left=left, label=part, color=color)
        axis.bar_label(
            bars, [f"{w:.1f}" if w > 0.02 * runs[0]["mean"]["total"] else "" for w in widths], label_type="center"
        )
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axis.invert_yaxis()
    axis.set_xlabel("seconds of a training step")
    axis.legend(ncols=4, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1))
    sizes = result["shapes"]
    figure.suptitle(
        f"{result['machine'].get('gpu', 'CPU')}, {sizes['environments']} environments,"
        f" {sizes['samples_per_step']} samples a step",
        fontsize=10,
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)


if __name__ == "__main__":
    main()
