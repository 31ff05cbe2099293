# SPDX-License-Identifier: Apache-2.0
"""``prefix_precision: fp8``: its rounding, and that its weights are derived from the parameters at setup and after every update.

On a CPU the products are emulated from the same FP8 values; on a Hopper GPU the same tests run the real ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf_phyai.engine import Engine
from rlinf_phyai.engine.kernel_policy import load_kernel_policy
from rlinf_phyai.errors import PhyaiError, RequestError
from rlinf_phyai.kernels import torch_ops
from rlinf_phyai.models.pi05 import PI05Args

from .checkpoints import EXPERT, LANGUAGE, random_state, write_checkpoint
from .conftest import SIZES, Target, assert_same_bits, rollout_request, rollout_tensors, step_request

MakeEngine = Callable[..., Engine]

WIDE = SIZES.but(prefix_mlp=64)
OLD, NEW = random_state(WIDE, seed=3), random_state(WIDE, seed=4)
VALUE = {"value_mode": "mean_token", "prefix_precision": "fp8"}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("wide"), OLD, WIDE)


@pytest.fixture
def hopper(target: Target) -> Target:
    if target.device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")
    return target


@pytest.fixture
def options(hopper: Target, tmp_path: Path) -> dict[str, Any]:
    """Of an engine: the FP8 kernels of the packaged policy on a GPU, the reference for the rest."""
    if hopper.device == "cpu":
        return {"target": hopper} | VALUE
    packaged = load_kernel_policy("rlinf_bf16").operations
    chosen = {name: backend for name, backend in packaged.items() if "fp8" in name or name == "quantize_rows"}
    policy = tmp_path / "fp8.yaml"
    policy.write_text(json.dumps({"operations": chosen}))
    return {"target": hopper, "runtime": {"kernel_policy": policy}} | VALUE


def everything(engine: Engine) -> dict[str, Tensor]:
    return rollout_tensors(engine, rollout_request(batch=3)) | {"value": engine.value(step_request(batch=4))}


def test_rows_are_scaled_and_rounded_to_the_nearest() -> None:
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    x[1] *= 1e4
    x[2] = 0
    x[3] = 0.5 * torch.tensor([-448.0, 448.0, 2.0**-6, 17.0] * 8)  # FP8 values times one half: nothing is lost but 17
    values, scale = torch_ops.quantize_rows(x)
    back = values.float() * scale
    assert values.dtype == torch.float8_e4m3fn
    assert torch.equal(values.float().abs().amax(1), torch.tensor([448.0, 448, 0, 448, 448]))
    assert torch.equal(back[3], 0.5 * torch.tensor([-448.0, 448.0, 2.0**-6, 16.0] * 8))
    # three mantissa bits: half a step is 1/16 of a value, or 2^-10 of the row's scale below the smallest normal number
    bound = (x.abs() / 16).maximum(scale * 2.0**-10) * 1.0001
    assert ((back - x).abs() <= bound).all()


def test_the_emulated_product_is_that_of_the_rounded_matrices() -> None:
    gen = torch.Generator().manual_seed(1)
    x, w = torch.randn(3, 16, generator=gen), torch.randn(32, 16, generator=gen)
    qx, qw = torch_ops.quantize_rows(x), torch_ops.quantize_rows(w)
    want = (qx.values.double() * qx.scale) @ (qw.values.double() * qw.scale).T
    assert (torch_ops.linear_fp8(qx, qw, torch.float32) - want).abs().max() < 1e-5
    gated = torch_ops.linear_gated_gelu_fp8(qx, qw, torch.float32)
    product = torch.nn.functional.gelu(want[:, :16], approximate="tanh") * want[:, 16:]
    error = gated.values.float() * gated.scale - product
    assert error.norm() / product.norm() < 0.05


def test_it_changes_the_result_a_little(make_engine: MakeEngine, wide: Path, options: dict[str, Any]) -> None:
    fp8 = everything(make_engine(wide, **options))
    plain = everything(make_engine(wide, **(options | {"prefix_precision": None})))
    for name in ("actions", "value"):
        gap = (fp8[name] - plain[name]).abs().max()
        assert 0 < gap < 0.3, (name, gap)


@pytest.mark.parametrize("stem", [f"{LANGUAGE}layers.", f"{LANGUAGE}layers.0.mlp.down", EXPERT, ""])
def test_l5_an_update_gives_what_a_fresh_engine_gives(
    make_engine: MakeEngine, wide: Path, tmp_path: Path, options: dict[str, Any], stem: str
) -> None:
    update = {name: tensor for name, tensor in NEW.items() if name.startswith(stem)}
    engine = make_engine(wide, **options)
    before = everything(engine)
    with engine.weight_update() as write:
        write(update)
    after = everything(engine)
    fresh = make_engine(write_checkpoint(tmp_path / "new", OLD | update, WIDE), **options)
    assert_same_bits(after, everything(fresh))
    assert not torch.equal(after["actions"], before["actions"])


def test_writes_through_the_views_are_quantised_too(
    make_engine: MakeEngine, wide: Path, options: dict[str, Any]
) -> None:
    """As RLinf's patch syncer writes."""
    engine = make_engine(wide, **options)
    before = everything(engine)
    with engine.weight_update():
        engine.state_dict()[f"{LANGUAGE}layers.0.mlp.up_proj.weight"].mul_(2)
    assert not torch.equal(everything(engine)["actions"], before["actions"])


def test_the_copies_keep_their_address(make_engine: MakeEngine, wide: Path, options: dict[str, Any]) -> None:
    """Captured graphs read them there."""
    engine = make_engine(wide, **options)
    assert engine._model is not None
    prefix = engine._model.tables.fp8_prefix
    assert prefix is not None
    before = [tensor.data_ptr() for tensor in prefix._tensors()]
    with engine.weight_update() as write:
        write({name: tensor for name, tensor in NEW.items() if name.startswith(f"{LANGUAGE}layers.")})
    assert [tensor.data_ptr() for tensor in prefix._tensors()] == before


def test_an_update_of_other_parameters_does_not_quantise_again(
    make_engine: MakeEngine, wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(wide, **VALUE)
    assert engine._model is not None
    prefix = engine._model.tables.fp8_prefix
    assert prefix is not None
    calls: list[Tensor] = []
    quantize = prefix._kernels.quantize_rows
    monkeypatch.setattr(
        prefix, "_kernels", type("Counted", (), {"quantize_rows": lambda _, w: calls.append(w) or quantize(w)})()
    )
    for stem, expected in ((EXPERT, 0), (f"{LANGUAGE}layers.1.mlp.", 2 * WIDE.layers)):
        with engine.weight_update() as write:
            write({name: tensor for name, tensor in NEW.items() if name.startswith(stem)})
        assert len(calls) == expected


def test_offloading_releases_the_copies(make_engine: MakeEngine, wide: Path, options: dict[str, Any]) -> None:
    engine = make_engine(wide, **options)
    before = everything(engine)
    assert engine._model is not None
    prefix = engine._model.tables.fp8_prefix
    assert prefix is not None
    engine.offload()
    assert not any(
        tensor.untyped_storage().nbytes()
        for layer in prefix.layers
        for q in (layer.gate_up, layer.down)
        for tensor in q
    )
    engine.reload()
    assert_same_bits(everything(engine), before)


def test_what_cannot_run_is_refused(make_engine: MakeEngine, checkpoint: Path) -> None:
    with pytest.raises(RequestError, match="prefix_precision is 'int8'; allowed: None"):
        PI05Args(checkpoint, 1, prefix_precision="int8")
    with pytest.raises(PhyaiError, match="multiples of 16; the model has 48 and 40"):
        make_engine(checkpoint, prefix_precision="fp8")
