# SPDX-License-Identifier: Apache-2.0
"""LoRA: the real actor (RLinf's model with peft's adapters, FSDP2) learns, the engine follows with merged matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_phyai.actor.limits import Limits
from rlinf_phyai.check.compare import check_config, compare, send_weights
from rlinf_phyai.check.observations import RandomObservations
from rlinf_phyai.config_files import load_config
from rlinf_phyai.engine import CheckpointError
from rlinf_phyai.models.pi05.checkpoint import LM_HEAD
from rlinf_phyai.models.pi05.configuration import PI05Config
from rlinf_phyai.models.pi05.loading import load_checkpoint
from rlinf_phyai.models.pi05.lora import merge_adapters, plain_name, plain_names
from rlinf_phyai.models.pi05.weights import PI05Weights

TINY = "libero_spatial_ppo_openpi_pi05_phyai_tiny"
ENVS, STEPS = 2, 2
QUERY = "paligemma_with_expert.paligemma.model.language_model.layers.0.self_attn.q_proj.weight"
VISION = "paligemma_with_expert.paligemma.model.vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight"


GRPO = ("+algorithm@_global_=grpo", "algorithm.group_size=2")  # no critic: nothing but the keys of the prefix is used


def lora_config(checkpoint: Path, repository: Path, *overrides: str) -> Any:
    from rlinf_phyai import plugin

    plugin.register()
    folder = str(repository / "examples" / "embodiment" / "config")
    own = (
        f"actor.model.model_path={checkpoint}",
        "actor.model.is_lora=True",
        "actor.model.lora_rank=4",
        "actor.fsdp_config.reshard_after_forward=False",
    )
    cfg = check_config(load_config(TINY, [*own, *overrides], folder), ENVS * STEPS)
    cfg.actor.optim.lr = cfg.actor.optim.value_lr = 1e-2  # enough to see in two updates
    return cfg


@pytest.mark.parametrize("overrides", [(), GRPO], ids=["ppo", "grpo"])
def test_the_engine_follows_two_updates(tiny_checkpoint: Path, repository: Path, overrides: tuple[str, ...]) -> None:
    """After every sync the engine holds the merged matrices and scores as the actor does; between two it does not."""
    from rlinf_phyai.actor.in_process import in_process_actor, start_process_group
    from rlinf_phyai.rollout.build import build_policy

    cfg = lora_config(tiny_checkpoint, repository, *overrides)
    start_process_group()
    torch.manual_seed(0)
    actor = in_process_actor(cfg)
    assert actor.prefix == "dense"  # the prefix learns
    policy = build_policy(cfg, cfg.actor.model, "cpu", rank=0, worker_batch_size=ENVS)
    limits, observations = Limits.for_dtype(torch.float32), RandomObservations(ENVS)
    try:
        start = {name: t.clone() for name, t in policy.state_dict().items() if name in (QUERY, VISION)}
        gaps = []
        for update in range(3):
            send_weights(actor, policy)
            result = compare(actor, policy, observations, STEPS, limits)  # rescores, then learns
            failed = {verdict.name for verdict in result.verdicts if not verdict.ok}
            assert failed <= {"parameters that an update with learning rate 0 moved", "actor/approx_kl"}, update
            gaps.append(float((result.p - result.q).abs().max()))
        assert max(gaps) < 1e-4
        for name, before in start.items():
            moved = (policy.state_dict()[name] - before).abs().max()
            assert moved > 1e-5, name
        stale = compare(actor, policy, observations, STEPS, limits)
        stale_gap = float((stale.p - stale.q).abs().max())
        print(f"largest gap after each sync {gaps}, without one {stale_gap}")
        assert stale_gap > 100 * max(gaps)
    finally:
        policy.engine.close()


def test_names_and_arithmetic() -> None:
    stem = "paligemma_with_expert.paligemma.base_model.model.model.language_model.layers.0.self_attn.q_proj"
    gen = torch.Generator().manual_seed(0)
    w = torch.randn(6, 5, generator=gen)
    a, b = torch.randn(2, 5, generator=gen), torch.randn(6, 2, generator=gen)
    state = {
        f"{stem}.base_layer.weight": w,
        f"{stem}.lora_A.default.weight": a,
        f"{stem}.lora_B.default.weight": b,
        "action_in_proj.bias": torch.ones(3),
    }
    merged = merge_adapters(state, scale=0.5)
    assert list(merged) == [QUERY, "action_in_proj.bias"]
    x = torch.randn(4, 5, generator=gen)
    torch.testing.assert_close(x @ merged[QUERY].T, x @ w.T + 0.5 * (x @ a.T) @ b.T)
    rounded = merge_adapters(state | {f"{stem}.base_layer.weight": w.bfloat16()})
    assert torch.equal(rounded[QUERY], (w.bfloat16().float() + b @ a).bfloat16())
    assert merge_adapters({"x": w})["x"] is w
    assert plain_name(f"{stem}.lora_B.default.weight") == QUERY


def test_the_language_heads_adapter_is_left_out() -> None:
    """The engine ties the head to the embedding: a merged head would overwrite it."""
    stem = "paligemma_with_expert.paligemma.base_model.model.lm_head"
    w = torch.eye(3)
    names = [f"{stem}.base_layer.weight", f"{stem}.lora_A.default.weight", f"{stem}.lora_B.default.weight"]
    assert merge_adapters(dict(zip(names, (w, w, w), strict=True)))[LM_HEAD] is w
    assert plain_names(names) == []


def test_half_an_adapter() -> None:
    stem = "paligemma_with_expert.paligemma.base_model.model.model.language_model.layers.0.self_attn.q_proj"
    with pytest.raises(CheckpointError, match=r"q_proj\.weight is incomplete"):
        merge_adapters({f"{stem}.base_layer.weight": torch.eye(2), f"{stem}.lora_A.default.weight": torch.eye(2)})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"lora_A.default.weight": torch.ones(3, 5)}, r"does not fit: found the matrix \(6, 5\), lora_A \(3, 5\)"),
        ({"lora_A.default.weight": torch.ones(2, 4)}, "does not fit"),
        ({"lora_A.default.weight": torch.ones(2)}, "does not fit"),
        ({"lora_B.default.weight": torch.ones(6, 2, dtype=torch.int32)}, "lora_B of .* has dtype torch.int32"),
        ({"lora_A.default.weight": None, "lora_B.default.weight": None}, "is incomplete"),
        ({"base_layer.weight": None}, "is incomplete"),
        ({"weight": torch.ones(6, 5)}, "comes twice"),
    ],
)
def test_adapters_that_do_not_fit(change: dict[str, Any], message: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Nothing is merged half, and the engine names the file."""
    stem = "paligemma_with_expert.paligemma.base_model.model.model.language_model.layers.0.self_attn.q_proj."
    parts = {"base_layer.weight": torch.ones(6, 5), "lora_A.default.weight": torch.ones(2, 5)}
    parts |= {"lora_B.default.weight": torch.ones(6, 2)} | change
    state = {stem + name: tensor for name, tensor in parts.items() if tensor is not None}
    with pytest.raises(CheckpointError, match=message):
        merge_adapters(state)
    file = tmp_path / "adapted.pt"
    torch.save(state, file)
    weights = PI05Weights(PI05Config.from_checkpoint(tiny_checkpoint), torch.device("cpu"), torch.float32)
    with pytest.raises(CheckpointError, match=f"{file.name}: .*{message}"):
        load_checkpoint(weights, tiny_checkpoint, file, progress=False)
