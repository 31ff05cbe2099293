# SPDX-License-Identifier: Apache-2.0
"""Batch arithmetic: how environments, chunks and micro-batches divide over processes.

RLinf asserts these in its own validation, in the router between environments and rollout, and in the first training
step, after minutes of rollout; some it never asserts and cuts the batch unevenly instead. Notation: ``E`` environments,
``s`` pipeline stages, ``We``/``Wr``/``Wa`` processes of environments, rollout and actor.

* every environment process holds ``E / We`` environments, every stage of it ``n = E / (We * s)``, whole groups;
* one stage's batch ``E / s`` is shared evenly by the rollout processes;
* a stage's ``n`` trajectories are cut into ``lcm(We * s, Wa) / (We * s)`` equal parts for the actor processes;
* an actor process trains on ``chunk steps * rollout epochs * E / Wa`` samples, ``global_batch_size / Wa`` at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from rlinf_phyai.validation.problems import Problem, show, warning
from rlinf_phyai.validation.settings import PHYAI, EnvSection, Settings


def environments_per_process(s: Settings) -> Iterator[Problem]:
    """The environments must divide evenly over the environment processes."""
    world = s.world_size("env")
    for section in s.environments:
        if section.total is not None and section.total > 0 and world and section.total % world:
            yield _not_a_multiple(
                section, world, f"{world} environment processes", "each process builds the same number"
            )


def environments_per_stage(s: Settings) -> Iterator[Problem]:
    """The environments of a process must divide evenly over the pipeline stages.

    RLinf means to assert it but only tests ``E % We % s``, which is always 0; it asserts that a stage is not empty.
    """
    world, stages = s.world_size("env"), s.stages
    for section in s.environments:
        if not (section.total and world and stages and stages > 0) or section.total % world:
            continue
        each = section.total // world
        if each // stages == 0 or (s.backend == PHYAI and each % stages):
            found = f"{world} environment processes x {stages} pipeline stages"
            yield _not_a_multiple(section, world * stages, found, "each stage of a process steps the same number")


def group_size(s: Settings) -> Iterator[Problem]:
    """A stage must hold whole groups."""
    for section in s.environments:
        each, size = _per_stage(s, section), section.group_size
        if each and size and size > 0 and each % size:
            yield Problem(
                section.key("group_size"),
                show(size),
                f"a divisor of {each} (environments per process and stage)",
                f"set {section.key('group_size')} to a divisor of {each}, or change {section.key('total_num_envs')}",
                "the environments of a group start from the same state on the same process",
            )


def rollout_share(s: Settings) -> Iterator[Problem]:
    """A stage's batch must divide evenly over the rollout processes."""
    rollout, stages = s.world_size("rollout"), s.stages
    for section in s.environments:
        if not (_per_stage(s, section) and rollout and stages):
            continue
        assert section.total is not None
        if (section.total // stages) % rollout:
            yield _not_a_multiple(
                section,
                rollout * stages,
                f"{rollout} rollout processes x {stages} pipeline stages",
                "each rollout process gets the same share of a stage's observations",
            )


def actor_share(s: Settings) -> Iterator[Problem]:
    """A stage's trajectories must be cut into equal parts for the actor processes."""
    for section in s.environments:
        each, parts = _per_stage(s, section), _parts_per_stage(s)
        if section.name == "train" and each and parts and each % parts:
            assert section.total is not None
            unit = section.total // each * parts
            yield _not_a_multiple(
                section,
                unit,
                f"{each} environments per process and stage in {parts} parts for {s.world_size('actor')} actor processes",
                "RLinf would cut them unevenly",
            )


def groups_stay_together(s: Settings) -> Iterator[Problem]:
    """GRPO's groups must not be cut apart on the way to the actor processes."""
    size = s.integer("algorithm.group_size")
    grouped = s.adv_type == "grpo" or s.flag("algorithm.filter_rewards")
    for section in s.environments:
        each, parts = _per_stage(s, section), _parts_per_stage(s)
        if section.name != "train" or not (grouped and size and size > 1 and each and parts) or each % parts:
            continue
        if (each // parts) % size:
            yield Problem(
                "algorithm.group_size",
                show(size),
                f"a divisor of {each // parts} (environments that reach an actor process together)",
                f"set algorithm.group_size to a divisor of {each // parts}, or raise {section.key('total_num_envs')}",
                "rewards are compared within a group; a group cut apart is compared with strangers, without any error",
            )


def same_group_size(s: Settings) -> Iterator[Problem]:
    """Environments and advantages must group alike."""
    algorithm, train = s.integer("algorithm.group_size"), s.integer("env.train.group_size")
    grouped = s.adv_type == "grpo" or s.flag("algorithm.filter_rewards")
    if s.trains and grouped and algorithm is not None and train is not None and algorithm != train:
        yield Problem(
            "env.train.group_size",
            show(train),
            f"the value of algorithm.group_size ({algorithm})",
            "set env.train.group_size: ${algorithm.group_size}",
            "rewards are compared in groups of algorithm.group_size, which must have started from the same state",
        )


def grpo_group(s: Settings) -> Iterator[Problem]:
    """GRPO compares at least two episodes."""
    value = s.integer("algorithm.group_size")
    if s.trains and s.adv_type == "grpo" and (value is None or value < 2):
        yield Problem(
            "algorithm.group_size",
            show(value) if value is not None else "missing",
            "at least 2 with algorithm.adv_type: grpo",
            "set algorithm.group_size: 8",
            "a group of one has no advantage",
        )


def chunk_steps(s: Settings) -> Iterator[Problem]:
    """An epoch must be a whole number of chunks."""
    for section in s.environments:
        if (
            section.epoch_steps
            and section.epoch_steps > 0
            and s.chunk
            and s.chunk > 0
            and section.epoch_steps % s.chunk
        ):
            yield Problem(
                section.key("max_steps_per_rollout_epoch"),
                show(section.epoch_steps),
                f"a multiple of {s.chunk} ({s.model}.num_action_chunks)",
                f"set it to {_nearest(section.epoch_steps, s.chunk)}",
                "the environments step in whole chunks",
            )


def episode_length(s: Settings) -> Iterator[Problem]:
    """Steps beyond the end of an episode are thrown away; an evaluation shorter than an episode reports nothing."""
    for section in s.environments:
        if not (section.epoch_steps and section.episode_steps):
            continue
        key, resets = section.key("max_steps_per_rollout_epoch"), s.flag(section.key("auto_reset"))
        if section.epoch_steps > section.episode_steps and not resets:
            yield warning(
                key,
                show(section.epoch_steps),
                f"at most {section.episode_steps} ({section.key('max_episode_steps')}) without auto_reset",
                f"set {key}: {section.episode_steps}",
                "episodes are cut at max_episode_steps and not restarted; the steps after it are simulated for nothing",
            )
        if section.name == "eval" and section.epoch_steps < section.episode_steps:
            yield warning(
                key,
                show(section.epoch_steps),
                f"at least {section.episode_steps} ({section.key('max_episode_steps')})",
                f"set {key}: {section.episode_steps}",
                "episodes that are still running when the evaluation stops are not counted",
            )


def global_batch(s: Settings) -> Iterator[Problem]:
    """A global batch must be whole micro-batches on every actor process."""
    size, micro, world = (
        s.integer("actor.global_batch_size"),
        s.integer("actor.micro_batch_size"),
        s.world_size("actor"),
    )
    if s.trains and size and micro and world and min(size, micro) > 0 and size % (micro * world):
        unit = micro * world
        yield Problem(
            "actor.global_batch_size",
            show(size),
            f"a multiple of {unit} (actor.micro_batch_size {micro} x {world} actor processes)",
            f"set actor.global_batch_size: {_nearest(size, unit)}, or change actor.micro_batch_size",
        )


def samples_per_step(s: Settings) -> Iterator[Problem]:
    """The samples of an actor process must be whole global batches."""
    size, micro, world = (
        s.integer("actor.global_batch_size"),
        s.integer("actor.micro_batch_size"),
        s.world_size("actor"),
    )
    epochs = s.rollout_epochs
    train = next((section for section in s.environments if section.name == "train"), None)
    if train is None or not (size and micro and world and epochs and s.chunk and train.total and train.epoch_steps):
        return
    parts = _parts_per_stage(s)
    each = _per_stage(s, train)
    positive = min(size, micro, epochs, s.chunk, train.epoch_steps) > 0
    if not (positive and each and parts) or size % (micro * world) or train.epoch_steps % s.chunk or each % parts:
        return  # reported by the other checks
    chunks = train.epoch_steps // s.chunk
    samples, share = chunks * epochs * train.total // world, size // world
    if samples % share:
        yield Problem(
            "actor.global_batch_size",
            show(size),
            f"a divisor of the {samples * world} samples of a step",
            _batch_that_fits(samples * world, micro * world, size),
            f"an actor process gets {chunks} chunk steps x {epochs} epochs x {train.total // world} environments = "
            f"{samples} samples, which are no multiple of its share of a batch ({share})",
        )


def weight_sync_interval(s: Settings) -> Iterator[Problem]:
    """Sampling with old weights is allowed, and said aloud."""
    value = s.integer("runner.weight_sync_interval", 1)
    if s.trains and value is not None and value > 1:
        yield warning(
            "runner.weight_sync_interval",
            show(value),
            "1",
            "set runner.weight_sync_interval: 1",
            "the rollout samples with older weights in between; importance weights then measure staleness too",
        )


def _per_stage(s: Settings, section: EnvSection) -> int | None:
    """Environments per process and stage (n), None where they are unknown or do not divide (reported elsewhere)."""
    world, stages = s.world_size("env"), s.stages
    if not (section.total and section.total > 0 and world and stages and stages > 0) or section.total % world:
        return None
    if s.backend == PHYAI and section.total % (world * stages):
        return None
    return section.total // world // stages or None


def _parts_per_stage(s: Settings) -> int | None:
    """Parts into which one stage's trajectories are cut for the actor processes."""
    env, actor, stages = s.world_size("env"), s.world_size("actor"), s.stages
    if not (env and actor and stages and stages > 0):
        return None
    senders = env * stages
    return math.lcm(senders, actor) // senders


def _not_a_multiple(section: EnvSection, unit: int, found: str, reason: str) -> Problem:
    key = section.key("total_num_envs")
    assert section.total is not None
    return Problem(
        key,
        show(section.total),
        f"a multiple of {unit} ({found})",
        f"set {key}: {_nearest(section.total, unit)}",
        reason,
    )


def _nearest(value: int, unit: int) -> str:
    """The multiples of ``unit`` around ``value``."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def _batch_that_fits(samples: int, unit: int, near: int) -> str:
    """What to set: the multiples of ``unit`` that divide ``samples``, at most two, those next to ``near``."""
    if samples % unit:
        return f"lower actor.micro_batch_size, or collect a multiple of {unit} samples (env.train.rollout_epoch)"
    count = samples // unit
    small = [n for n in range(1, math.isqrt(count) + 1) if count % n == 0]
    sizes = sorted({unit * n for n in small} | {unit * (count // n) for n in small})
    nearest = sorted(sorted(sizes, key=lambda size: abs(size - near))[:2])
    return f"set actor.global_batch_size: {' or '.join(map(str, nearest))}, or change env.train.rollout_epoch"


CHECKS_ANY = (
    environments_per_process,
    environments_per_stage,
    group_size,
    rollout_share,
    grpo_group,
    chunk_steps,
    global_batch,
    samples_per_step,
)
CHECKS = (
    actor_share,
    groups_stay_together,
    same_group_size,
    episode_length,
    weight_sync_interval,
)
