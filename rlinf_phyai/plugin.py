# SPDX-License-Identifier: Apache-2.0
"""RLinf's extension module: what every process of a run does first.

RLinf imports the module named by ``RLINF_EXT_MODULE`` in each worker and calls its ``register()``. When that fails it
writes a log line and goes on without it. A run must not: the driver asks every launched worker for a :class:`Report`
and stops unless each one registered and runs the class it was launched with (:func:`confirm`).

``RLINF_EXT_MODULE`` holds one module only, so a module that the user named there is called from our ``register()``.
"""

import importlib
import os
import time
import traceback
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

from rlinf_phyai import __version__, notices
from rlinf_phyai.calls import killed_for_memory
from rlinf_phyai.errors import PhyaiError

EXT_MODULE = "RLINF_EXT_MODULE"
CHAINED_MODULE = "RLINF_PHYAI_CHAINED_EXT_MODULE"
_THIS_MODULE = "rlinf_phyai.plugin"
_SUPPORTED_RLINF = ("0.3.",)
_NOT_STARTED = "did not start"


class PluginError(PhyaiError, RuntimeError):
    """The plugin could not register, or a worker does not run what it was launched with."""


class _State:
    """What happened in this process."""

    registered = False
    failure = ""


def activate(environment: MutableMapping[str, str] | None = None) -> None:
    """Name this module in ``RLINF_EXT_MODULE`` and keep the one that was there as the chained module."""
    environment = os.environ if environment is None else environment
    previous = environment.get(EXT_MODULE, "")
    if previous and previous != _THIS_MODULE:
        environment[CHAINED_MODULE] = previous
    environment[EXT_MODULE] = _THIS_MODULE


def register() -> None:
    """Make this process ready for the run; calling again does nothing.

    The CPU becomes a device where there is no accelerator; the user's own extension module registers; RLinf learns our
    model builder for ``model_type: openpi``. Nothing heavy is imported.

    Raises:
        PluginError: the installed RLinf is not supported, or a part failed to load. A worker keeps the reason for
            :func:`report`, because RLinf swallows the exception.
    """
    if _State.registered:
        return
    try:
        notices.leave_out()
        _check_rlinf()
        _register_platform()
        _register_chained()
        _register_model()
    except Exception as error:
        _State.failure = traceback.format_exc()
        raise PluginError(f"rlinf_phyai cannot register in process {os.getpid()}: {error}") from error
    _State.failure = ""
    _State.registered = True


def _check_rlinf() -> None:
    from importlib.metadata import version

    found = version("rlinf")
    if not found.startswith(_SUPPORTED_RLINF):
        raise PluginError(
            f"RLinf {found} is installed; supported: {', '.join(prefix + 'x' for prefix in _SUPPORTED_RLINF)}."
        )


def _register_chained() -> None:
    name = os.environ.get(CHAINED_MODULE, "")
    if not name or name == _THIS_MODULE:
        return
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there; what it imports is not
        raise PluginError(
            f"the environment's {EXT_MODULE} names the extension module {name!r}, which is not installed here. Install it, "
            f"or unset {EXT_MODULE} where it was left over from another run."
        ) from error
    if not hasattr(module, "register"):
        raise PluginError(f"The extension module {name!r} has no function register().")
    module.register()


def _register_platform() -> None:
    from rlinf_phyai.platforms import cpu

    cpu.install()


def _register_model() -> None:
    from rlinf.models import register_model

    register_model("openpi", _build_openpi, category="embodied", force=True)


def _build_openpi(cfg: Any, torch_dtype: Any) -> Any:
    from rlinf_phyai.actor.model_provider import build_openpi  # openpi and transformers: only where a model is built

    return build_openpi(cfg, torch_dtype)


@dataclass(frozen=True)
class Report:
    """What one worker process says about itself."""

    classes: tuple[str, ...]  # of the running object: its own, then its bases, as module:Class
    registered: bool
    failure: str  # traceback of a failed register()
    version: str


def report(worker: Any) -> Report:
    """The :class:`Report` of the process that holds ``worker``; runs inside it."""
    classes = tuple(_name(cls) for cls in type(worker).__mro__)
    return Report(classes, _State.registered, _State.failure, __version__)


def confirm(launched: Iterable[tuple[Any, type[Any]]], timeout: float = 600.0) -> None:
    """Ask every worker of the launched RLinf groups what it runs.

    Args:
        launched: RLinf's ``WorkerGroup`` objects, each with the class that it was launched with.
        timeout: seconds for the processes to start and answer.

    Raises:
        PluginError: a worker did not start, cannot load the plugin, did not register it, or runs another class or
            version; every such worker is named.
    """
    pending = [
        (f"Worker {rank} of {group.worker_group_name}", worker_class, info.worker.__ray_call__.remote(report))
        for group, worker_class in launched
        for rank, info in enumerate(group.worker_info_list)
    ]
    deadline = time.monotonic() + timeout
    found = [_problem(*one, max(deadline - time.monotonic(), 0.0)) for one in pending]
    # A worker that could not even start shows a consequence; one that lives to tell what is missing shows the cause.
    problems = sorted((problem for problem in found if problem), key=lambda problem: _NOT_STARTED in problem)
    if problems:
        raise PluginError("\n".join(problems))


def _problem(where: str, worker_class: type[Any], answer: Any, timeout: float) -> str:
    """What is wrong with one worker, or nothing."""
    import ray

    try:
        told = ray.get(answer, timeout=timeout)
    except ray.exceptions.GetTimeoutError:
        return f"{where} did not answer in time."
    except ray.exceptions.RayActorError as error:
        return f"{where} {_NOT_STARTED}: {error}"
    except ray.exceptions.OutOfMemoryError as error:
        return f"{where}: {killed_for_memory(error)}"
    except ray.exceptions.RayError as error:
        return f"{where} cannot load {_THIS_MODULE}: {error}"
    return _objection(told, where, worker_class)


def _objection(answer: Report, where: str, worker_class: type[Any]) -> str:
    if not answer.registered:
        reason = answer.failure or (
            f"RLinf did not import {_THIS_MODULE} there; its log line begins with 'Failed to import extension module'"
        )
        return f"{where} runs without rlinf_phyai: {reason}"
    if answer.version != __version__:
        return f"{where} has rlinf_phyai {answer.version}, the driver has {__version__}: install one version."
    # Ray runs a subclass that it makes of the launched class, under the same name.
    if _name(worker_class) not in answer.classes[:2]:
        return f"{where} runs {answer.classes[0]}, but {_name(worker_class)} was launched."
    return ""


def _name(cls: type[Any]) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"
