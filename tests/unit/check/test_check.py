# SPDX-License-Identifier: Apache-2.0
"""The check on the tiny model: it passes, and names the fault when one is planted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

from rlinf_phyai.actor.limits import Limits
from rlinf_phyai.check import report
from rlinf_phyai.check.compare import Result, check_config, compare, send_weights
from rlinf_phyai.check.observations import RandomObservations
from rlinf_phyai.cli import app
from rlinf_phyai.config_files import load_config
from rlinf_phyai.models.pi05.stated_sizes import TINY_SIZES, StatedSizes
from rlinf_phyai.models.pi05.tiny import make_tiny_checkpoint

TINY = "libero_spatial_ppo_openpi_pi05_phyai_tiny"
ENVS, STEPS = 2, 2
LIMITS = Limits.for_dtype(torch.float32)
GAP = "actor/rollout_train_logprob_gap"


@pytest.fixture(scope="module")
def cfg(base_overrides: list[str], repository: Path) -> Any:
    from rlinf_phyai import plugin

    plugin.register()
    return check_config(load_config(TINY, base_overrides, config_folder(repository)), ENVS * STEPS)


def config_folder(repository: Path) -> str:
    return str(repository / "examples" / "embodiment" / "config")


@pytest.fixture(scope="module")
def base_overrides(tiny_checkpoint: Path) -> list[str]:
    return [f"actor.model.model_path={tiny_checkpoint}"]


@pytest.fixture
def run(cfg: Any):
    """``run(plant)``: build both sides, plant a fault, compare."""
    from rlinf_phyai.actor.in_process import in_process_actor, start_process_group
    from rlinf_phyai.rollout.build import build_policy

    def check(plant=None, observe=None, cfg=cfg, limits=LIMITS) -> Result:
        start_process_group()
        torch.manual_seed(0)
        actor = in_process_actor(cfg)
        policy = build_policy(cfg, cfg.actor.model, "cpu", rank=0, worker_batch_size=ENVS)
        send_weights(actor, policy)
        if plant is not None:
            plant(actor, policy)
        result = compare(actor, policy, observe or RandomObservations(ENVS), STEPS, limits)
        policy.engine.close()
        return result

    return check


def failures(result: Result) -> dict[str, str]:
    return {verdict.name: str(verdict) for verdict in result.verdicts if not verdict.ok}


def test_two_correct_sides_pass(run, tmp_path, capsys):
    result = run()
    assert failures(result) == {}
    assert result.cause is None
    assert result.metrics[GAP] < LIMITS.logprob_gap / 5
    assert result.metrics["actor/rollout_train_kl"] < LIMITS.kl / 5
    assert result.metrics["actor/rollout_train_value_gap"] < LIMITS.value_gap / 5
    assert result.passed
    assert len(result.verdicts) == 11
    report.print_table(result)
    assert "PASS: 4 observations" in capsys.readouterr().out
    report.write_json(result, tmp_path / "a" / "check.json")
    content = json.loads((tmp_path / "a" / "check.json").read_text())
    assert content["passed"]
    assert content["likely_cause"] is None
    assert content["metrics"]["actor/first_update/ratio_max_dev"] == 0.0
    report.draw(result, tmp_path / "a" / "check.png")
    assert (tmp_path / "a" / "check.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    "overrides",
    [
        ["+noise=flow_noise"],
        ["actor.model.openpi.noise_method=flow_cps", "+actor.model.openpi.ignore_last=True"],
        [
            "actor.model.openpi.value_after_vlm=False",
            "+actor.model.openpi.chunk_critic_input=True",
            "actor.model.openpi.detach_critic_input=True",
        ],
        ["+actor.model.openpi.discrete_state_input=True", "+actor.model.openpi.noise_anneal=True"],
    ],
    ids=["flow_noise", "flow_cps", "critic_after_the_expert", "state_in_the_prompt_and_annealing"],
)
def test_other_samplers_and_critics_pass(overrides, run, base_overrides, repository):
    """Engine, rescoring and the FSDP actor's update agree, the noise head is sent like every weight, and a bonus on its entropy
    reaches the loss."""
    result = run(
        cfg=check_config(load_config(TINY, base_overrides + overrides, config_folder(repository)), ENVS * STEPS)
    )
    assert failures(result) == {}
    assert (result.metrics["actor/entropy_loss"] != 0) == ("+noise=flow_noise" in overrides)


def test_a_bfloat16_checkpoint_passes(run, tmp_path, repository):
    """It states its type, and both sides hold it so: every parameter is the same, the norms that only the actor's loader rounds too."""
    folder = make_tiny_checkpoint(tmp_path / "checkpoint", config=StatedSizes(params_dtype="bfloat16"))
    overrides = [f"actor.model.model_path={folder}"]
    cfg = check_config(load_config(TINY, overrides, config_folder(repository)), ENVS * STEPS)
    result = run(cfg=cfg, limits=Limits.for_dtype(torch.bfloat16))
    assert failures(result) == {}
    assert result.metrics[GAP] > LIMITS.logprob_gap  # it was not float32


def test_pi0_passes(run, tmp_path, repository):
    """PI0 with the critic after the expert, and its actor with the dense prefix."""
    path = make_tiny_checkpoint(tmp_path, config=TINY_SIZES["pi0"])
    overrides = [f"actor.model.model_path={path}", "+size=tiny"]
    cfg = load_config("libero_spatial_ppo_openpi_pi0_phyai", overrides, config_folder(repository))
    assert failures(run(cfg=check_config(cfg, ENVS * STEPS))) == {}


def test_a_noise_head_that_was_not_sent(run, base_overrides, repository):
    def stale(actor: Any, policy: Any) -> None:
        with torch.no_grad():
            for name, parameter in actor.model.named_parameters():
                if name.startswith("noise_head."):
                    parameter.mul_(1.05)

    cfg = load_config(TINY, [*base_overrides, "+noise=flow_noise"], config_folder(repository))
    found = failures(run(stale, cfg=check_config(cfg, ENVS * STEPS)))
    assert "noise_head.mlp_logvar" in found["parameters that differ"]
    assert "actor/rollout_train_logprob_gap" in found


def test_another_gelu(run, monkeypatch, capsys):
    from rlinf_phyai.kernels import torch_ops

    def exact(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate) * up

    monkeypatch.setattr(torch_ops, "gated_gelu", exact)
    result = run()
    found = failures(result)
    assert "different weights, inputs, kernels or precision" in found["actor/rollout_train_logprob_gap"]
    assert not any("parameters that differ" in name or "input" in name for name in found)
    assert result.metrics[GAP] > 5 * LIMITS.logprob_gap  # the smallest fault that is planted here
    report.print_table(result)
    output = capsys.readouterr().out
    assert "FAIL: actor/rollout_train_logprob_gap is" in output
    assert "FAIL: 4 observations" in output


def test_swapped_cameras(run):
    def swap(actor: Any, policy: Any) -> None:
        original = policy.transforms.inputs
        policy.transforms.inputs = lambda observation: replace(
            original(observation), pixel_values=original(observation).pixel_values.flip(1)
        )

    result = run(swap)
    found = failures(result)
    assert "do not see the same observation" in str(result.cause)
    assert "the cameras are swapped" in found["input pixels that differ"]
    assert "actor/rollout_train_logprob_gap" in found


def test_another_prompt(run):
    def misspell(actor: Any, policy: Any) -> None:
        original = policy.transforms.inputs

        def inputs(observation: dict[str, Any]) -> Any:
            found = original(observation)
            ids = found.input_ids.clone()
            ids[:, 2] += 1
            return replace(found, input_ids=ids)

        policy.transforms.inputs = inputs

    assert "tokenised differently" in failures(run(misspell))["input pixels and prompt tokens that differ"]


def test_stale_weights(run):
    def train(actor: Any, policy: Any) -> None:
        with torch.no_grad():
            for name, parameter in actor.model.named_parameters():
                if name == "action_out_proj.weight":
                    parameter.mul_(1.05)

    result = run(train)
    found = failures(result)
    assert "does not hold the actor's weights" in str(result.cause)
    assert "stale or from another checkpoint: action_out_proj.weight" in found["parameters that differ"]
    assert "actor/rollout_train_logprob_gap" in found


def test_weights_of_another_checkpoint(run, tmp_path):
    """The engine keeps what it was started with; the actor holds the weights of a differently seeded checkpoint."""
    from safetensors.torch import load_file

    from rlinf_phyai.models.pi05.tiny import make_tiny_checkpoint

    other = load_file(make_tiny_checkpoint(tmp_path, seed=7) / "model.safetensors")

    def exchange(actor: Any, policy: Any) -> None:
        with torch.no_grad():
            for name, parameter in actor.model.named_parameters():
                if name in other:
                    parameter.to_local().copy_(other[name])

    result = run(exchange)
    assert result.verdicts[0].value > 50
    assert "stale or from another checkpoint" in failures(result)["parameters that differ"]
    assert "does not hold the actor's weights" in str(result.cause)


def test_a_constant_is_recognised(run, cfg):
    def offset(actor: Any, policy: Any) -> None:
        policy.options = replace(policy.options, logprob_offset=0.01)

    result = run(offset)
    assert result.metrics[GAP] == pytest.approx(0.01, rel=1e-3)
    assert "every log-prob is off by -0.01: a constant" in str(result.cause)


def test_a_fault_of_the_critic_alone(run, monkeypatch):
    from rlinf_phyai.models.pi05 import value

    monkeypatch.setattr(value, "_pool", lambda mode, output, *_: output.float().mean(dim=1))
    result = run()
    assert set(failures(result)) == {"actor/rollout_train_value_gap"}
    assert "the critic alone" in str(result.cause)


def test_a_fault_of_the_prefix(run, monkeypatch, capsys):
    from rlinf_phyai.models.pi05 import scheduler

    embed_prompt = scheduler.embed_prompt
    monkeypatch.setattr(scheduler, "embed_prompt", lambda *arguments: 1.5 * embed_prompt(*arguments))
    result = run()
    assert {GAP, "actor/rollout_train_value_gap"} <= set(failures(result))
    report.print_table(result)
    assert "Likely cause: the prefix" in capsys.readouterr().out


def test_a_fault_of_the_expert_has_no_likely_cause(run, monkeypatch):
    from rlinf_phyai.models.pi05 import scheduler

    velocity = scheduler.velocity

    def scaled(*arguments: Any) -> Any:
        v, output = velocity(*arguments)
        return 1.001 * v, output

    monkeypatch.setattr(scheduler, "velocity", scaled)
    result = run()
    assert GAP in failures(result)
    assert "actor/rollout_train_value_gap" not in failures(result)
    assert result.cause is None


def test_observations_follow_the_actions(run):
    seen: list[Any] = []
    source = RandomObservations(ENVS)

    def observe(actions: torch.Tensor | None) -> dict[str, Any]:
        seen.append(actions)
        return source(actions)

    run(observe=observe)
    assert seen[0] is None
    assert [actions.shape for actions in seen[1:]] == [(ENVS, 5, 7)] * STEPS


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["no_such_config"], "there is no config"),
        ([TINY, "--limit", "gap=1"], "unknown limit 'gap'"),
        ([TINY, "--limit", "kl"], "kl"),
    ],
)
def test_wrong_arguments(arguments, words, repository, tiny_checkpoint):
    folder = str(repository / "examples" / "embodiment" / "config")
    overrides = [f"actor.model.model_path={tiny_checkpoint}"] if arguments[0] == TINY else []
    result = CliRunner().invoke(app, ["check", *arguments, *overrides, "--config-path", folder, "--random"])
    assert result.exit_code == 2
    assert words in result.output


def test_the_check_learns_nothing_and_keeps_its_own_copy(cfg, tiny_checkpoint, repository):
    folder = str(repository / "examples" / "embodiment" / "config")
    original = load_config(TINY, [f"actor.model.model_path={tiny_checkpoint}"], folder)
    checked = check_config(original, 6)
    assert (checked.actor.optim.lr, checked.actor.optim.value_lr) == (0.0, 0.0)
    assert (checked.actor.global_batch_size, 6 % checked.actor.micro_batch_size) == (6, 0)
    assert original.actor.optim.lr > 0
