# SPDX-License-Identifier: Apache-2.0
"""A small random checkpoint (milliseconds per step) and helpers to build engines and requests for it.

Every test here runs on the CPU in float32; those that take ``target`` also run on CUDA, with and without graphs, where there is a
GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_phyai.engine import DeviceConfig, Engine, EngineArgs, EngineConfig, RuntimeConfig
from rlinf_phyai.models.pi05 import PI05Args, PI05Request, PI05RolloutRequest

from .checkpoints import PI05Sizes, random_state, write_checkpoint

SIZES = PI05Sizes()
STEPS = 3


@dataclass(frozen=True)
class Target:
    """Device and graph setting of an engine under test."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    graphs: bool = False


_needs_cuda = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
TARGETS = [
    pytest.param(Target(), id="cpu"),
    pytest.param(Target("cuda", torch.bfloat16, graphs=False), id="cuda-eager", marks=_needs_cuda),
    pytest.param(Target("cuda", torch.bfloat16, graphs=True), id="cuda-graphs", marks=_needs_cuda),
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The models are so small that a second thread costs more than it computes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> Target:
    return request.param


def build_engine(
    checkpoint: Path,
    target: Target = Target(),
    max_batch_size: int = 4,
    runtime: dict[str, Any] | None = None,
    **args: Any,
) -> Engine:
    """An engine for tests; ``args`` go to PI05Args, ``runtime`` to RuntimeConfig."""
    options: dict[str, Any] = {"use_cuda_graph": target.graphs, "progress": False} | (runtime or {})
    return Engine(
        EngineArgs(
            plugin="pi05",
            plugin_args=PI05Args(
                checkpoint_dir=checkpoint, max_batch_size=max_batch_size, **({"num_steps": STEPS} | args)
            ),
            config=EngineConfig(
                device=DeviceConfig(target=target.device, params_dtype=target.dtype), runtime=RuntimeConfig(**options)
            ),
        )
    )


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), random_state(SIZES, seed=3), SIZES)


@pytest.fixture
def make_engine(checkpoint: Path) -> Iterator[Callable[..., Engine]]:
    """``make_engine(checkpoint=..., target=..., **args)``; the engines are closed at the end of the test."""
    built: list[Engine] = []

    def make(path: Path = checkpoint, **options: Any) -> Engine:
        built.append(build_engine(path, **options))
        return built[-1]

    yield make
    for engine in built:
        engine.close()


def request_fields(batch: int = 2, sizes: PI05Sizes = SIZES, cameras: int = 2, seed: int = 0) -> dict[str, Any]:
    """Fields of a PI05Request: prompts of different lengths (1 and the maximum included for batches of two or more)."""
    gen = torch.Generator().manual_seed(seed)
    lens = torch.tensor([(1, sizes.prompt_tokens, 5, 3, 7)[i % 5] for i in range(batch)], dtype=torch.int64)
    ids = torch.randint(1, sizes.vocab, (batch, sizes.prompt_tokens), generator=gen)
    ids[torch.arange(sizes.prompt_tokens)[None] >= lens[:, None]] = 0
    return {
        "pixel_values": torch.rand(batch, cameras, 3, sizes.image_size, sizes.image_size, generator=gen) * 2 - 1,
        "input_ids": ids,
        "lang_lens": lens,
        "noise": torch.randn(batch, sizes.horizon, sizes.action_dim, generator=gen),
    }


def rollout_fields(
    batch: int = 2, num_steps: int = STEPS, sde_step: int | None = 1, seed: int = 0, sizes: PI05Sizes = SIZES
) -> dict[str, Any]:
    """Fields of a PI05RolloutRequest with one stochastic step (None: all of them)."""
    gen = torch.Generator().manual_seed(100 + seed)
    sigmas = torch.zeros(batch, num_steps)
    sigmas[:, slice(None) if sde_step is None else sde_step] = 0.6
    step_noise = torch.randn(batch, num_steps, sizes.horizon, sizes.action_dim, generator=gen)
    return request_fields(batch, sizes, seed=seed) | {"sigmas": sigmas, "step_noise": step_noise}


def step_request(**options: Any) -> PI05Request:
    return PI05Request(**request_fields(**options))


def rollout_request(**options: Any) -> PI05RolloutRequest:
    return PI05RolloutRequest(**rollout_fields(**options))


def rollout_tensors(engine: Engine, request: PI05RolloutRequest) -> dict[str, torch.Tensor]:
    """The tensors of one rollout step, by name."""
    output = engine.rollout_step(request)
    found = {"actions": output.actions, "chains": output.chains, "log_probs": output.log_probs}
    return found if output.values is None else found | {"values": output.values}


def assert_same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), f"{name} differs by up to {(a[name] - b[name]).abs().max()}"
