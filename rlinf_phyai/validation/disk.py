# SPDX-License-Identifier: Apache-2.0
"""Room for the checkpoints of the run: RLinf deletes none, and a full disk ends a run in its midst."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

from rlinf_phyai.errors import CheckpointError
from rlinf_phyai.validation.files import checkpoint_dir
from rlinf_phyai.validation.problems import Problem, warning
from rlinf_phyai.validation.settings import Settings

LOG_PATH = "runner.logger.log_path"
_FROZEN = (".vision_tower.", ".multi_modal_projector.", ".language_model.", "paligemma.lm_head.")


def checkpoints_planned(s: Settings) -> int:
    """How many checkpoints RLinf's runner will write: one every ``save_interval`` steps and one at the end."""
    interval, steps = s.integer("runner.save_interval", -1) or -1, s.integer("runner.max_epochs")
    limit = s.integer("runner.max_steps", -1)
    if not s.trains or steps is None or interval <= 0:
        return 0
    if limit is not None and limit >= 0:
        steps = min(steps, limit)
    return math.ceil(steps / interval)


def checkpoint_bytes(s: Settings) -> int | None:
    """About the bytes of one: the weights twice (shards and ``full_weights.pt``) and two moments of every trained one.

    None where the checkpoint to start from cannot be read.
    """
    from rlinf_phyai.models.pi05.checkpoint import tensor_shapes
    from rlinf_phyai.models.pi05.stated_sizes import actor_params_dtype

    path = checkpoint_dir(s)
    if path is None:
        return None
    try:
        shapes = tensor_shapes(path)
        width = 4 if actor_params_dtype(path) == "float32" else 2  # RLinf casts to bfloat16
    except (CheckpointError, ValueError):
        return None  # reported by other checks
    sizes = {name: math.prod(shape) * width for name, shape in shapes.items()}
    frozen_vlm = s.flag(f"{s.openpi}.train_expert_only")
    trained = [size for name, size in sizes.items() if not (frozen_vlm and any(part in name for part in _FROZEN))]
    full = s.flag("actor.fsdp_config.save_full_model_weights", True)
    return (2 if full else 1) * sum(sizes.values()) + 2 * sum(trained)


def room_for_checkpoints(s: Settings) -> Iterator[Problem]:
    """The disk must hold the checkpoints that the run will write (a warning: sizes are estimates)."""
    count, path = checkpoints_planned(s), s.path(LOG_PATH)
    size = checkpoint_bytes(s) if count and path is not None else None
    if size is None or path is None:
        return
    free = shutil.disk_usage(_existing(path)).free
    if free < count * size:
        yield warning(
            LOG_PATH,
            f"on a disk with {free / 1e9:.3g} GB free, enough for {free // size} of {count} checkpoints",
            f"a disk with {count * size / 1e9:.3g} GB free ({count} checkpoints of about {size / 1e9:.3g} GB; none is deleted)",
            f"free disk space, set {LOG_PATH} to a larger disk, or raise runner.save_interval",
            "a checkpoint that does not fit ends the run",
        )


def _existing(path: Path) -> Path:
    path = path.absolute()
    return next(parent for parent in (path, *path.parents) if parent.exists())


CHECKS = (room_for_checkpoints,)
