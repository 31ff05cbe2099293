# SPDX-License-Identifier: Apache-2.0
"""What the tests of loading share: the weights of the plain checkpoint, and how they are written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from rlinf_phyai.engine import Engine

from .checkpoints import random_state, write_checkpoint
from .conftest import SIZES

MakeEngine = Callable[..., Engine]
STATE = random_state(SIZES, seed=3)
VALUE_NAMES = [name for name in STATE if name.startswith("value_head.")]


def write(directory: Path, state: dict[str, Tensor] = STATE, **options: Any) -> Path:
    return write_checkpoint(directory, state, SIZES, **options)
