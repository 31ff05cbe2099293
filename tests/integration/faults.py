# SPDX-License-Identifier: Apache-2.0
"""Faults at each point of a weight sync, and in the rollout after it.

The functions run inside a worker of a real run; the package knows none of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

FROZEN = "paligemma_with_expert.paligemma.model.multi_modal_projector.linear.bias"
TRAINED = "action_out_proj.bias"


def spoil_the_engine(worker: Any) -> None:
    """Rollout, before the first bucket: somebody writes weights outside of an update, so no session can open."""
    with torch.no_grad():
        worker.hf_model.state_dict()[TRAINED].add_(1.0)


def lose_a_bucket(worker: Any) -> None:
    """Rollout, in the middle: the second bucket cannot be taken in, while the actor wants to send more."""
    policy, received = worker.hf_model, []

    def load_state_dict(bucket: dict[str, torch.Tensor], strict: bool = False) -> None:
        received.append(len(bucket))
        if len(received) == 2:
            raise OSError("injected: the second bucket is lost")
        type(policy).load_state_dict(policy, bucket, strict)

    policy.load_state_dict = load_state_dict


def diverge(worker: Any) -> None:
    """Actor, seen at the commit: training has diverged, and one weight is NaN."""
    set_parameter(worker, TRAINED, float("nan"))


def stop_sending(worker: Any) -> None:
    """Actor, in the middle: it raises instead of sending its second bucket, while the rollout waits for it."""
    broadcast, sent = worker.broadcast, []

    def failing(*args: Any, **kwargs: Any) -> Any:
        sent.append(1)
        if len(sent) == 2:
            raise OSError("injected: the second bucket was not sent")
        return broadcast(*args, **kwargs)

    worker.broadcast = failing


def change_a_frozen_weight(worker: Any) -> None:
    """Actor: a weight that is never sent differs from the rollout's."""
    set_parameter(worker, FROZEN, 0.5)


def deadlock(worker: Any) -> None:
    """Rollout, in the rollout that follows: a prediction waits for a lock that is never released."""
    lock = threading.Lock()
    lock.acquire()

    def predict_action_batch(**arguments: Any) -> None:
        lock.acquire()

    worker.hf_model.predict_action_batch = predict_action_batch


def set_parameter(worker: Any, name: str, value: float) -> None:
    """Overwrite this rank's part of one of the actor's parameters."""
    parameter = dict(worker.model.named_parameters())[name].detach()
    (parameter.to_local() if hasattr(parameter, "to_local") else parameter).fill_(value)


FAULTS: dict[str, tuple[str, Callable[[Any], None]]] = {
    function.__name__: (group, function)
    for group, function in (
        ("rollout", spoil_the_engine),
        ("rollout", lose_a_bucket),
        ("actor", diverge),
        ("actor", stop_sending),
        ("actor", change_a_frozen_weight),
        ("rollout", deadlock),
    )
}
"""Name -> the worker group in which the fault happens, and what to call there."""
