# SPDX-License-Identifier: Apache-2.0
"""Fixtures that every kind of test shares."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before anything imports jax, LIBERO or RLinf.
from rlinf_phyai import environment

environment.set_defaults()
os.environ.setdefault("OMP_NUM_THREADS", "2")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny PI0.5 checkpoint with the default sizes and seed 0; do not write to it."""
    from rlinf_phyai.models.pi05.tiny import make_tiny_checkpoint

    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny_pi05"), seed=0)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parent.parent
