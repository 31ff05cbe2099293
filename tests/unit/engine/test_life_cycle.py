# SPDX-License-Identifier: Apache-2.0
"""Building and closing an engine, and what it refuses before and after."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_phyai.engine import (
    DeviceConfig,
    Engine,
    EngineArgs,
    EngineClosedError,
    EngineConfig,
    KernelPolicyError,
    PhyaiError,
    RuntimeConfig,
    UpdateState,
)
from rlinf_phyai.models.pi05 import PI05Args

from .conftest import Target, assert_same_bits, build_engine, rollout_request, rollout_tensors, step_request

MakeEngine = Callable[..., Engine]


def calls(engine: Engine) -> dict[str, Callable[[], Any]]:
    return {
        "step": lambda: engine.step(step_request()),
        "rollout_step": lambda: engine.rollout_step(rollout_request()),
        "value": lambda: engine.value(step_request()),
        "state_dict": engine.state_dict,
        "begin_weight_update": engine.begin_weight_update,
        "update_weights": lambda: engine.update_weights({}),
        "finish_weight_update": engine.finish_weight_update,
        "abort_weight_update": engine.abort_weight_update,
    }


def test_every_call_on_a_closed_engine_says_so(make_engine: MakeEngine, target: Target) -> None:
    engine = make_engine(target=target)
    engine.step(step_request())
    engine.close()
    assert engine.state is UpdateState.CLOSED
    for call in calls(engine).values():
        with pytest.raises(EngineClosedError, match=r"closed.*build a new one"):
            call()


def test_closing_twice_is_fine(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.close()
    engine.close()
    assert engine.version == 0


def test_context_manager_closes_also_after_an_error(checkpoint: Path) -> None:
    with build_engine(checkpoint) as engine:
        engine.step(step_request())
    assert engine.state is UpdateState.CLOSED

    def fail() -> None:
        with build_engine(checkpoint) as broken:
            kept.append(broken)
            raise KeyError("stop")

    kept: list[Engine] = []
    with pytest.raises(KeyError, match="stop"):
        fail()
    assert kept[0].state is UpdateState.CLOSED


def test_closing_frees_the_weights_and_buffers(checkpoint: Path) -> None:
    engine = build_engine(checkpoint)
    rollout_tensors(engine, rollout_request())
    weight = weakref.ref(engine.state_dict()["action_out_proj.weight"])
    engine.close()
    gc.collect()
    assert weight() is None


def test_a_new_engine_after_closing_one(checkpoint: Path, target: Target) -> None:
    with build_engine(checkpoint, target) as engine:
        expected = rollout_tensors(engine, rollout_request())
    with build_engine(checkpoint, target) as engine:
        assert_same_bits(rollout_tensors(engine, rollout_request()), expected)


def test_two_engines_live_side_by_side(make_engine: MakeEngine) -> None:
    first, second = make_engine(), make_engine()
    expected = rollout_tensors(second, rollout_request())
    with first.weight_update() as update:
        update({"action_out_proj.bias": torch.ones(8)})
    first.close()
    assert_same_bits(rollout_tensors(second, rollout_request()), expected)


def args(checkpoint: Path, **config: Any) -> EngineArgs:
    device = {"target": "cpu", "params_dtype": torch.float32} | config.pop("device", {})
    return EngineArgs(
        plugin=config.pop("plugin", "pi05"),
        plugin_args=config.pop("plugin_args", PI05Args(checkpoint_dir=checkpoint, max_batch_size=1)),
        config=EngineConfig(DeviceConfig(**device), RuntimeConfig(progress=False, **config)),
    )


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"plugin": "pi0"}, ValueError, r"'pi0'.*pi05"),
        ({"plugin_args": {"max_batch_size": 1}}, TypeError, "PI05Args.*dict"),
        ({"device": {"target": "tpu"}}, (ValueError, RuntimeError), "tpu"),
        ({"device": {"target": "mps"}}, ValueError, "'mps'.*cuda.*cpu"),
        ({"device": {"params_dtype": torch.float16}}, ValueError, r"float16.*bfloat16"),
        ({"kernel_policy": "fastest"}, KernelPolicyError, "'fastest'.*torch_reference"),
        ({"kernel_policy": "nowhere/policy.yaml"}, KernelPolicyError, "does not exist"),
        ({"max_graphs": 0}, ValueError, "max_graphs"),
    ],
)
def test_wrong_configuration(change: dict[str, Any], error: Any, message: str, checkpoint: Path) -> None:
    with pytest.raises(error, match=message):
        Engine(args(checkpoint, **change))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_a_gpu(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="no CUDA device"):
        Engine(args(checkpoint, device={"target": "cuda"}))


@pytest.mark.parametrize(
    "content, message",
    [
        ("operations: {attentoin: torch}", "attentoin.*attention"),
        ("operations: {attention: flash9}", "flash9.*torch"),
        ("operation: {}", "operation"),
        ("fallback: cuda", "fallback"),
        ("- attention", "mapping"),
        ("operations: [1", "YAML"),
    ],
)
def test_wrong_kernel_policy_file(content: str, message: str, checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(content)
    with pytest.raises(KernelPolicyError, match=message):
        Engine(args(checkpoint, kernel_policy=str(file)))


@pytest.mark.parametrize(
    "content", [b"operations: {attention: null}", b"operations: {1: torch}", b"1: 2\nfoo: 3", b"\xff\xfe\x80"]
)
def test_kernel_policy_file_of_other_types(content: bytes, checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_bytes(content)
    with pytest.raises(KernelPolicyError, match=r"policy\.yaml"):
        Engine(args(checkpoint, kernel_policy=str(file)))


@pytest.mark.parametrize("target", ["tpu", "", None, "xla"])
def test_devices_that_are_none(target: Any) -> None:
    with pytest.raises(ValueError, match=r"DeviceConfig\.target is .*'cpu'"):
        DeviceConfig(target=target)


def test_kernel_policy_from_the_environment_only_when_asked(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R15: none is loaded by default; the variable counts when the configuration names none."""
    monkeypatch.delenv("PHYAI_KERNEL_CONFIG", raising=False)
    with Engine(args(checkpoint)) as engine:
        assert set(engine.kernel_backends.values()) == {"torch"}
        assert engine.kernel_policy.source == "built in"
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\noperations: {attention: torch}\n")
    monkeypatch.setenv("PHYAI_KERNEL_CONFIG", str(file))
    with Engine(args(checkpoint)) as engine:
        assert engine.kernel_policy.name == "mine"
    with Engine(args(checkpoint, kernel_policy="torch_reference")) as engine:
        assert engine.kernel_policy.name == "torch_reference"


def test_errors_share_one_base() -> None:
    """A caller catches PhyaiError; request and checkpoint errors are ValueErrors too."""
    assert issubclass(EngineClosedError, PhyaiError)
    assert issubclass(KernelPolicyError, PhyaiError)


def test_defaults_of_an_engine(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert engine.max_batch_size == 4
    assert engine.version == 0
    assert engine.state is UpdateState.IDLE
    assert engine.model_config.num_steps == 3
    assert engine.captured_graphs() == {}
