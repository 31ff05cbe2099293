# SPDX-License-Identifier: Apache-2.0
"""Run by ``test_triton_interpreted.py`` in a process whose Triton interprets kernels on the CPU.

float16 stands in for bfloat16: the interpreter rounds it correctly, so places of rounding can be compared bit by bit.
"""

from __future__ import annotations

import pytest
import torch

from rlinf_phyai.kernels import expert_layer as composed
from rlinf_phyai.kernels import (
    torch_ops,
    triton_attention,
    triton_expert,
    triton_fp8,
    triton_gated_gemm,
    triton_resize,
    triton_suffix_linear,
)
from rlinf_phyai.kernels.registry import BACKENDS, load
from rlinf_phyai.models.pi05 import resize
from rlinf_phyai.models.pi05.resize import PilBilinearResize
from tests.kernel_cases import ONE, OPERATIONS, TINY, Draw, expert_layer_inputs, relative_error, run_both

CPU = torch.device("cpu")
TYPES = [torch.float32, torch.float16]
CASES = [case for case, (op, _) in OPERATIONS.items() if "triton" in BACKENDS[op]]
MAY_DIFFER = {
    **dict.fromkeys(("rms_norm", "add_rms_norm", "ada_rms_norm", "add_ada_rms_norm"), 0.005),
    **dict.fromkeys(("layer_norm", "add_layer_norm", "rope_cache"), 0.005),
    "gated_gelu": 0.1,  # the reference's 1 + tanh cancels in the negative tail
}
"""Share of elements that may differ in 16 bits where float32 noise tips a rounding; a rounding left out changes a quarter."""


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("case", CASES)
def test_operation(case: str, dtype: torch.dtype) -> None:
    op, make = OPERATIONS[case]
    kernel, reason = load(op, "triton", CPU)
    assert kernel is not None, reason
    for got, want in run_both(op, kernel, make(Draw(TINY, "cpu", dtype))):
        assert relative_error(got, want) < (1e-6 if dtype == torch.float32 else 1e-3)
        if dtype != torch.float32 and op in MAY_DIFFER and got.numel():
            assert (got != want).double().mean() <= MAY_DIFFER[op]


@pytest.mark.parametrize("splits", [1, 3, 6])
def test_attention_does_not_depend_on_the_number_of_splits(splits: int) -> None:
    q, k, v, lengths, scale = OPERATIONS["attention"][1](Draw(TINY, "cpu", torch.float32))
    got = triton_attention._run(q, k, v, lengths, scale, 16, 16, splits, 4)
    assert relative_error(got, torch_ops.attention(q, k, v, lengths, scale)) < 1e-6


def test_attention_ignores_masked_slots() -> None:
    q, k, v, lengths, scale = OPERATIONS["attention"][1](Draw(TINY, "cpu", torch.float32))
    want = torch_ops.attention(q, k, v, lengths, scale)
    for b, length in enumerate(lengths.tolist()):
        k[b, length:], v[b, length:] = torch.nan, torch.nan
    for kernel in (triton_attention.attention, triton_attention.suffix_attention):
        assert relative_error(kernel(q, k, v, lengths, scale), want) < 1e-6


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "sizes, sms, fused_rows",
    [(TINY, 4, 0), (TINY, 64, 64), (ONE, 64, 32)],
    ids=["chained", "fused", "one sample"],
)
def test_expert_layer(
    sizes: object, dtype: torch.dtype, sms: int, fused_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (triton_attention, triton_suffix_linear):
        monkeypatch.setattr(module, "multiprocessors", lambda _device: sms)
    monkeypatch.setattr(triton_expert, "FUSED_ROWS", fused_rows)
    x, *arguments = expert_layer_inputs(Draw(sizes, "cpu", dtype))  # type: ignore[arg-type]
    ours, theirs, counters = x.clone(), x.clone(), triton_expert.new_counters(CPU)
    for _ in range(2):  # the second run finds the counters as the first one left them
        triton_expert.expert_layer(ours, *arguments, counters=counters, kernels=torch_ops)
        composed.expert_layer(theirs, *arguments)
    assert relative_error(ours, theirs) < (2e-6 if dtype == torch.float32 else 5e-3)
    assert not counters.any()


@pytest.mark.parametrize("wide", [True, False])
def test_gated_gemm(wide: bool) -> None:
    d = Draw(TINY, "cpu", torch.float32)
    x, weight = d(40, 64), d(96, 64, scale=0.125)
    got = triton_gated_gemm.fused_linear_gated_gelu(x, weight, block_m=16, block_n=16, block_k=16, group=2, wide=wide)
    assert relative_error(got, torch_ops.gated_gelu(torch_ops.linear(x, weight))) < 1e-6


@pytest.mark.parametrize(
    ("height", "width", "side"), [(40, 40, 28), (28, 28, 28), (20, 31, 14), (44, 8, 14), (9, 12, 14), (14, 28, 14)]
)
def test_resize_equals_pillow(height: int, width: int, side: int) -> None:
    generator = torch.Generator().manual_seed(height)
    images = torch.randint(0, 256, (2, height, width, 3), dtype=torch.uint8, generator=generator)
    levels = torch.randn(256, generator=generator)
    resized = PilBilinearResize(side, side)
    out = torch.full((2, 2, 3, side, side), torch.nan)
    resized.to_levels(images, levels, out[:, 1])
    assert torch.equal(out[:, 1], levels[resized(images).long()])
    assert out[:, 0].isnan().all()


@pytest.mark.parametrize("columns_first", [False, True])
def test_resize_in_either_order(columns_first: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (2, 40, 33, 3), dtype=torch.uint8, generator=generator)
    levels, out = torch.arange(256, dtype=torch.int32), torch.full((2, 3, 11, 14), -1, dtype=torch.int32)
    taps = (resize._device_taps(33, 14, CPU), resize._device_taps(40, 11, CPU))
    triton_resize.resize_to_levels(images, *taps, (0, 0), columns_first, levels, out)
    planes = images.permute(0, 3, 1, 2).contiguous()
    assert torch.equal(out, resize.resample(planes, 11, 14, columns_first).int())


@pytest.fixture
def half_precision_as_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter rounds to FP8 wrongly where the mantissa carries over, so float16 stands in for it."""
    monkeypatch.setattr(torch_ops, "FP8", torch.float16)


@pytest.mark.usefixtures("half_precision_as_fp8")
@pytest.mark.parametrize("width", [24, 48, 64])
def test_rows_to_fp8(width: int) -> None:
    d = Draw(TINY, "cpu", torch.float16)
    x, y, weight, gate_up = d(7, width), d(7, width), d.f32(width), d(7, 2 * width, scale=3.0)
    x[3], y[3] = 0, 0
    ours, theirs = x.clone(), x.clone()
    for got, want in (
        (triton_fp8.quantize_rows(x), torch_ops.quantize_rows(x)),
        (triton_fp8.add_rms_norm_fp8(ours, y, weight, 1e-6), torch_ops.add_rms_norm_fp8(theirs, y, weight, 1e-6)),
        (triton_fp8.gated_gelu_fp8(gate_up), torch_ops.quantize_rows(torch_ops.gated_gelu(gate_up))),
    ):
        assert relative_error(got.scale, want.scale) < 1e-3
        assert relative_error(got.values * got.scale, want.values * want.scale) < 1e-3
        assert got.values.abs().amax(dim=1).sub(448)[got.scale[:, 0] > 1e-10].abs().max() <= 0.25
    assert torch.equal(ours, theirs)
