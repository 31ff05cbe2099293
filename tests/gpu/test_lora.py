# SPDX-License-Identifier: Apache-2.0
"""LoRA under FSDP1, which needs CUDA: adapters and frozen matrices share layers, and the engine follows what they learn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlinf_phyai.actor.limits import Limits
from rlinf_phyai.check.compare import compare, send_weights
from rlinf_phyai.check.observations import RandomObservations
from tests.unit.parity.test_lora import ENVS, GRPO, QUERY, STEPS, lora_config


@pytest.mark.parametrize("overrides", [(), GRPO], ids=["ppo", "grpo"])
def test_the_engine_follows_fsdp1(tiny_checkpoint: Path, repository: Path, overrides: tuple[str, ...]) -> None:
    from rlinf_phyai.actor.in_process import in_process_actor, start_process_group
    from rlinf_phyai.rollout.build import build_policy

    cfg = lora_config(tiny_checkpoint, repository, *overrides)
    cfg.actor.fsdp_config.strategy = "fsdp"
    cfg.rollout.phyai.params_dtype = "float32"
    start_process_group()
    torch.manual_seed(0)
    actor = in_process_actor(cfg)
    policy = build_policy(cfg, cfg.actor.model, "cuda:0", rank=0, worker_batch_size=ENVS)
    try:
        before = policy.state_dict()[QUERY].clone()
        gaps = []
        for _ in range(3):
            send_weights(actor, policy)
            result = compare(actor, policy, RandomObservations(ENVS), STEPS, Limits.for_dtype(torch.float32))
            weights = next(verdict for verdict in result.verdicts if verdict.name == "parameters that differ")
            assert weights.ok, str(weights)
            assert result.metrics["actor/first_update/ratio_max_dev"] == 0.0
            gaps.append(float((result.p - result.q).abs().max()))
        assert (policy.state_dict()[QUERY] - before).abs().max() > 1e-5
        stale = compare(actor, policy, RandomObservations(ENVS), STEPS, Limits.for_dtype(torch.float32))
        stale_gap = float((stale.p - stale.q).abs().max())
        print(f"largest gap after each sync {gaps}, without one {stale_gap}")
        assert stale_gap > 10 * max(gaps)  # TF32 on both sides: wider than on a CPU
    finally:
        policy.engine.close()
