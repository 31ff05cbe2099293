# SPDX-License-Identifier: Apache-2.0
"""Every backend of every operation against the reference, on the GPU, at tiny and real sizes."""

from __future__ import annotations

import pytest
import torch

from rlinf_phyai.kernels import BACKENDS, torch_ops
from rlinf_phyai.kernels import expert_layer as composed
from rlinf_phyai.kernels.registry import load
from tests.kernel_cases import (
    ONE,
    OPERATIONS,
    REAL_PREFIX,
    REAL_SUFFIX,
    REAL_VISION,
    TINY,
    Draw,
    Sizes,
    expert_layer_inputs,
    relative_error,
    run_both,
)  # fmt: skip

SIZES = {"tiny": TINY, "one": ONE, "suffix": REAL_SUFFIX, "prefix": REAL_PREFIX, "vision": REAL_VISION}
TYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
CASES = [(case, backend) for case, (op, _) in OPERATIONS.items() for backend in BACKENDS[op] if backend != "torch"]
ONLY_BF16 = {"flash", "cudnn", "flashinfer"}
VISION_ONLY = {"vision_attention", "linear_gelu", "layer_norm", "add_layer_norm"}


def _skip_reason(op: str, backend: str, size: str, dtype: torch.dtype, sizes: Sizes) -> str | None:
    if dtype == torch.float32 and backend in ONLY_BF16:
        return "takes 16-bit types only"
    if size == "vision" and op not in VISION_ONLY:
        return "not a shape of this operation"
    if size == "prefix" and (dtype == torch.float32 or op in VISION_ONLY or op == "suffix_linear"):
        return "not a shape of this operation"
    if backend in ("flash", "cudnn", "flashinfer") and sizes.head_dim % 8:
        return "head width must be a multiple of 8"
    if backend == "flashinfer" and sizes.width % 64:
        return "width must be a multiple of the vector size"
    return None


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case, backend", CASES)
def test_backend(case: str, backend: str, size: str, dtype: str) -> None:
    op, make = OPERATIONS[case]
    reason = _skip_reason(op, backend, size, TYPES[dtype], SIZES[size])
    if reason:
        pytest.skip(reason)
    kernel, why_not = load(op, backend, torch.device("cuda"))
    if kernel is None:
        pytest.skip(why_not)
    for got, want in run_both(op, kernel, make(Draw(SIZES[size], "cuda", TYPES[dtype]))):
        # TF32 is off for the reference's float32 products by default
        assert relative_error(got, want) < (1e-2 if dtype == "bf16" else 2e-5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", ["tiny", "one", "suffix", "real one", "real twenty"])
def test_expert_layer(size: str, dtype: str) -> None:
    from rlinf_phyai.kernels import triton_expert

    sizes = {
        **SIZES,
        "real one": Sizes(1, 10, 8, 1, 256, 1024, 4096, 546),
        "real twenty": Sizes(20, 10, 8, 1, 256, 1024, 4096, 546),
    }[size]
    if dtype == "f32" and sizes.width > 100:
        pytest.skip("float32 is for tiny models")
    x, *arguments = expert_layer_inputs(Draw(sizes, "cuda", TYPES[dtype]))
    counters = triton_expert.new_counters(x.device)
    want = x.clone()
    composed.expert_layer(want, *arguments)
    results = []
    for _ in range(5):
        got = x.clone()
        triton_expert.expert_layer(got, *arguments, counters=counters, kernels=torch_ops)
        results.append(got)
    assert relative_error(results[0], want) < (1e-2 if dtype == "bf16" else 2e-5)
    assert all(torch.equal(results[0], other) for other in results)
    assert not counters.any()


def test_expert_layer_in_a_graph_gives_the_same_bits() -> None:
    from rlinf_phyai.kernels import triton_expert

    sizes = Sizes(1, 10, 8, 1, 256, 1024, 4096, 546)
    layers = [expert_layer_inputs(Draw(sizes, "cuda", torch.bfloat16, seed))[1:] for seed in range(4)]
    start = Draw(sizes, "cuda", torch.bfloat16, 99)(10, 1024)
    counters = triton_expert.new_counters(start.device)
    static = start.clone()

    def run() -> None:
        for arguments in layers:
            triton_expert.expert_layer(static, *arguments, counters=counters)

    run()
    eager = static.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(20):
        static.copy_(start)
        graph.replay()
        assert torch.equal(static, eager)


@pytest.mark.parametrize("rows", [17, 536, 1000])
@pytest.mark.parametrize("options", [{}, {"wide": False}, {"flatten": True, "stages": 3}])
def test_gated_gemm(rows: int, options: dict[str, object]) -> None:
    from rlinf_phyai.kernels.triton_gated_gemm import fused_linear_gated_gelu, unsupported_reason

    reason = unsupported_reason(torch.device("cuda"))
    if reason:
        pytest.skip(reason)
    d = Draw(TINY, "cuda", torch.bfloat16)
    x, weight = d(rows, 512), d(2 * 640, 512, scale=512**-0.5)
    want = torch_ops.gated_gelu(torch_ops.linear(x, weight))
    assert relative_error(fused_linear_gated_gelu(x, weight, **options), want) < 1e-2  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", [b for b in BACKENDS["attention"] if b not in ("torch", "cudnn")])
def test_masked_slots_may_hold_anything(backend: str) -> None:
    kernel, why_not = load("attention", backend, torch.device("cuda"))
    if kernel is None:
        pytest.skip(why_not)
    q, k, v, lengths, scale = OPERATIONS["attention"][1](Draw(REAL_PREFIX, "cuda", torch.bfloat16))
    want = torch_ops.attention(q, k, v, lengths, scale)
    for b, length in enumerate(lengths.tolist()):
        k[b, length:], v[b, length:] = 1e4, 1e4
    assert relative_error(kernel(q, k, v, lengths, scale), want) < 1e-2


@pytest.mark.parametrize("rows", [536, 4288, 17152])
def test_split_products(rows: int) -> None:
    from rlinf_phyai.kernels import split_linear

    d = Draw(TINY, "cuda", torch.bfloat16)
    x, weight, bias = d(rows, 512), d(2048, 512, scale=512**-0.5), d(2048)
    assert relative_error(split_linear.linear(x, weight), torch_ops.linear(x, weight)) < 1e-2
    assert torch.equal(split_linear.linear(x, weight, bias), torch_ops.linear(x, weight, bias))
