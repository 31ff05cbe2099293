# SPDX-License-Identifier: Apache-2.0
"""RLinf's patch syncer as installed, sender included: it works on CUDA only."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from rlinf_phyai.engine import Engine
from rlinf_phyai.rollout.weight_sync import EngineWeights
from tests.unit.engine.checkpoints import EMBEDDING, EXPERT, EXPERT_LM_HEAD, LM_HEAD, random_state, write_checkpoint
from tests.unit.engine.conftest import SIZES, Target, build_engine, rollout_request, rollout_tensors

DEVICE = "cuda"
TRAINED = (EXPERT, "action_", "time_mlp_", "value_head.")  # what RLinf trains with train_expert_only
SYNCS = 5


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, random_state(SIZES, seed=3), SIZES)


@pytest.fixture
def engines(checkpoint: Path) -> Iterator[tuple[Engine, Engine]]:
    """The engine under test, and one that gets every weight anew each time."""
    both = tuple(build_engine(checkpoint, Target(DEVICE, torch.bfloat16, graphs=True)) for _ in range(2))
    yield both  # type: ignore[misc]
    for engine in both:
        engine.close()


class Exchange:
    """A sender and a receiver of one process, joined as RLinf's workers join theirs."""

    def __init__(self, repository: Path, weights: EngineWeights, **changes: Any) -> None:
        from rlinf.hybrid_engines.weight_syncer import WeightSyncer

        options = OmegaConf.load(repository / "examples/embodiment/config/weight_syncer/patch.yaml")
        options.patch.update(changes)
        self.sender, self.receiver = (WeightSyncer.create(options) for _ in range(2))  # type: ignore[arg-type]
        self.weights = weights
        self.sent: list[Any] = []

    async def sync(self, actor: dict[str, Tensor], version: int, queues: list[asyncio.Queue[Any]]) -> None:
        to_receiver, to_sender = queues

        async def put(payload: Any) -> None:
            self.sent.append(payload)
            await to_receiver.put(payload)

        async def send() -> None:
            if not self.sender.sender_initialized():
                names = [name for name in actor if name.startswith(TRAINED)]
                await self.sender.init_sender(actor, names, put, to_sender.get)
            await self.sender.sync(actor, put, version)

        async def receive() -> None:
            with self.weights.session() as session:
                if not self.receiver.receiver_initialized():
                    await self.receiver.init_receiver(self.weights.state_dict(), to_receiver.get, to_sender.put)
                session.version = await self.receiver.apply(self.weights, to_receiver.get)

        await asyncio.wait_for(asyncio.gather(send(), receive()), timeout=120)


def new_actor(views: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights with the engine's names, shapes and types, all of them other than the engine's."""
    gen = torch.Generator(device=DEVICE).manual_seed(7)
    actor = {
        name: (0.05 * torch.randn(view.shape, generator=gen, device=DEVICE)).to(view.dtype)
        for name, view in views.items()
    }
    actor[LM_HEAD] = actor[EMBEDDING]  # tied, as in RLinf's model
    return actor


def train(actor: dict[str, Tensor], step: int) -> None:
    """Change a twentieth of the entries, at other places each time; one step changes nothing."""
    gen = torch.Generator(device=DEVICE).manual_seed(100 + step)
    for name, tensor in actor.items():
        if name.startswith(TRAINED) and step != 3:
            chosen = torch.rand(tensor.shape, generator=gen, device=DEVICE) < 0.05
            tensor[chosen] += 0.5


@pytest.mark.parametrize("compression", ["none", "nvcomp_lz4"])
@pytest.mark.parametrize("delta_encoding", [True, False])
@pytest.mark.parametrize("snapshot_device", ["cpu", "cuda"])
def test_patches_land_in_the_live_weights(
    snapshot_device: str, delta_encoding: bool, compression: str, engines: tuple[Engine, Engine], repository: Path
) -> None:
    """After each of several syncs the engine holds the actor's weights and computes what a full update gives."""
    if compression != "none":
        pytest.importorskip("nvidia.nvcomp")
    engine, reference = engines
    weights = EngineWeights(engine)
    request = rollout_request(batch=3)
    rollout_tensors(engine, request)
    pointers = {name: view.data_ptr() for name, view in weights.state_dict().items()}
    graphs = {key: id(graph) for key, graph in engine.captured_graphs().items()}
    assert graphs
    actor = new_actor(weights.state_dict())
    exchange = Exchange(
        repository,
        weights,
        snapshot_device=snapshot_device,
        delta_encoding=delta_encoding,
        compression_algorithm=compression,
    )

    async def run() -> None:
        queues: list[asyncio.Queue[Any]] = [asyncio.Queue(), asyncio.Queue()]
        for version in range(SYNCS):
            if version:
                train(actor, version)
            await exchange.sync(actor, version, queues)
            assert engine.version == version
            for name, view in weights.state_dict().items():
                assert view.is_meta or torch.equal(view, actor[name]), f"{name} after sync {version}"
            with reference.weight_update() as update:
                update({name: tensor for name, tensor in actor.items() if name != EXPERT_LM_HEAD})
            found, wanted = rollout_tensors(engine, request), rollout_tensors(reference, request)
            assert all(torch.equal(found[name], wanted[name]) for name in wanted), f"results after sync {version}"

    asyncio.run(run())
    kinds = [type(payload).__name__ for payload in exchange.sent if not isinstance(payload, dict)]
    patch = "WeightPatch" if compression == "none" else "CompressedWeightPatch"
    # The full first sync leaves the first patch nothing to say, and one step changed nothing.
    assert kinds == ["EmptyWeightPatch", patch, patch, "EmptyWeightPatch", patch]
    assert {name: view.data_ptr() for name, view in weights.state_dict().items()} == pointers
    assert {key: id(graph) for key, graph in engine.captured_graphs().items()} == graphs
