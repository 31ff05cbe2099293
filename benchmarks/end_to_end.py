# SPDX-License-Identifier: Apache-2.0
"""Where the time of a training step goes: the real training program on real LIBERO, phyai against stock RLinf.

    python -m benchmarks.end_to_end --checkpoint DIR                       # both backends, one after the other
    python -m benchmarks.end_to_end --checkpoint DIR --gpus 0,1            # both at the same time, a GPU each
    python -m benchmarks.end_to_end --checkpoint DIR --backends phyai --out a.json
    python -m benchmarks.end_to_end --merge a.json b.json                  # runs that were made apart
    python -m benchmarks.end_to_end --checkpoint checkpoints/tiny_pi05 --envs 2 --chunk-steps 2 --steps 2 \\
        --config libero_spatial_ppo_openpi_pi05_phyai_tiny                 # on a CPU

The recipe is cut to a size that one GPU does in a minute per step; seeds are the same for both backends. By default the
environments reset inside the step, so that the parts add up; ``--overlap`` resets while the actor trains, as the recipe does.
Arguments after ``--`` are Hydra overrides.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, write_json
from benchmarks.training_run import CONFIG_DIR, TrainingRun, train
from rlinf_phyai.run_summary import Series

CONFIG = "libero_spatial_ppo_openpi_pi05_phyai"
CHUNK = 5  # actions executed per prediction, in both configs

PARTS = {
    "environment reset": "simulator",
    "environment steps": "simulator",
    "predict": "ours",
    "rescoring": "ours",
    "training": "ours",
    "sync": "ours",
    "other": "RLinf",
}
"""Parts of a step and whose code it is: the simulator's; ``ours``, where this project replaces or changes RLinf's; RLinf's."""

METRICS = (
    "env/success_once",
    "train/actor/importance_sampling_weight",
    "train/actor/importance_sampling_effective_sample_size",
    "train/actor/rollout_train_logprob_gap",
    "train/actor/first_update/ratio_max_dev",
    "train/actor/approx_kl",
    "train/actor/clip_fraction",
    "train/actor/grad_norm",
)


def step_parts(scalars: dict[str, Series], overlap: bool) -> list[dict[str, float]]:
    """Seconds of every part of :data:`PARTS` and the ``total``, one dict per training step; the parts add up to it.

    With ``overlap``, the reset counts only as far as the step waits for it: what follows the rollout longer than training.
    """

    def at(tag: str, index: int) -> float:
        series = scalars.get(tag, [])
        return series[index][1] if index < len(series) else 0.0

    steps = []
    for index, (_, total) in enumerate(scalars.get("time/step", [])):
        generate, sync = at("time/generate_rollouts", index), at("time/sync_weights", index)
        advantages, training = at("time/cal_adv_and_returns", index), at("time/actor/run_training", index)
        parts = {
            "environment steps": at("time/env/env_interact_step", index),
            "predict": at("time/rollout/predict", index),
            "rescoring": at("time/actor/actor/recompute_logprobs", index),
            "training": training,
            "sync": sync,
        }
        if overlap:
            waited = max(total - sync - generate - advantages - training, 0.0)
            first = generate - parts["environment steps"] - parts["predict"] if index == 0 else 0.0
            parts["environment reset"] = waited + first
        else:
            parts["environment reset"] = at("time/env/env/bootstrap_step", index)
        parts["other"] = total - sum(parts.values())
        steps.append({name: parts[name] for name in PARTS} | {"total": total})
    return steps


def summary(run: TrainingRun | dict[str, Any], overlap: bool) -> dict[str, Any]:
    """A run for the JSON file: parts per step, their mean without the first step (which warms up), key metrics."""
    record = run.as_json() if isinstance(run, TrainingRun) else dict(run)
    scalars = record.pop("scalars")
    steps = step_parts(scalars, overlap)
    later = steps[1:] or steps
    record["steps"] = steps
    record["mean"] = (
        {name: statistics.fmean(step[name] for step in later) for name in (*PARTS, "total")} if later else {}
    )
    record["metrics"] = {tag: [value for _, value in scalars[tag]] for tag in METRICS if tag in scalars}
    record["timers"] = {tag: [value for _, value in s] for tag, s in sorted(scalars.items()) if tag.startswith("time/")}
    return record


def print_run(run: dict[str, Any]) -> None:
    """One backend: its start, its steps, its metrics."""
    gpu = f", GPU memory peak {run['gpu_memory_peak_gib']:.1f} GiB" if run.get("gpu_memory_peak_gib") else ""
    print(f"\n{run['backend']}: {run['status']} after {run['seconds']:.0f} s{gpu}")
    if run["milestones"]:
        print("  seconds after launch: " + ", ".join(f"{name} {t:.1f}" for name, t in run["milestones"].items()))
    names = [*PARTS, "total"]
    if run["steps"]:
        print("  step  " + "  ".join(f"{name:>17}" for name in names))
    for index, step in enumerate(run["steps"]):
        print(f"  {index:>4}  " + "  ".join(f"{step[name]:>15.2f} s" for name in names))
    for tag, values in run["metrics"].items():
        print(f"  {tag:<56}" + "".join(f"{value:>13.6g}" for value in values))
    for line in run["last_lines"]:
        print(f"  | {line}")


def print_comparison(runs: list[dict[str, Any]]) -> None:
    """The backends side by side, and what part of the step this project can change at all."""
    by_name = {run["backend"]: run["mean"] for run in runs if run["mean"]}
    if not by_name:
        return
    print(f"\n{'mean step':<20}" + "".join(f"{name:>16}" for name in by_name))
    for part in (*PARTS, "total"):
        print(f"{part:<20}" + "".join(f"{mean[part]:>14.2f} s" for mean in by_name.values()))
    for name, mean in by_name.items():
        sums = {owner: sum(mean[p] for p in PARTS if PARTS[p] == owner) for owner in ("simulator", "ours", "RLinf")}
        shares = {owner: f"{seconds:.2f} s ({seconds / mean['total']:.0%})" for owner, seconds in sums.items()}
        print(
            f"{name}: simulators {shares['simulator']}; predict, rescoring, training and sync, the parts that this project"
            f" works on, {shares['ours']}; the rest of RLinf's loop {shares['RLinf']}."
        )
    if {"phyai", "huggingface"} <= set(by_name):
        phyai, stock = by_name["phyai"], by_name["huggingface"]
        ours = [sum(mean[p] for p in PARTS if PARTS[p] == "ours") for mean in (phyai, stock)]
        print(
            f"phyai against stock: predict {_ratio(stock['predict'], phyai['predict'])}, parts that this project works on"
            f" {_ratio(ours[1], ours[0])}, whole step {_ratio(stock['total'], phyai['total'])}."
        )


def recipe_sizes(config: str) -> dict[str, int]:
    """Samples, episodes and updates of one training step of the config as it stands."""
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        cfg = compose(config)
    episodes = cfg.env.train.total_num_envs * cfg.env.train.rollout_epoch
    return {
        "environments": cfg.env.train.total_num_envs,
        "episodes": episodes,
        "samples": episodes * (cfg.env.train.max_steps_per_rollout_epoch // cfg.actor.model.num_action_chunks),
    }


def projection(mean: dict[str, float], sizes: dict[str, Any], recipe: dict[str, int]) -> dict[str, float]:
    """Seconds of a step of the whole recipe on the same machine, if every part grew in proportion.

    Resets grow with the episodes, the sync does not grow, all else grows with the samples. An upper bound for the models:
    the recipe's larger batches cost less per sample.
    """
    samples = recipe["samples"] / sizes["samples_per_step"]
    episodes = recipe["episodes"] / (sizes["environments"] * sizes["rollout_epochs"])
    factor = {"environment reset": episodes, "sync": 1.0}
    parts = {part: mean[part] * factor.get(part, samples) for part in PARTS}
    return {**parts, "total": sum(parts.values())}


def print_projection(result: dict[str, Any]) -> None:
    """The recipe's step by backend."""
    recipe = recipe_sizes(result["shapes"]["config"])
    for run in result["runs"]:
        if not run["mean"]:
            continue
        parts = projection(run["mean"], result["shapes"], recipe)
        print(
            f"{run['backend']}, projected in proportion to the recipe's {recipe['samples']} samples and"
            f" {recipe['episodes']} episodes a step: {parts['total']:.0f} s = "
            + " + ".join(f"{part} {parts[part]:.0f}" for part in PARTS)
        )


def _ratio(stock: float, ours: float) -> str:
    return f"{stock / ours:.2f} times as fast" if ours > 0 else "not measured"


def merge(files: list[Path]) -> dict[str, Any]:
    """One result out of several; of one backend the last file's run counts.

    Raises:
        ValueError: the files measured different shapes or GPUs, or are no results. OSError: one cannot be read.
    """
    results = [json.loads(file.read_text()) for file in files]
    for file, result in zip(files, results, strict=True):
        if not isinstance(result, dict) or not {"shapes", "machine", "runs"} <= result.keys():
            raise ValueError(f"{file} is no result of benchmarks.end_to_end.")
        for what, found, expected in (
            ("shapes", result["shapes"], results[0]["shapes"]),
            ("GPU", result["machine"].get("gpu"), results[0]["machine"].get("gpu")),
        ):
            if found != expected:
                raise ValueError(f"{file} measured other {what} ({found}) than {files[0]} ({expected}).")
    runs = {run["backend"]: run for result in results for run in result["runs"]}
    return {**results[-1], "runs": list(runs.values())}


def shapes(args: argparse.Namespace) -> dict[str, Any]:
    """Sizes of the run. Raises ``ValueError`` where the batch sizes do not divide the samples."""
    samples = args.envs * args.chunk_steps * args.epochs_per_step
    whole = args.global_batch or samples
    micro = args.micro_batch or max(size for size in range(1, min(whole, 128) + 1) if whole % size == 0)
    if samples % whole or whole % micro:
        raise ValueError(
            f"{samples} samples a step, global batch {whole}, micro-batch {micro}: each must divide the one before it."
        )
    return {
        "config": args.config,
        "environments": args.envs,
        "rollout_epochs": args.epochs_per_step,
        "chunk_steps": args.chunk_steps,
        "samples_per_step": samples,
        "global_batch": whole,
        "micro_batch": micro,
        "training_steps": args.steps,
        "overlap_env_bootstrap": args.overlap,
        "overrides": args.overrides,
    }


def overrides(args: argparse.Namespace, sizes: dict[str, Any]) -> list[str]:
    """Hydra overrides for these sizes."""
    return [
        f"actor.model.model_path={args.checkpoint.resolve()}",
        f"runner.max_epochs={args.steps}",
        "runner.save_interval=-1",
        f"runner.overlap_env_bootstrap={args.overlap}",
        f"env.train.total_num_envs={args.envs}",
        f"env.train.rollout_epoch={args.epochs_per_step}",
        f"env.train.max_episode_steps={args.chunk_steps * CHUNK}",
        f"env.train.max_steps_per_rollout_epoch={args.chunk_steps * CHUNK}",
        f"actor.global_batch_size={sizes['global_batch']}",
        f"actor.micro_batch_size={sizes['micro_batch']}",
        *args.overrides,
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--config", default=CONFIG)
    parser.add_argument("--backends", default="phyai,huggingface")
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--epochs-per-step", type=int, default=1)
    parser.add_argument("--chunk-steps", type=int, default=12)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--global-batch", type=int, help="default: all samples of a step")
    parser.add_argument("--micro-batch", type=int, help="default: the largest divisor up to 128")
    parser.add_argument("--overlap", action="store_true", help="environments reset while the actor trains")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="per backend")
    parser.add_argument("--gpus", help="one GPU per backend: then they run at the same time")
    parser.add_argument("--out", type=Path, default=RESULTS / "end_to_end.json")
    parser.add_argument("--plot", type=Path, help="PNG file; default: beside --out")
    parser.add_argument("--logs", type=Path, default=Path("logs/end_to_end"))
    parser.add_argument("--merge", type=Path, nargs="+", help="combine result files instead of running")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, after --")
    args = parser.parse_args()
    if not args.merge and not args.checkpoint:
        parser.error("--checkpoint is needed")
    for name in ("envs", "epochs_per_step", "chunk_steps", "steps", "global_batch", "micro_batch", "timeout_s"):
        value = getattr(args, name)
        if value is not None and not value >= 1:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    names = args.backends.split(",")
    if not all(names) or len(set(names)) < len(names):
        parser.error(f"--backends is {args.backends!r}; give different names, separated by commas")
    if args.gpus and not all(gpu.strip().isdecimal() for gpu in args.gpus.split(",")):
        parser.error(f"--gpus is {args.gpus!r}; give GPU numbers, separated by commas")
    return args


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs every backend; the result file is written after each, so that a later failure loses nothing."""
    sizes = shapes(args)
    names = args.backends.split(",")
    gpus = [int(gpu) for gpu in args.gpus.split(",")] if args.gpus else [None] * len(names)
    if len(gpus) != len(names):
        raise ValueError(f"--gpus {args.gpus} names {len(gpus)} GPUs for {len(names)} backends.")
    result: dict[str, Any] = {
        "benchmark": "end_to_end",
        "shapes": sizes,
        "at_the_same_time": bool(args.gpus),
        "runs": [],
    }

    def one(name: str, gpu: int | None) -> None:
        run = train(name, args.config, overrides(args, sizes), args.logs.resolve() / name, args.timeout_s, gpu)
        result["runs"].append(summary(run, args.overlap))
        write_json(args.out, result)

    pairs = zip(names, gpus, strict=True)
    if args.gpus:
        with ThreadPoolExecutor(max_workers=len(names)) as pool:
            for outcome in [pool.submit(one, *pair) for pair in pairs]:
                outcome.result()
    else:
        for pair in pairs:
            one(*pair)
    result["runs"].sort(key=lambda run: names.index(run["backend"]))
    return result


def main() -> None:
    from benchmarks.plot import draw_steps

    args = parse()
    try:
        result = merge(args.merge) if args.merge else measure(args)
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    write_json(args.out, result)
    for run in result["runs"]:
        print_run(run)
    print_comparison(result["runs"])
    print_projection(result)
    plot = args.plot or args.out.with_suffix(".png")
    if any(run["mean"] for run in result["runs"]):
        draw_steps(json.loads(args.out.read_text()), plot)
        print(f"wrote {args.out} and {plot}")
    if any(run["status"] != "ok" for run in result["runs"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
