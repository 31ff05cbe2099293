# SPDX-License-Identifier: Apache-2.0
"""Two actor ranks (processes, gloo, FSDP2): each has its own samples, all report the same figures."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from rlinf_phyai.actor.rescoring import BatchPlan, longest

pytestmark = pytest.mark.slow

CORRECTION = (
    "algorithm.recompute_logprobs=true",
    "algorithm.importance_sampling_fix=true",
    "algorithm.importance_sampling_clip=10.0",
    "rollout.phyai.value_source=actor",
    "actor.fsdp_config.sharding_strategy=full_shard",
    "actor.global_batch_size=12",
)
PLAIN_SHARES = {
    0: [0, 1],
    1: [2, 3],
}  # trajectories of each rank; rank 1's rollout reports log-probs that are 0.02 too high
LONG_AND_SHORT = {0: [0, 2], 1: [1, 3]}  # by the length of their prompts
IMAGE_TOKENS, BYTES_PER_TOKEN = 8, 2 * 2 * 16 * 4  # of conftest's checkpoint: layers, keys and values, head, float32


def _share(batch: dict[str, Any], own: list[int]) -> dict[str, Any]:
    """Those trajectories of a batch."""
    return {
        k: {n: t[:, own].clone() for n, t in v.items()} if isinstance(v, dict) else v[:, own].clone()
        for k, v in batch.items()
    }


def _step(cfg: DictConfig, share: dict[str, Any]) -> dict[str, Any]:
    """One training step of a new actor."""
    from rlinf_phyai.actor.in_process import in_process_actor

    torch.manual_seed(0)
    actor = in_process_actor(cfg)
    actor.rollout_batch = actor._process_received_rollout_batch(share)
    actor.compute_advantages_and_returns()
    kept = [actor._kept_prefixes.get(i) is not None for i in range(3)]
    metrics = actor.run_training()
    trained = {name: p.full_tensor() for name, p in actor.model.named_parameters() if p.requires_grad}
    return {"kept": kept, "metrics": metrics, "parameters": trained}


def _rank(rank: int, cfg: DictConfig, some_gib: float, batch: dict[str, Any], folder: str) -> None:
    import rlinf.models  # noqa: F401
    from rlinf.workers.actor import fsdp_actor_worker

    from rlinf_phyai.actor.in_process import start_process_group
    from rlinf_phyai.actor.model_provider import build_openpi

    torch.set_num_threads(1)
    fsdp_actor_worker.get_model = build_openpi
    start_process_group(rank, 2, torch.distributed.FileStore(f"{folder}/store", 2))
    share = _share(batch, PLAIN_SHARES[rank])
    share["prev_logprobs"] += 0.02 * rank
    found = {"offset": _step(cfg, share)}
    for name, gib in (("none", 0.0), ("some", some_gib)):
        cfg.rollout.phyai.actor_prefix_cache_gib = gib
        found[name] = _step(cfg, _share(batch, LONG_AND_SHORT[rank]))
    torch.save(found, f"{folder}/rank{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _prefix_bytes(batch: dict[str, Any], rank: int, seed: int) -> list[int]:
    """Keys and values of each of a rank's micro-batches."""
    plan = BatchPlan(steps=3, envs=2, micro_batch_size=2, seed=seed + rank)
    lengths = longest(batch["forward_inputs"]["tokenized_prompt_mask"][:, LONG_AND_SHORT[rank]], plan)
    return [2 * (IMAGE_TOKENS + length) * BYTES_PER_TOKEN for length in lengths]


@pytest.fixture(scope="module")
def ranks(base_config: DictConfig, recorded_batch: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What both ranks found in their steps, and the sizes of their prefixes."""
    cfg = copy.deepcopy(base_config)
    cfg.merge_with_dotlist(list(CORRECTION))
    batch, folder = copy.deepcopy(recorded_batch), tmp_path_factory.mktemp("ranks")
    sizes = [_prefix_bytes(batch, rank, cfg.actor.seed) for rank in range(2)]
    some = (sum(sizes[0]) + sum(sizes[1])) / 2 / 2**30
    torch.multiprocessing.spawn(_rank, (cfg, some, batch, str(folder)), nprocs=2)
    return [torch.load(folder / f"rank{r}.pt", weights_only=False) for r in range(2)], sizes, some * 2**30


def test_two_ranks_report_the_same(ranks: Any) -> None:
    steps = [rank["offset"] for rank in ranks[0]]
    ours = [
        {k: v for k, v in r["metrics"].items() if "rollout_train" in k or "sampling" in k or "first" in k}
        for r in steps
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
    for name, value in steps[0]["parameters"].items():
        assert torch.equal(value, steps[1]["parameters"][name]), name


def test_ranks_keep_the_same_prefixes(ranks: Any) -> None:
    """The model is sharded: a rank that skipped a prefix alone would leave the other waiting for its share of the weights."""
    found, sizes, budget = ranks
    assert sum(sizes[1]) < budget < sum(sizes[0])  # rank 1 alone would keep everything, rank 0 cannot
    kept = [rank["some"]["kept"] for rank in found]
    assert kept[0] == kept[1]
    assert 0 < sum(kept[0]) < 3
    for rank in found:
        some, none = rank["some"], rank["none"]
        assert some["metrics"].pop("actor/prefixes_kept") == pytest.approx(sum(kept[0]) / 3)
        assert none["metrics"].pop("actor/prefixes_kept") == 0.0
        assert some["metrics"] == pytest.approx(none["metrics"], rel=0, abs=0, nan_ok=True)
        assert some["metrics"]["actor/first_update/ratio_max_dev"] == 0.0
        for name, value in none["parameters"].items():
            assert torch.equal(some["parameters"][name], value), name
