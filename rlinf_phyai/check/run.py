# SPDX-License-Identifier: Apache-2.0
"""From a config to a result: builds actor and engine in this process."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from omegaconf import DictConfig

from rlinf_phyai.actor.limits import Limits
from rlinf_phyai.check.compare import Result, check_config, compare, send_weights
from rlinf_phyai.check.observations import RandomObservations, libero


def run_check(cfg: DictConfig, *, envs: int, steps: int, limits: dict[str, float], simulator: bool) -> Result:
    """Build both sides, give them the same weights, and compare.

    Args:
        cfg: a training config of the phyai backend.
        envs: observations per batch. steps: chunk steps. Their product is scored.
        limits: replace those of the engine's type, by name.
        simulator: real LIBERO observations; random ones otherwise.
    """
    from rlinf_phyai.driver import launch

    launch.prepare()
    launch.validate(cfg)
    launch.absolute_paths(cfg)
    from rlinf_phyai.actor.in_process import in_process_actor, start_process_group
    from rlinf_phyai.rollout.build import build_policy, params_dtype

    cfg = check_config(cfg, envs * steps)
    start_process_group()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    options = cfg.rollout.phyai
    dtype = params_dtype(options.get("params_dtype"), cfg.actor.model.model_path)
    allowed = Limits.for_dtype(dtype, options.get("prefix_precision")).replaced(limits)
    # The simulator first: its processes should not inherit two models.
    source: Any = libero(cfg, envs) if simulator else nullcontext(RandomObservations(envs))
    with source as observe:
        actor = in_process_actor(cfg)
        policy = build_policy(cfg, cfg.actor.model, device, rank=0, worker_batch_size=envs)
        try:
            send_weights(actor, policy)
            return compare(actor, policy, observe, steps, allowed)
        finally:
            policy.engine.close()
