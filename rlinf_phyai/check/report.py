# SPDX-License-Identifier: Apache-2.0
"""A check's result as a table, a JSON file and a picture."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from rlinf_phyai.check.compare import Result


def print_table(result: Result, console: Console | None = None) -> None:
    """One row per verdict; what failed says what that means."""
    console = console or Console()
    table = Table(title="Engine against actor", show_lines=False)
    for column in ("", "figure", "value", "allowed"):
        table.add_column(column)
    for verdict in result.verdicts:
        table.add_row("ok" if verdict.ok else "FAIL", verdict.name, f"{verdict.value:.4g}", verdict.limit)
    console.print(table)
    for verdict in result.verdicts:
        if not verdict.ok:
            console.print(f"FAIL: {verdict}", soft_wrap=True, markup=False, highlight=False)
    if result.cause is not None:
        console.print(f"Likely cause: {result.cause}.", soft_wrap=True, markup=False, highlight=False)
    samples = result.p.shape[0] * result.p.shape[1]
    console.print(f"{'PASS' if result.passed else 'FAIL'}: {samples} observations scored by both.")


def write_json(result: Result, path: Path) -> None:
    """Verdicts and all metrics."""
    content = {
        "passed": result.passed,
        "likely_cause": result.cause,
        "verdicts": [vars(verdict) for verdict in result.verdicts],
        "metrics": result.metrics,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def draw(result: Result, path: Path) -> None:
    """Both scores of every element against each other, and the distribution of their difference (PNG)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    p, q = result.p.flatten().double(), result.q.flatten().double()
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    scores, differences = figure.subplots(1, 2)
    limits = [float(torch.minimum(p, q).min()), float(torch.maximum(p, q).max())]
    scores.plot(limits, limits, color="0.7", linewidth=1)
    scores.scatter(q.numpy(), p.numpy(), s=6, alpha=0.5)
    scores.set_xlabel("engine's log-prob, nats per element")
    scores.set_ylabel("actor's log-prob")
    differences.hist((p - q).numpy(), bins=60)
    differences.set_xlabel("actor - engine, nats per element")
    differences.set_ylabel("elements")
    differences.set_title(f"mean |difference| {float((p - q).abs().mean()):.2e}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
