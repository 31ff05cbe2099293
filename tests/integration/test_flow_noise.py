# SPDX-License-Identifier: Apache-2.0
"""Two training steps with learned noise on real LIBERO: the example of flow-noise with ``+size=tiny``."""

from __future__ import annotations

import pytest
import torch

from tests.integration.conftest import BuildModel, StartProgram, assert_scores_are_rlinfs, load

CONFIG = "libero_spatial_ppo_openpi_pi05_phyai_flow_noise"

pytestmark = [pytest.mark.integration, pytest.mark.long]


def test_learned_noise_is_trained_synced_and_scored_alike(start: StartProgram, build_actor_model: BuildModel) -> None:
    run = start("driver", "+size=tiny", config=CONFIG).finish()
    run.assert_success()
    scalars = run.scalars()
    for step in range(2):
        assert scalars["train/actor/rollout_train_logprob_gap"][step] < 1e-4
        assert scalars["train/actor/importance_sampling_weight"][step] == pytest.approx(1.0, abs=1e-3)
        assert scalars["train/actor/first_update/ratio_max_dev"][step] == 0.0
    first, second = scalars["train/actor/entropy_loss"]
    assert first != second  # the entropy of a noise that learns
    syncs = [load(run.record_dir / f"sync_{n}.pt") for n in range(2)]
    for step, sync in enumerate(syncs):
        model = build_actor_model(sync["actor"], CONFIG, ["+size=tiny"])
        assert_scores_are_rlinfs(model, load(run.record_dir / f"batch_{step}.pt"))
    heads = []
    for sync in syncs:
        head = {name: tensor for name, tensor in sync["actor"].items() if name.startswith("noise_head.")}
        assert len(head) == 8
        for rank, weights in enumerate(sync["rollout"]):
            for name, tensor in head.items():
                assert torch.equal(weights[name], tensor), (rank, name)
        heads.append(head)
    moved = {name for name in heads[0] if not torch.equal(heads[0][name], heads[1][name])}
    assert moved == {name for name in heads[0] if "mlp_logvar" in name}  # the bounds stay
