# SPDX-License-Identifier: Apache-2.0
"""A read-only view of the config for the checks: lenient readers that never raise and never write.

A reader returns ``None`` (or its default) where the value is absent or of another type, so that each check decides
about one thing only; :mod:`rlinf_phyai.validation.schema` reports wrong types. A value that cannot be resolved (a
missing environment variable, ``???``) is remembered in :attr:`Settings.unresolved` when a check asks for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlinf_phyai import backends
from rlinf_phyai.validation.placement import (
    PLACEMENT,
    Component,
    PlacementSyntaxError,
    component,
    names_of,
    resource_count,
)

PHYAI = backends.PHYAI_BACKEND.name
SECTIONS = ("train", "eval")


@dataclass(frozen=True)
class EnvSection:
    """The numbers of ``env.train`` or ``env.eval``; None where absent or no integer."""

    name: str
    total: int | None
    group_size: int | None
    epoch_steps: int | None
    episode_steps: int | None

    def key(self, name: str) -> str:
        """The dotted key of an option of this section."""
        return f"env.{self.name}.{name}"


class Settings:
    """View of ``cfg`` on a cluster with ``gpus`` accelerators (0: none at all, None: not known)."""

    def __init__(self, cfg: DictConfig, gpus: int | None = None) -> None:
        self._cfg = cfg
        self.gpus = gpus
        self.unresolved: dict[str, str] = {}
        self._values: dict[str, Any] = {}

    # -- readers

    def get(self, key: str, default: Any = None) -> Any:
        """The value at a dotted key; ``default`` where the key is absent or its value cannot be resolved."""
        if key not in self._values:
            self._values[key] = self._select(key)
        value = self._values[key]
        return default if value is _ABSENT else value

    def _select(self, key: str) -> Any:
        try:
            return OmegaConf.select(self._cfg, key, default=_ABSENT, throw_on_missing=True)
        except OmegaConfBaseException as error:
            self.unresolved[key] = str(error).split("\n", 1)[0]
            return _ABSENT

    def has(self, key: str) -> bool:
        """True where the key exists, be its value null."""
        return self.get(key, _ABSENT) is not _ABSENT

    def flag(self, key: str, default: bool = False) -> bool:
        """True where the value is true; ``default`` where it is absent, null or no boolean."""
        value = self.get(key)
        return value if isinstance(value, bool) else default

    def integer(self, key: str, default: int | None = None) -> int | None:
        """The value as an integer; booleans and fractions are none."""
        value = self.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    def number(self, key: str, default: float | None = None) -> float | None:
        """The value as a finite float."""
        value = self.get(key)
        real = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return float(value) if real else default

    def text(self, key: str, default: str | None = None) -> str | None:
        """The value where it is text."""
        value = self.get(key)
        return value if isinstance(value, str) else default

    def path(self, key: str) -> Path | None:
        """The value as a path, ``~`` expanded; None where it is absent, null or empty."""
        value = self.get(key)
        return Path(str(value)).expanduser() if isinstance(value, str | Path) and str(value) else None

    def keys(self, key: str) -> list[str]:
        """Names of the options of a section; empty where it is no section."""
        value = self.get(key)
        return [str(name) for name in value] if isinstance(value, DictConfig) else []

    def strings(self, key: str) -> list[str] | None:
        """The elements of a list as text; None where the value is no list."""
        value = self.get(key)
        return [str(item) for item in value] if isinstance(value, ListConfig | list | tuple) else None

    def numbers(self, key: str, default: list[float]) -> list[float] | None:
        """The elements of a list as finite floats, ``default`` where it is absent; None where it is no such list."""
        value = self.get(key, default)
        if not isinstance(value, ListConfig | list | tuple):
            return None
        real = [v for v in value if isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v)]
        return [float(v) for v in real] if len(real) == len(value) else None

    # -- what kind of run

    @cached_property
    def backend(self) -> str:
        """``rollout.rollout_backend``; RLinf's own where it is absent."""
        return str(self.get("rollout.rollout_backend") or backends.DEFAULT)

    @cached_property
    def only_eval(self) -> bool:
        """True for a run that trains nothing."""
        return self.flag("runner.only_eval") or self.get("runner.task_type") == "embodied_eval"

    @property
    def trains(self) -> bool:
        return not self.only_eval

    @cached_property
    def evaluates(self) -> bool:
        """True where evaluation environments are built."""
        return self.only_eval or (self.integer("runner.val_check_interval", -1) or 0) > 0

    @property
    def no_gpu(self) -> bool:
        """True where the cluster is known to have no accelerator."""
        return self.gpus == 0

    @property
    def model(self) -> str:
        """The section that describes the model: RLinf reads another one when only evaluating."""
        return "rollout.model" if self.only_eval else "actor.model"

    @property
    def openpi(self) -> str:
        return f"{self.model}.openpi"

    @cached_property
    def adv_type(self) -> str | None:
        return self.text("algorithm.adv_type")

    @cached_property
    def has_critic(self) -> bool:
        """True where the model carries a value head (what the model itself reads)."""
        return self.flag(f"{self.openpi}.add_value_head")

    @property
    def critic_after_vlm(self) -> bool:
        return self.flag(f"{self.openpi}.value_after_vlm")

    @cached_property
    def num_steps(self) -> int | None:
        """Denoise steps; the model's own default is 10."""
        key = f"{self.openpi}.num_steps"
        return self.integer(key) if self.has(key) else 10

    # -- environments and processes

    @cached_property
    def environments(self) -> list[EnvSection]:
        """The sections that this run builds environments from."""
        used = [name for name in SECTIONS if (self.trains if name == "train" else self.evaluates)]
        return [
            EnvSection(
                name=name,
                total=self.integer(f"env.{name}.total_num_envs"),
                group_size=self.integer(f"env.{name}.group_size", 1 if name == "eval" else None),
                epoch_steps=self.integer(f"env.{name}.max_steps_per_rollout_epoch"),
                episode_steps=self.integer(f"env.{name}.max_episode_steps"),
            )
            for name in used
        ]

    @cached_property
    def rollout_epochs(self) -> int | None:
        """Rollout epochs of a training step; RLinf falls back to the deprecated place."""
        for key in ("env.train.rollout_epoch", "algorithm.rollout_epoch"):
            if self.get(key) is not None:
                return self.integer(key)
        return 1

    @cached_property
    def stages(self) -> int | None:
        return self.integer("rollout.pipeline_stage_num")

    @cached_property
    def chunk(self) -> int | None:
        """Actions per chunk, as the environments understand it."""
        return self.integer(f"{self.model}.num_action_chunks")

    def component(self, name: str) -> Component | str | None:
        """Where the processes of ``actor``, ``rollout`` or ``env`` run; an error text; None where it is not placed."""
        placements = self.get(PLACEMENT)
        for names in self.keys(PLACEMENT):
            if name not in names_of(names):
                continue
            try:
                entry = placements[names]
                grouped = isinstance(entry, DictConfig)
                available = resource_count(entry.get("node_group") if grouped else None, self.get("cluster"), self.gpus)
                text = entry.get("placement") if grouped else entry
            except (OmegaConfBaseException, PlacementSyntaxError) as error:
                return str(error).split("\n", 1)[0]
            return "the entry has no `placement`" if text is None else component(str(text), available)
        return None

    def world_size(self, name: str) -> int | None:
        """Processes of a component, None where the config does not tell."""
        placed = self.component(name)
        return placed.world_size if isinstance(placed, Component) else None


class _Absent:
    """Tells an absent key from a null value."""


_ABSENT: Any = _Absent()
