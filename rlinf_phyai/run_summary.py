# SPDX-License-Identifier: Apache-2.0
"""A run's key metrics and timers, read from its TensorBoard event file: as a table, as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

#: One scalar of a run: its values by training step, in order.
Series = list[tuple[int, float]]

#: What to look at first, and what it says.
KEY_METRICS = {
    "env/success_once": "share of episodes that solved the task",
    "env/return": "summed reward of an episode",
    "train/actor/importance_sampling_weight": "mean weight exp(actor - engine), before the cap; 1 = they agree",
    "train/actor/importance_sampling_clip_fraction": "share of weights over the cap; about half is rounding noise",
    "train/actor/importance_sampling_effective_sample_size": "share of the samples that count; 1 = all",
    "train/actor/rollout_train_logprob_gap": "mean |actor - engine| of a log-prob element; 0 = they agree",
    "train/actor/first_update/ratio_max_dev": "largest |PPO ratio - 1| before learning; 0 = exact",
    "train/actor/approx_kl": "how far the update moved the policy",
    "train/actor/policy_loss": "clipped policy loss",
    "train/critic/value_loss": "value loss",
    "train/actor/grad_norm": "gradient norm before clipping",
}
#: Where a step's time goes.
KEY_TIMERS = {
    "time/step": "one training step, all of it",
    "time/env/env/bootstrap_step": "resetting the simulators (the first time: building them)",
    "time/generate_rollouts": "collecting the rollouts: simulators and engine",
    "time/env/env_interact_step": "simulator steps",
    "time/rollout/predict": "engine: observations in, actions out",
    "time/actor/actor/recompute_logprobs": "actor: rescoring the sampled actions",
    "time/actor/run_training": "actor: the update",
    "time/sync_weights": "new weights to the engines",
}
TIMER_PREFIX = "time/"
EVALUATION_PREFIX = "eval/"


def read_scalars(directory: Path) -> dict[str, Series]:
    """All scalars below a log folder, by tag.

    Raises:
        FileNotFoundError: no event file below ``directory``, or none that holds a scalar.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = sorted(directory.rglob("events.out.tfevents.*"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise FileNotFoundError(f"no TensorBoard event file (events.out.tfevents.*) below {directory}")
    scalars: dict[str, Series] = {}
    for file in files:
        events = EventAccumulator(str(file), size_guidance={"scalars": 0})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            scalars.setdefault(tag, []).extend((event.step, event.value) for event in events.Scalars(tag))
    if not scalars:
        raise FileNotFoundError(f"{files[0]} holds no scalar: no training step was finished, or it is no event file")
    return scalars


def print_table(scalars: Mapping[str, Series], directory: Path, every: bool = False) -> None:
    """Prints the key metrics (or all) and the timers: first value, last value, meaning. Of an evaluation: what it measured."""
    from rich.console import Console

    console = Console()
    # A pipe has no width of its own, and half a metric name helps nobody.
    console = Console(width=max(console.width, 150))
    if all(tag.startswith(EVALUATION_PREFIX) for tag in scalars):
        console.print(_evaluation_table(scalars, directory))
        for file in sorted(directory.rglob("evaluation.json")):
            console.print(f"every episode, and the rates with their intervals: {file}", soft_wrap=True)
    else:
        console.print(_training_table(scalars, directory, every))


def _training_table(scalars: Mapping[str, Series], directory: Path, every: bool) -> Table:
    from rich.table import Table

    steps = {step for series in scalars.values() for step, _ in series}
    table = Table(title=f"{directory.name}: {len(steps)} steps", title_justify="left")
    for heading in ("metric", "first", "last"):
        table.add_column(heading, justify="left" if heading == "metric" else "right", no_wrap=True)
    table.add_column("meaning")
    groups = (
        (KEY_METRICS, "", [tag for tag in scalars if not tag.startswith(TIMER_PREFIX)]),
        (KEY_TIMERS, "s", [tag for tag in scalars if tag.startswith(TIMER_PREFIX)]),
    )
    for known, unit, present in groups:
        for tag in sorted(present) if every else [tag for tag in known if tag in scalars]:
            (_, first), (step, last) = scalars[tag][0], scalars[tag][-1]
            # What was measured at the first step alone has no value at the last one.
            shown = _number(last, unit) if step == max(steps) else ""
            table.add_row(tag, _number(first, unit), shown, known.get(tag, ""))
        table.add_section()
    return table


def _evaluation_table(scalars: Mapping[str, Series], directory: Path) -> Table:
    from rich.table import Table

    table = Table(title=f"{directory.name}: an evaluation", title_justify="left")
    table.add_column("metric", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    for tag in sorted(scalars):
        table.add_row(tag, _number(scalars[tag][-1][1]))
    return table


def draw(scalars: Mapping[str, Series], file: Path) -> None:
    """Draws the key metrics that the run has, one small panel each, into a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tags = [tag for tag in KEY_METRICS if tag in scalars]
    if not tags:
        raise ValueError(f"none of the key metrics is among the run's scalars: {', '.join(sorted(scalars)) or 'none'}")
    columns = min(4, len(tags))
    rows = -(-len(tags) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3.1 * columns, 2.1 * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[len(tags) :]:
        axis.axis("off")
    for axis, tag in zip(axes.flat, tags, strict=False):
        steps, values = zip(*scalars[tag], strict=True)
        axis.plot(steps, values, marker="o", markersize=3, color="#1f6f8b")
        axis.set_title(tag.removeprefix("train/"), fontsize=8)
        axis.ticklabel_format(useOffset=False)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("training step", fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _number(value: float, unit: str = "") -> str:
    text = f"{value:.2f}" if unit else f"{value:.6g}"
    return f"{text} {unit}".rstrip()
