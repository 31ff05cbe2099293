# SPDX-License-Identifier: Apache-2.0
"""The processor on a GPU gives the bits that it gives on the CPU, which are Pillow's and openpi's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlinf_phyai.models.pi05.processor import NormStats, PI05Processor, ProcessorOptions
from rlinf_phyai.models.pi05.resize import PilBilinearResize, runs_triton
from rlinf_phyai.models.pi05.tiny import train_tokenizer
from rlinf_phyai.models.pi05.tokenizer import PromptTokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def processors() -> tuple[PI05Processor, PI05Processor]:
    """The same processor on the GPU and on the CPU."""
    numbers = np.random.default_rng(0)
    low = numbers.normal(size=8)
    stats = NormStats(numbers.normal(size=8), np.abs(numbers.normal(size=8)), low, low + 1.3)
    actions = NormStats(stats.mean[:7], stats.std[:7], low[:7], low[:7] + 0.7)
    tokenizer = PromptTokenizer(train_tokenizer(1024), 200)
    gpu, cpu = (
        PI05Processor(ProcessorOptions(), tokenizer, {"state": stats, "actions": actions}, device)
        for device in ("cuda", "cpu")
    )
    return gpu, cpu


@pytest.mark.parametrize(
    ("height", "width"),
    [(256, 256), (224, 224), (480, 640), (640, 480), (128, 128), (225, 223), (500, 60), (1080, 1920)],
)
def test_the_resize_equals_pillow(height: int, width: int) -> None:
    generator = torch.Generator().manual_seed(height + width)
    images = torch.randint(0, 256, (2, height, width, 3), dtype=torch.uint8, generator=generator)
    wanted = PilBilinearResize(224, 224, use_pillow=True)(images)
    assert torch.equal(PilBilinearResize(224, 224)(images.cuda()).cpu(), wanted)
    if runs_triton(torch.device("cuda")):
        levels, out = torch.randn(256, device="cuda"), torch.full((2, 3, 224, 224), torch.nan, device="cuda")
        PilBilinearResize(224, 224).to_levels(images.cuda(), levels, out)
        assert torch.equal(out, levels[wanted.cuda().long()])


@pytest.mark.parametrize("sizes", [[(256, 256), (256, 256)], [(256, 256), (480, 640)], [(224, 224)]], ids=str)
def test_pixels_equal_those_of_the_cpu(processors, sizes: list[tuple[int, int]]) -> None:
    gpu, cpu = processors
    generator = torch.Generator().manual_seed(2)
    cameras = [torch.randint(0, 256, (3, *size, 3), dtype=torch.uint8, generator=generator) for size in sizes]
    assert torch.equal(gpu.pixel_values(cameras).cpu(), cpu.pixel_values(cameras))
    # a view whose rows are not contiguous, and images that are on the GPU already
    views = [images.cuda()[:, :, :, [2, 1, 0]].transpose(1, 2) for images in cameras]
    assert torch.equal(gpu.pixel_values(views).cpu(), cpu.pixel_values([view.cpu() for view in views]))


def test_pixels_states_and_actions_equal_those_of_the_cpu(processors) -> None:
    gpu, cpu = processors
    generator = torch.Generator().manual_seed(1)
    cameras = [torch.randint(0, 256, (5, 256, 256, 3), dtype=torch.uint8, generator=generator) for _ in range(2)]
    states = torch.randn(5, 8, generator=generator)
    actions = torch.randn(5, 10, 32, generator=generator)
    assert torch.equal(gpu.pixel_values(cameras).cpu(), cpu.pixel_values(cameras))
    assert torch.equal(gpu.normalize_state(states.cuda()).cpu(), cpu.normalize_state(states))
    assert torch.equal(gpu.unnormalize_actions(actions.cuda(), 5).cpu(), cpu.unnormalize_actions(actions, 5))
