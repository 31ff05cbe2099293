# SPDX-License-Identifier: Apache-2.0
"""A whole training step at the full recipe, from parts that were measured apart: phyai and stock RLinf, with and without rescoring.

    python -m benchmarks.projection --end-to-end benchmarks/results/end_to_end.json
    python -m benchmarks.projection --environment-s 90 --sync-s 1.5          # without such a run

Everything is for one GPU, on which rollout, rescoring and training take turns. With E environments, R epochs and T chunk steps there are
S = E R T samples (64 x 8 x 48 = 24,576), and a step takes, in seconds::

    rollout    R T call(E) + R value(E)     call: one batch of E, benchmarks.engine; value: of an epoch's last observation
               value(E) is a whole call for stock RLinf; where the rollout supplies all values, every call computes one
    rescoring  S rescoring                  per sample, benchmarks.actor
    training   S training + collection      per sample; Python's garbage collection runs once a step
    other      environment, sync            benchmarks.end_to_end, scaled as its own projection scales them; or as given

Left out: the CPU transforms of stock RLinf's rollout, and what overlaps (``runner.overlap_env_bootstrap``).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import RESULTS, write_json
from benchmarks.end_to_end import CONFIG, projection, recipe_sizes

COLLECTION = "garbage collection, once a step"  # a stage of benchmarks.actor


@dataclass(frozen=True)
class Recipe:
    """``environments`` E, ``epochs`` R, ``chunk_steps`` T."""

    environments: int
    epochs: int
    chunk_steps: int

    @property
    def samples(self) -> int:
        return self.environments * self.epochs * self.chunk_steps


@dataclass(frozen=True)
class Variant:
    """A way to run a step. ``rescoring`` and ``training`` name choices of benchmarks.actor."""

    name: str
    backend: str
    rescoring: str | None
    training: str
    rollout_values: bool = True


VARIANTS = (
    Variant("stock RLinf", "eager", None, "dense"),
    Variant("stock RLinf, rescoring", "eager", "dense", "dense"),
    Variant("phyai, no rescoring", "phyai", None, "dense"),
    Variant("phyai, rescoring on real tokens", "phyai", "real_tokens", "real_tokens", False),
    Variant("phyai, rescoring fused", "phyai", "fused", "fused", False),
    Variant("phyai, fused, all prefixes kept", "phyai", "fused+cache", "fused+cache", False),
)


def rollout_seconds(engine: dict[str, Any], recipe: Recipe, variant: Variant) -> float:
    """Seconds of all predictions of a step.

    Raises:
        ValueError: the engine benchmark has no batch of that size, or not of that backend.
    """
    rows = {row["batch"]: row for row in engine["rows"]}
    call = rows.get(recipe.environments, {}).get(variant.backend)
    if call is None:
        raise ValueError(
            f"the engine benchmark has no {variant.backend} row for a batch of {recipe.environments}; it has batches {sorted(rows)}."
        )
    calls = recipe.epochs * recipe.chunk_steps
    if variant.backend == "eager":
        return (calls + recipe.epochs) * call["median"] / 1e3  # its value is always computed
    size = max(engine["stages"], key=int)
    ms = {name: stage["ms"] / int(size) * recipe.environments for name, stage in engine["stages"][size].items()}
    with_value = ms["prefix_value"] - ms["prefix"] if variant.rollout_values else 0.0
    alone = ms["vision"] + ms["prefix_value"]
    return (calls * (call["median"] + with_value) + recipe.epochs * alone) / 1e3


def project(engine: dict[str, Any], actor: dict[str, Any], other: dict[str, dict[str, float]], recipe: Recipe) -> dict:
    """Seconds by variant and part; a variant whose actor choices were not measured is left out.

    Args:
        engine, actor: contents of the benchmarks' JSON files.
        other: by backend (``eager``, ``phyai``), parts that are taken as they are.
    """
    found: dict[str, dict[str, float]] = {}
    for variant in VARIANTS:
        if any(choice is not None and choice not in actor for choice in (variant.rescoring, variant.training)):
            continue
        trained = actor[variant.training]
        collection = trained.get("training_stages", {}).get(COLLECTION, 0.0)
        parts = {
            "rollout": rollout_seconds(engine, recipe, variant),
            "rescoring": 0.0,
            "training": recipe.samples * (trained["training_ms_per_observation"] - collection) / 1e3
            + collection * int(actor["arguments"]["samples"]) / 1e3,
            **other[variant.backend],
        }
        if variant.rescoring is not None:
            parts["rescoring"] = recipe.samples * actor[variant.rescoring]["rescoring_ms_per_observation"] / 1e3
        found[variant.name] = {**parts, "total": sum(parts.values())}
    return found


def measured_elsewhere(end_to_end: dict[str, Any], sizes: dict[str, int]) -> dict[str, dict[str, float]]:
    """Environment, sync and RLinf's own share of a real run, scaled to the recipe."""
    names = {"phyai": "phyai", "huggingface": "eager"}
    kept = ("environment reset", "environment steps", "sync", "other")
    scaled = {
        names[run["backend"]]: projection(run["mean"], end_to_end["shapes"], sizes)
        for run in end_to_end["runs"]
        if run["mean"]
    }
    return {backend: {part: parts[part] for part in kept} for backend, parts in scaled.items()}


def print_table(projected: dict[str, dict[str, float]], recipe: Recipe) -> None:
    """One row per variant."""
    parts = list(next(iter(projected.values())))
    table = Table(title=f"A step of {recipe.samples:,} samples on one GPU, seconds")
    for column in ("", *parts, "against stock"):
        table.add_column(column)
    first = next(iter(projected.values()))["total"]
    for name, row in projected.items():
        table.add_row(name, *(f"{row[part]:.1f}" for part in parts), f"{first / row['total']:.2f} x")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=Path, default=RESULTS / "engine.json")
    parser.add_argument("--actor", type=Path, default=RESULTS / "actor_mb128.json")
    parser.add_argument("--end-to-end", type=Path, help="takes the place of the next two")
    parser.add_argument("--environment-s", type=float, default=0.0, help="all simulation of a step")
    parser.add_argument("--sync-s", type=float, default=0.0)
    parser.add_argument("--environments", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--chunk-steps", type=int, default=48)
    parser.add_argument("--output", type=Path, default=RESULTS / "projection.json")
    args = parser.parse_args()

    recipe = Recipe(args.environments, args.epochs, args.chunk_steps)
    engine, actor = (json.loads(path.read_text()) for path in (args.engine, args.actor))
    if args.end_to_end:
        other = measured_elsewhere(json.loads(args.end_to_end.read_text()), recipe_sizes(CONFIG))
    else:
        given = {"environment": args.environment_s, "sync": args.sync_s}
        other = {"eager": given, "phyai": given}
    projected = project(engine, actor, other, recipe)
    print_table(projected, recipe)
    sources = {
        name: json.loads(path.read_text())["machine"] for name, path in (("engine", args.engine), ("actor", args.actor))
    }
    write_json(
        args.output, {"benchmark": "projection", "recipe": asdict(recipe), "sources": sources, "seconds": projected}
    )


if __name__ == "__main__":
    main()
