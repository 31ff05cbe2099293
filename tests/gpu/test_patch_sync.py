# SPDX-License-Identifier: Apache-2.0
"""RLinf's patch syncer as installed, sender included: it works on CUDA only."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_phyai.engine import DeviceConfig, Engine, EngineArgs, EngineConfig, RuntimeConfig
from rlinf_phyai.models.pi05 import PI05Args
from rlinf_phyai.models.pi05.tiny import make_tiny_checkpoint
from rlinf_phyai.rollout.weight_sync import EngineWeights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TRAINED = ("action_out_proj.", "paligemma_with_expert.gemma_expert.model.layers.0.")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    directory = make_tiny_checkpoint(tmp_path)
    config = EngineConfig(DeviceConfig("cuda", torch.bfloat16), RuntimeConfig(progress=False))
    with Engine(EngineArgs("pi05", PI05Args(directory, 2, capture_rollout=True), config)) as engine:
        yield engine


@pytest.mark.parametrize("snapshot_device", ["cpu", "cuda"])
def test_patches_land_in_the_live_weights(engine: Engine, snapshot_device: str) -> None:
    patch_syncer = pytest.importorskip("rlinf.hybrid_engines.weight_syncer.patch_syncer")
    options = {"snapshot_device": snapshot_device, "transport_device": "cuda", "init_sync_enabled": True}
    sender, receiver = (patch_syncer.PatchWeightSyncer(**options) for _ in range(2))
    weights = EngineWeights(engine)
    views = weights.state_dict()
    pointers = {name: view.data_ptr() for name, view in views.items()}
    actor = {
        name: torch.randn(view.shape, device="cuda", dtype=torch.float32).to(view.dtype) for name, view in views.items()
    }
    tied = "paligemma_with_expert.paligemma.lm_head.weight"
    actor[tied] = actor["paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"]
    trained = [name for name in actor if name.startswith(TRAINED)]

    async def exchange(version: int, to_receiver: Any, to_sender: Any) -> None:
        async def send() -> None:
            if not sender.sender_initialized():
                await sender.init_sender(actor, trained, to_receiver.put, to_sender.get)
            await sender.sync(actor, to_receiver.put, version)

        task = asyncio.create_task(send())
        with weights.session() as session:
            if not receiver.receiver_initialized():
                await receiver.init_receiver(weights.state_dict(), to_receiver.get, to_sender.put)
            session.version = await receiver.apply(weights, to_receiver.get)
        await task

    async def run() -> None:
        to_receiver: asyncio.Queue[Any] = asyncio.Queue()
        to_sender: asyncio.Queue[Any] = asyncio.Queue()
        for version in range(3):
            await exchange(version, to_receiver, to_sender)
            assert engine.version == version
            for name, view in weights.state_dict().items():
                assert view.is_meta or torch.equal(view, actor[name]), name
            for name in trained if version == 0 else ():  # the third round is an empty patch
                actor[name].view(-1)[::5] += 1.0

    asyncio.run(run())
    assert {name: view.data_ptr() for name, view in weights.state_dict().items()} == pointers
