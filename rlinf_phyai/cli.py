# SPDX-License-Identifier: Apache-2.0
"""The ``rlinf-phyai`` command. Each subcommand imports what it needs when it runs, so ``--help`` stays quick."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from rlinf_phyai import __version__

app = typer.Typer(
    name="rlinf-phyai",
    help="Tools around the PI0.5 rollout engine for RLinf.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


@app.command()
def doctor(
    config: Annotated[
        str | None, typer.Argument(help="Also check this training config: a name in --config-path, or a .yaml file.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="Hydra overrides, key=value.")] = None,
    config_path: Annotated[
        str | None, typer.Option(help="Folder of the config. Default: examples/embodiment/config.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Estimate memory for this many GPUs instead of those found here.")
    ] = None,
    gpu_memory: Annotated[
        float | None, typer.Option(min=0.1, help="GiB of each GPU, instead of what is found here.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the findings into this file.")] = None,
    only_config: Annotated[
        bool, typer.Option("--only-config", help="Leave out the checks of the installation.")
    ] = False,
) -> None:
    """Check the installation part by part, and a config against this machine; exits with 1 if a run could not start."""
    from dataclasses import replace

    from rlinf_phyai import doctor, environment
    from rlinf_phyai.doctor import report, run_config

    if only_config and config is None:
        raise typer.BadParameter("--only-config needs a config")
    environment.set_defaults()
    findings: list[doctor.Finding] = []
    memory: dict[str, Any] = {}
    if not only_config:
        findings += doctor.run_all(doctor.CHECKS, lambda part: typer.echo(f"checking {part} ...", err=True))
    if config is not None:
        machine = run_config.Machine.here()
        machine = replace(machine, gpus=gpus or machine.gpus, gpu_gib=gpu_memory or machine.gpu_gib)
        findings += run_config.findings(config, overrides or [], config_path, machine, memory)
    report.print_table(findings)
    if json_file is not None:
        with _explained_write("findings", json_file):
            report.write_json(findings, memory, json_file)
    if not report.passed(findings):
        raise typer.Exit(1)


class _Model(StrEnum):
    PI05 = "pi05"
    PI0 = "pi0"


@app.command("make-tiny-checkpoint")
def make_tiny_checkpoint(
    directory: Annotated[Path, typer.Argument(help="Folder to write; made if missing.")],
    model: Annotated[
        _Model, typer.Option(help="pi0: for the examples whose name has pi0 instead of pi05.")
    ] = _Model.PI05,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Seed of the random weights: the same seed, the same bytes.")
    ] = 0,
) -> None:
    """Write a small random PI0.5 or PI0 checkpoint that RLinf and the engine both load, for trying things on a CPU."""
    from rlinf_phyai.models.pi05 import tiny
    from rlinf_phyai.models.pi05.stated_sizes import TINY_SIZES

    with _explained_write("checkpoint", directory):
        _keep_foreign_weights(directory)
        tiny.make_tiny_checkpoint(directory, seed=seed, config=TINY_SIZES[model])
    name = "PI0" if model is _Model.PI0 else "PI0.5"
    typer.echo(f"{directory}: tiny {name} checkpoint, {_mebibytes(directory):.1f} MiB, seed {seed}")


class _Size(StrEnum):
    FULL = "full"
    SHALLOW = "shallow"
    TINY = "tiny"


@app.command("make-random-checkpoint")
def make_random_checkpoint(
    directory: Annotated[Path, typer.Argument(help="Folder to write; made if missing.")],
    size: Annotated[
        _Size,
        typer.Option(
            help="full: the published size, 8 GB. shallow: its widths with two layers, 1.3 GB. tiny: 3 MB, as make-tiny-checkpoint."
        ),
    ] = _Size.FULL,
    device: Annotated[
        str | None,
        typer.Option(help="Where full-size numbers are drawn: cuda or cpu. Default: cuda where there is one."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the random weights.")] = 0,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="SentencePiece model to copy. Default: a small one, trained on LIBERO's tasks.",
        ),
    ] = None,
) -> None:
    """Write a random PI0.5 checkpoint that RLinf and the engine both load: a smoke run at full size without a download."""
    import torch

    from rlinf_phyai.models.pi05 import random_checkpoint, tiny

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.partition(":")[0] not in ("cuda", "cpu") or (device != "cpu" and not torch.cuda.is_available()):
        typer.echo(
            f"--device is {device!r}; available here: {'cuda, ' if torch.cuda.is_available() else ''}cpu", err=True
        )
        raise typer.Exit(2)
    if tokenizer is not None and size is not _Size.FULL:
        typer.echo(
            f"--tokenizer goes with --size full: the {size} model's vocabulary is that of its own tokenizer", err=True
        )
        raise typer.Exit(2)
    with _explained_write("checkpoint", directory):
        _keep_foreign_weights(directory)
        if size is _Size.FULL:
            random_checkpoint.make_random_checkpoint(directory, seed=seed, device=device, tokenizer=tokenizer)
        else:
            sizes = random_checkpoint.SHALLOW if size is _Size.SHALLOW else None
            tiny.make_tiny_checkpoint(directory, seed=seed, config=sizes)
    typer.echo(f"{directory}: {size} random PI0.5 checkpoint, {_mebibytes(directory):.1f} MiB, seed {seed}")


@contextmanager
def _explained_write(what: str, place: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a full disk
        typer.echo(f"cannot write the {what} to {place}: {error}", err=True)
        raise typer.Exit(1) from error


def _keep_foreign_weights(directory: Path) -> None:
    """Random weights must neither replace a real checkpoint's nor lie beside them.

    Raises:
        FileExistsError: the folder holds weights that these commands did not write.
    """
    from rlinf_phyai.models.pi05.tiny import is_random_checkpoint

    weights = [file for pattern in ("*.safetensors", "**/full_weights.pt") for file in directory.glob(pattern)]
    if weights and not is_random_checkpoint(directory):
        raise FileExistsError(f"it holds {weights[0].relative_to(directory)}, which is not random; name another folder")


def _mebibytes(directory: Path) -> float:
    from rlinf_phyai.checkpoints import size

    return size(directory) / 2**20


@app.command()
def check(
    config: Annotated[str, typer.Argument(help="Training config: a name in --config-path, or a .yaml file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Hydra overrides, key=value.")] = None,
    config_path: Annotated[
        str | None, typer.Option(help="Folder of the config. Default: examples/embodiment/config.")
    ] = None,
    envs: Annotated[int, typer.Option(min=1, help="Observations per batch.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Chunk steps.")] = 4,
    random: Annotated[bool, typer.Option("--random", help="Random observations instead of the simulator's.")] = False,
    limit: Annotated[list[str] | None, typer.Option(help="Replace a limit: name=value, such as kl=0.01.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for check.json and check.png.")] = Path("logs/check"),
) -> None:
    """Score the same observations with engine and actor; exits with 1 where they disagree."""
    from rlinf_phyai.actor.limits import Limits
    from rlinf_phyai.check import report
    from rlinf_phyai.check.run import run_check
    from rlinf_phyai.config_files import load_config
    from rlinf_phyai.errors import PhyaiError

    try:
        limits = dict(_pair(item) for item in limit or [])
        Limits().replaced(limits)  # names and values, before anything is built
        cfg = load_config(config, overrides or [], config_path)
        result = run_check(cfg, envs=envs, steps=steps, limits=limits, simulator=not random)
    except (PhyaiError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    report.print_table(result)
    with _explained_write("result", output):
        report.write_json(result, output / "check.json")
        report.draw(result, output / "check.png")
    typer.echo(f"wrote {output / 'check.json'} and {output / 'check.png'}")
    if not result.passed:
        raise typer.Exit(1)


def _pair(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise ValueError(f"--limit {text!r}: give name=value with a number, such as kl=0.01.") from None


@app.command("show-run")
def show_run(
    directory: Annotated[Path, typer.Argument(help="Log folder of a run, such as logs/<timestamp>-<config>.")],
    every: Annotated[bool, typer.Option("--all", help="Show every scalar, not only the key ones.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw the key metrics into this PNG file.")] = None,
) -> None:
    """Show a run's key metrics and timers, read from its TensorBoard event file."""
    from rlinf_phyai import run_summary

    try:
        scalars = run_summary.read_scalars(directory)
    except FileNotFoundError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    run_summary.print_table(scalars, directory, every=every)
    if plot is not None:
        try:
            run_summary.draw(scalars, plot)
        except (OSError, ValueError) as error:  # no place to write, another file type, or nothing to draw
            typer.echo(f"cannot draw {plot}: {error}", err=True)
            raise typer.Exit(1) from error
        typer.echo(f"wrote {plot}")


@app.command()
def compare(
    config: Annotated[str, typer.Argument(help="Training config: a name in --config-path, or a .yaml file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Hydra overrides, key=value.")] = None,
    config_path: Annotated[
        str | None, typer.Option(help="Folder of the config. Default: examples/embodiment/config.")
    ] = None,
    envs: Annotated[int, typer.Option(min=1, help="Environments, an episode each; ten are one per task.")] = 10,
    output: Annotated[Path, typer.Option(help="Folder for compare.json.")] = Path("logs/compare"),
) -> None:
    """Let the engine and RLinf's own model play the same episodes of env.eval with the same noise, side by side."""
    from rlinf_phyai.config_files import load_config
    from rlinf_phyai.errors import PhyaiError
    from rlinf_phyai.evaluation import paired

    try:
        result = paired.run_pair(load_config(config, overrides or [], config_path), envs)
    except (PhyaiError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    paired.print_pair(result)
    with _explained_write("result", output):
        paired.write_pair(result, output / "compare.json")
    typer.echo(f"wrote {output / 'compare.json'}")


@app.command("compare-evaluations")
def compare_evaluations(
    first: Annotated[Path, typer.Argument(help="A: an evaluation.json, or the log folder that holds it.")],
    second: Annotated[Path, typer.Argument(help="B.")],
) -> None:
    """Two evaluations paired by initial state: which episodes did only one policy solve, and is that chance?

    Of an initial state that an evaluation played several times the first episode counts.
    """
    from rlinf_phyai.evaluation.report import Evaluation, print_comparison

    try:
        print_comparison(Evaluation.read(first), Evaluation.read(second))
    except (ValueError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
