# SPDX-License-Identifier: Apache-2.0
"""FP8 kernels against the reference, which multiplies the very same FP8 values in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf_phyai.kernels import BACKENDS, torch_ops
from rlinf_phyai.kernels.registry import load
from rlinf_phyai.kernels.torch_ops import Quantized
from tests.kernel_cases import TINY, Draw, relative_error

BF16 = torch.bfloat16
SIZES = [(17, 64, 96), (536, 2048, 16384), (1001, 512, 640)]
"""Rows, width, MLP width."""


def kernel(op: str, backend: str) -> Callable[..., Any]:
    function, reason = load(op, backend, torch.device("cuda"))
    if function is None:
        pytest.skip(reason)
    return function


def draw(rows: int, columns: int, seed: int = 0) -> Tensor:
    return Draw(TINY, "cuda", BF16, seed)(rows, columns)


def matrix(q: Quantized) -> Tensor:
    return q.values.float() * q.scale


def share_of_equal(a: Quantized, b: Quantized) -> float:
    return float((a.values.view(torch.uint8) == b.values.view(torch.uint8)).double().mean())


def assert_rounded_as_well(got: Quantized, want: Quantized, exact: Tensor) -> None:
    """A last bit that differs before the rounding may move a row's scale, and with it every value of the row; the error may not grow."""
    ours, theirs = (relative_error(matrix(q), exact.float()) for q in (got, want))
    assert ours < 1.05 * theirs
    assert theirs < 0.04


@pytest.mark.parametrize("rows, width, hidden", SIZES)
def test_weights_to_fp8(rows: int, width: int, hidden: int) -> None:
    x = draw(rows, hidden)
    x[3] = 0
    got, want = kernel("quantize_rows", "triton")(x), torch_ops.quantize_rows(x)
    assert torch.equal(got.scale, want.scale)
    # Triton converts to FP8 through 16 bits: what lies next to the middle between two FP8 values may go to the other one.
    exact = x.float() / want.scale
    ours, theirs = ((q.values.float() - exact).abs() for q in (got, want))
    assert (ours <= theirs * (1 + 2.0**-5) + 2.0**-20).all()
    assert share_of_equal(got, want) > 0.995


@pytest.mark.parametrize("rows, width, hidden", SIZES)
def test_norm_to_fp8(rows: int, width: int, hidden: int) -> None:
    x, y, weight = draw(rows, width), draw(rows, width, 1), draw(1, width, 2)[0].float() * 0.2
    ours, theirs = x.clone(), x.clone()
    got = kernel("add_rms_norm_fp8", "triton")(ours, y, weight, 1e-6)
    want = torch_ops.add_rms_norm_fp8(theirs, y, weight, 1e-6)
    assert torch.equal(ours, theirs)
    assert share_of_equal(got, want) > 0.9
    assert_rounded_as_well(got, want, torch_ops.rms_norm(theirs, weight, 1e-6))


@pytest.mark.parametrize("rows, width, hidden", SIZES)
def test_gated_gelu_to_fp8(rows: int, width: int, hidden: int) -> None:
    from rlinf_phyai.kernels.triton_fp8 import gated_gelu_fp8, unsupported_reason

    if unsupported_reason(torch.device("cuda")):
        pytest.skip("needs a Hopper GPU")
    gate_up = draw(rows, 2 * hidden) * 3
    product = torch_ops.gated_gelu(gate_up)
    assert_rounded_as_well(gated_gelu_fp8(gate_up), torch_ops.quantize_rows(product), product)


@pytest.mark.parametrize("rows, width, hidden", SIZES)
@pytest.mark.parametrize("backend", [b for b in BACKENDS["linear_fp8"] if b != "torch"])
def test_product(backend: str, rows: int, width: int, hidden: int) -> None:
    x, w = torch_ops.quantize_rows(draw(rows, hidden)), torch_ops.quantize_rows(draw(width, hidden, 1))
    got = kernel("linear_fp8", backend)(x, w, BF16)
    # fast accumulation keeps some 14 bits of a sum; rounding the operands to FP8 costs 3.7e-2
    assert relative_error(got, torch_ops.linear_fp8(x, w, BF16)) < 2e-2


@pytest.mark.parametrize("rows, width, hidden", SIZES)
@pytest.mark.parametrize("backend", [b for b in BACKENDS["linear_gated_gelu_fp8"] if b != "torch"])
def test_gated_product(backend: str, rows: int, width: int, hidden: int) -> None:
    x = torch_ops.quantize_rows(draw(rows, width))
    w = torch_ops.quantize_rows(draw(2 * hidden, width, 1) * width**-0.5)
    got, want = kernel("linear_gated_gelu_fp8", backend)(x, w, BF16), torch_ops.linear_gated_gelu_fp8(x, w, BF16)
    assert (
        relative_error(matrix(got), matrix(want)) < 3e-2
    )  # a value next to the middle of two FP8 values may fall to either
