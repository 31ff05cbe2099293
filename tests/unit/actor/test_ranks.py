# SPDX-License-Identifier: Apache-2.0
"""Two actor ranks (processes, gloo, FSDP2): each has its own samples, all report the same figures."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

CORRECTION = (
    "algorithm.recompute_logprobs=true",
    "algorithm.importance_sampling_fix=true",
    "algorithm.importance_sampling_clip=10.0",
    "rollout.phyai.value_source=actor",
    "actor.fsdp_config.sharding_strategy=full_shard",
    "actor.global_batch_size=12",
)


def _rank(rank: int, cfg: DictConfig, batch: dict[str, Any], folder: str) -> None:
    import rlinf.models  # noqa: F401
    from rlinf.workers.actor import fsdp_actor_worker

    from rlinf_phyai.actor.in_process import in_process_actor, start_process_group
    from rlinf_phyai.actor.model_provider import build_openpi

    torch.set_num_threads(1)
    fsdp_actor_worker.get_model = build_openpi
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    start_process_group(rank, 2, store)
    torch.manual_seed(0)
    actor = in_process_actor(cfg)
    # This rank's share: two of the four trajectories. Rank 1 reports log-probs that are 0.02 too high.
    own = slice(2 * rank, 2 * rank + 2)
    mine = {
        k: {n: t[:, own].clone() for n, t in v.items()} if isinstance(v, dict) else v[:, own].clone()
        for k, v in batch.items()
    }
    mine["prev_logprobs"] += 0.02 * rank
    actor.rollout_batch = actor._process_received_rollout_batch(mine)
    actor.compute_advantages_and_returns()
    metrics = actor.run_training()
    after = {name: p.full_tensor() for name, p in actor.model.named_parameters() if p.requires_grad}
    torch.save({"metrics": metrics, "parameters": after}, f"{folder}/rank{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks(make_config, recorded_batch, tmp_path: Path):
    cfg = make_config(*CORRECTION)
    batch = copy.deepcopy(recorded_batch)
    torch.multiprocessing.spawn(_rank, (cfg, batch, str(tmp_path)), nprocs=2)
    ranks = [torch.load(tmp_path / f"rank{r}.pt", weights_only=False) for r in range(2)]
    ours = [
        {k: v for k, v in r["metrics"].items() if "rollout_train" in k or "sampling" in k or "first" in k}
        for r in ranks
    ]
    assert ours[0].keys() == ours[1].keys()
    for key, value in ours[0].items():
        assert value == pytest.approx(ours[1][key], nan_ok=True), key
    figures = ours[0]
    assert figures["actor/first_update/ratio_max_dev"] == 0.0
    assert figures["actor/first_update/clip_fraction"] == 0.0
    # Rank 0: six samples of weight 1, of which one is masked (its trajectory has ended). Rank 1: six of the lower
    # weight.
    low, high = 5, 6
    weight = 2.718281828 ** (-0.02 * 35)
    assert figures["actor/importance_sampling_weight"] == pytest.approx((low + high * weight) / (low + high), rel=1e-4)
    assert figures["actor/rollout_train_logprob_gap"] == pytest.approx(0.02 * high / (low + high), rel=1e-3)
    assert figures["actor/importance_sampling_weight_max"] == pytest.approx(1.0, abs=1e-4)
    for name, value in ranks[0]["parameters"].items():
        assert torch.equal(value, ranks[1]["parameters"][name]), name
