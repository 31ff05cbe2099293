# SPDX-License-Identifier: Apache-2.0
"""RLinf's model built without initialising what its checkpoint holds, and proof that the checkpoint held it.

RLinf's constructor draws 3.6 billion random numbers on the CPU in float32, minutes of work, which the checkpoint then
overwrites. Here the two transformers start as uninitialised memory in their final type instead. That is only right if
every one of their tensors is written afterwards, so the built model loads through :func:`load_weights`, which checks all
names and shapes before it writes. RLinf's loader alone (``strict=False``) leaves a missing tensor random without a word.

The projections and the heads (critic, noise) are initialised as always: a checkpoint may lack a head. They draw from
torch's global generator like before, at an earlier point of its stream; two processes still draw the same.
"""

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from openpi.models_pytorch import pi0_pytorch
from rlinf.models.embodiment.openpi import openpi_action_model
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.serialization import config as serialization_config

from rlinf_phyai.errors import CheckpointError
from rlinf_phyai.models.pi05.checkpoint import EXPERT_LM_HEAD, add_shapes, canonical_name, tensor_headers
from rlinf_phyai.models.pi05.loading import check_heads_whole, plan_load, write_tensors

_logger = logging.getLogger(__name__)

# What openpi's own class holds (the last three in PI0); everything else is a head that RLinf adds, absent from an SFT
# checkpoint.
_BODY = (
    "paligemma_with_expert",
    "action_in_proj",
    "action_out_proj",
    "time_mlp_in",
    "time_mlp_out",
    "state_proj",
    "action_time_mlp_in",
    "action_time_mlp_out",
)

# The builder's names are replaced in RLinf's and openpi's modules, for all threads: one build at a time.
_BUILD_LOCK = threading.RLock()


@contextlib.contextmanager
def building(model_class: Callable[[Any], nn.Module] | None, where: str) -> Iterator[None]:
    """While open, RLinf's loader builds a model without initialising it and fills it through :func:`load_weights`.

    Args:
        model_class: built instead of RLinf's class, from RLinf's model config; it takes care of its own initialisation.
        where: the checkpoint, for messages.

    Raises:
        CheckpointError: see :func:`load_weights`; also when nothing was loaded.
    """
    pending: list[nn.Module] = []
    build = model_class or functools.partial(_build_uninitialised, openpi_action_model.OpenPi0ForRLActionPrediction)

    def build_and_watch(config: Any) -> nn.Module:
        model = build(config)

        def load_state_dict(state_dict: Mapping[str, Tensor], strict: bool) -> None:
            load_weights(model, state_dict, where)
            pending.remove(model)
            del model.load_state_dict  # torch's own from now on

        model.load_state_dict = load_state_dict  # type: ignore[method-assign, assignment]
        pending.append(model)
        return model

    with (
        _BUILD_LOCK,
        mock.patch.object(openpi_action_model, "OpenPi0ForRLActionPrediction", build_and_watch),
        serialization_config.patch("load.mmap", True),  # type: ignore[attr-defined]  # full_weights.pt is not read twice
    ):
        yield
    if pending:
        raise CheckpointError(f"{where}: RLinf's loader built a model but loaded no weights into it.")


def load_weights(model: nn.Module, state_dict: Mapping[str, Tensor], where: str) -> None:
    """Checks a whole checkpoint against the model, then copies every tensor once.

    Args:
        state_dict: names of the openpi or the LeRobot layout. It may lack heads (the model's stay as initialised) and the
            expert's output head, and hold heads that the model does not have.
        where: the checkpoint, for messages.

    Raises:
        CheckpointError: a tensor that the checkpoint lacks or has in another shape, one that the model does not have, or
            a part of a head; nothing was written then.
    """
    begin = time.perf_counter()
    views = model.state_dict()
    shapes: dict[str, tuple[int, ...]] = {}
    add_shapes(shapes, tensor_headers(state_dict), where)
    unused = {name for name in shapes if name not in views and _is_head(name)}
    if unused:
        _logger.warning("%s holds %s, which this run does not use", where, _listed(_roots(unused)))
    report = plan_load(
        views,
        {name: shape for name, shape in shapes.items() if name not in unused},
        lambda name: _is_head(name) or name == EXPERT_LM_HEAD,
        subset=False,
        where=where,
    )
    check_heads_whole(report, _is_head, where)
    used = ((name, tensor) for name, tensor in state_dict.items() if canonical_name(name) not in unused)
    write_tensors(views, used, report, progress=os.environ.get("RANK", "0") == "0", where=where)
    if EXPERT_LM_HEAD in report.optional:  # no action depends on it, but the optimizer and the weight sync see it
        expert: Any = model.get_submodule("paligemma_with_expert.gemma_expert")
        expert._init_weights(expert.lm_head)
    _logger.info("%s: %s, %.1f s", where, report.summary(), time.perf_counter() - begin)


def _is_head(name: str) -> bool:
    return name.partition(".")[0] not in _BODY


def _roots(names: Iterable[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _build_uninitialised(model_class: Callable[[Any], nn.Module], config: Any) -> nn.Module:
    pair = pi0_pytorch.PaliGemmaWithExpertModel

    def uninitialised_pair(*args: Any, **options: Any) -> nn.Module:
        with parameters_on_meta():
            module = pair(*args, **options)
        allocate(module)
        return module

    with mock.patch.object(pi0_pytorch, "PaliGemmaWithExpertModel", uninitialised_pair):
        return model_class(config)


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """While open, parameters that this thread registers become meta tensors, on which initialising costs nothing.

    Buffers stay real: the ones that no checkpoint holds (rotary frequencies, position ids) are computed as always.
    """
    thread = threading.get_ident()

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.is_meta or threading.get_ident() != thread:  # tied parameters stay one object
            return None
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]  # may return a parameter
    try:
        yield
    finally:
        handle.remove()


def allocate(module: nn.Module) -> None:
    """Gives every meta parameter uninitialised memory on the CPU; tied ones stay tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in made:
                    made[parameter] = nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
                owner._parameters[name] = made[parameter]
