# SPDX-License-Identifier: Apache-2.0
"""Rollout backends by name: which worker classes a run launches.

``rollout.rollout_backend`` in the config picks one. Other packages add theirs with an entry point of the group
``rlinf.rollout_backends`` that names a :class:`RolloutBackend`.
"""

import importlib
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from rlinf_phyai.errors import PhyaiError

ENTRY_POINT_GROUP = "rlinf.rollout_backends"
DEFAULT = "huggingface"  # RLinf's own choice where the config does not name a backend


class BackendError(PhyaiError, ValueError):
    """A backend does not exist or cannot be loaded."""


@dataclass(frozen=True)
class RolloutBackend:
    """The worker classes of one backend, each as ``module:Class`` so that naming a backend imports nothing."""

    name: str
    rollout_worker: str
    actor_worker: str
    env_worker: str = "rlinf.workers.env.env_worker:EnvWorker"

    def load_rollout_worker(self) -> type[Any]:
        """The rollout worker class.

        Raises:
            BackendError: the class cannot be imported; the cause is chained.
        """
        return self._load(self.rollout_worker)

    def load_actor_worker(self) -> type[Any]:
        """The actor worker class; raises like :meth:`load_rollout_worker`."""
        return self._load(self.actor_worker)

    def load_env_worker(self) -> type[Any]:
        """The environment worker class; raises like :meth:`load_rollout_worker`."""
        return self._load(self.env_worker)

    def _load(self, path: str) -> type[Any]:
        module, _, name = path.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except Exception as error:
            raise BackendError(
                f"The rollout backend {self.name!r} cannot load {path}: {type(error).__name__}: {error}. "
                "Run `rlinf-phyai doctor` to check the installation, or choose another rollout.rollout_backend."
            ) from error


PHYAI_BACKEND = RolloutBackend(
    name="phyai",
    rollout_worker="rlinf_phyai.rollout.worker:PhyaiRolloutWorker",
    actor_worker="rlinf_phyai.actor.worker:PhyaiActorWorker",
    env_worker="rlinf_phyai.env.worker:PhyaiEnvWorker",
)

HUGGINGFACE_BACKEND = RolloutBackend(
    name="huggingface",
    rollout_worker="rlinf.workers.rollout.hf.huggingface_worker:MultiStepRolloutWorker",
    actor_worker="rlinf.workers.actor.fsdp_actor_worker:EmbodiedFSDPActor",
)

_BUILT_IN = (PHYAI_BACKEND, HUGGINGFACE_BACKEND)


def available() -> tuple[str, ...]:
    """The names that :func:`get` accepts, sorted."""
    names = {backend.name for backend in _BUILT_IN}
    names.update(entry.name for entry in entry_points(group=ENTRY_POINT_GROUP))
    return tuple(sorted(names))


def get(name: str) -> RolloutBackend:
    """The backend of this name.

    Raises:
        BackendError: there is none, or its entry point is broken.
    """
    for backend in _BUILT_IN:
        if backend.name == name:
            return backend
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name != name:
            continue
        try:
            backend = entry.load()
        except Exception as error:
            raise BackendError(
                f"The entry point {entry.value!r} of the rollout backend {name!r} cannot be loaded: {error}"
            ) from error
        if not isinstance(backend, RolloutBackend):
            raise BackendError(f"The entry point {entry.value!r} is a {type(backend).__name__}, not a RolloutBackend.")
        return backend
    raise BackendError(f"rollout.rollout_backend is {name!r}; allowed: {', '.join(available())}.")
