# SPDX-License-Identifier: Apache-2.0
"""``rlinf-phyai doctor CONFIG``: the config's problems, its checkpoint, and the memory estimate against measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlinf_phyai.cli import app
from rlinf_phyai.doctor.finding import Finding
from rlinf_phyai.doctor.memory import ENVIRONMENT_GPU_GIB, ENVIRONMENT_HOST_GIB, actor_parts, engine_parts, published
from rlinf_phyai.doctor.report import print_table
from rlinf_phyai.doctor.run_config import Machine, findings

FULL = "libero_spatial_ppo_openpi_pi05_phyai"
TINY = f"{FULL}_tiny"
CONFIGS = Path(__file__).resolve().parents[3] / "examples" / "embodiment" / "config"


@pytest.fixture
def examine(tiny_checkpoint: Path):
    """``examine(config, *overrides, gpus=, gpu_gib=, host_gib=)``: findings by part, and the memory estimate."""

    def run(
        config: str, *overrides: str, gpus: int = 0, gpu_gib: float | None = None, host_gib: float | None = None
    ) -> tuple[dict[str, Finding], dict[str, Any]]:
        memory: dict[str, Any] = {}
        model = f"actor.model.model_path={tiny_checkpoint}"
        found = findings(config, [model, *overrides], str(CONFIGS), Machine(gpus, gpu_gib, host_gib), memory)
        return {finding.part: finding for finding in found}, memory

    return run


def test_engine_estimate_is_the_measured_peak(repository: Path) -> None:
    measured = json.loads((repository / "benchmarks" / "results" / "engine.json").read_text())["engine_peak_gib"]
    assert sum(engine_parts(published(value=False), batch=64, cameras=2).values()) == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("micro_batch", [32, 128])
def test_actor_estimate_is_the_measured_peak(micro_batch: int, repository: Path) -> None:
    file = repository / "benchmarks" / "results" / f"actor_mb{micro_batch}.json"
    measured = json.loads(file.read_text())["dense"]["peak_gib"]
    parts = actor_parts(published(value=True), micro_batch, expert_only=True)
    assert sum(parts.values()) == pytest.approx(measured, rel=0.05)
    assert parts["actor optimizer (Adam)"] == 2 * parts["actor gradients"]


def test_the_tiny_example_is_fine(examine: Any) -> None:
    found, memory = examine(TINY)
    assert {finding.status for finding in found.values()} == {"ok"}
    assert "2 layers of width 64, without critic" in found["checkpoint"].detail
    assert list(memory["gpus"]) == [0]
    assert memory["host_gib"] > 0


@pytest.mark.parametrize(
    ("overrides", "part", "message"),
    [
        (["algorithm.importance_sampling_clip=-1"], "algorithm.importance_sampling_clip", "-1"),
        (["rollout.phyai.max_batch_size=-1"], "rollout.phyai.max_batch_size", "-1"),
    ],
)
def test_problems_of_the_config_are_lines_of_the_table(
    examine: Any, overrides: list[str], part: str, message: str
) -> None:
    found, _ = examine(TINY, *overrides)
    assert "config values" not in found
    assert found[part].status == "error"
    assert message in found[part].detail
    assert found[part].fix


def test_an_unknown_backend_is_one_line(examine: Any) -> None:
    """Nothing is known of it, so nothing is said of what it would ignore."""
    found, _ = examine(TINY, "rollout.rollout_backend=foo")
    unusual = {part: finding for part, finding in found.items() if finding.status != "ok"}
    assert list(unusual) == ["rollout.rollout_backend"]
    assert unusual["rollout.rollout_backend"].status == "error"
    assert "huggingface or phyai" in unusual["rollout.rollout_backend"].detail


@pytest.mark.parametrize("config", sorted(file.stem for file in CONFIGS.glob("*.yaml")))
def test_the_examples_on_a_machine_without_a_gpu(config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line is a fact: each error is one, and the estimate says which sizes it is for."""
    monkeypatch.chdir(tmp_path)
    found = list(findings(config, [], str(CONFIGS), Machine(0, None, 10_000.0), {}))
    model = next(finding for finding in found if finding.part.endswith("model_path"))
    assert "does not exist" in model.detail
    assert "make-tiny-checkpoint" in model.fix
    assert len([finding for finding in found if finding.part == model.part]) == 1
    assert not [finding for finding in found if finding.status == "warning"]
    (memory,) = (finding for finding in found if finding.part.startswith("GPU memory"))
    assert memory.detail.startswith("no GPU here to compare with; on one it would take about")
    assert "the published sizes (the checkpoint is not here)" in memory.detail


def test_counts_of_one_and_of_many(capsys: pytest.CaptureFixture[str]) -> None:
    ok, doubtful, broken = (Finding("part", status, "detail") for status in ("ok", "warning", "error"))
    for lines, count in (
        ([ok, doubtful, broken], "1 ok, 1 warning, 1 error"),
        ([ok, doubtful, doubtful, broken, broken], "1 ok, 2 warnings, 2 errors"),
        ([ok], "1 ok, 0 warnings, 0 errors"),
    ):
        print_table(lines)
        assert capsys.readouterr().out.splitlines()[-1] == count


def test_a_config_that_does_not_exist(examine: Any) -> None:
    found, memory = examine("no_such_config")
    assert list(found) == ["config"]
    assert found["config"].status == "error"
    assert "there is no config" in found["config"].detail
    assert memory == {}


def test_statistics_that_a_worker_could_not_read(examine: Any, tiny_checkpoint: Path, tmp_path: Path) -> None:
    import shutil

    broken = Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))
    (broken / "physical-intelligence" / "libero" / "norm_stats.json").unlink()
    found, _ = examine(TINY, f"actor.model.model_path={broken}")
    assert "norm_stats.json" in found["actor.model.model_path"].detail


SIZES = ["actor.model.model_path=/nowhere"]  # then the published sizes are assumed


def test_memory_against_the_gpu(examine: Any) -> None:
    found, memory = examine(FULL, *SIZES, gpus=1, gpu_gib=140.0, host_gib=1000.0)
    assert found["GPU memory"].status == "ok"
    assert found["host memory"].status == "ok"
    total = sum(memory["gpus"][0].values())
    found, _ = examine(FULL, *SIZES, gpus=1, gpu_gib=total * 1.05)
    assert found["GPU memory"].status == "warning"
    found, _ = examine(FULL, *SIZES, gpus=1, gpu_gib=total - 1)
    assert found["GPU memory"].status == "error"
    assert "actor.micro_batch_size" in found["GPU memory"].fix
    found, _ = examine(FULL, *SIZES, gpus=1, gpu_gib=140.0, host_gib=32.0)
    assert found["host memory"].status == "warning"


def test_an_evaluation_is_what_the_evaluation_program_makes_of_the_config(examine: Any) -> None:
    """Its model comes from actor.model, its environments from env.eval, and nothing is needed for an actor."""
    overrides = ["runner.only_eval=True", "env.eval.total_num_envs=8", "env.train.total_num_envs=512"]
    found, _ = examine(TINY, *overrides)
    assert {part for part, finding in found.items() if finding.status != "ok"} == set()
    assert "2 layers of width 64" in found["checkpoint"].detail
    placed = ["~cluster.component_placement", "+cluster.component_placement={rollout: 0, env: 0}"]
    found, memory = examine(FULL, *SIZES, *overrides, *placed, gpus=1, gpu_gib=5.0, host_gib=1.0)
    parts = memory["gpus"][0]
    assert parts["environments"] == pytest.approx(8 * ENVIRONMENT_GPU_GIB)
    assert not any(name.startswith("actor") for name in parts)
    assert memory["host_gib"] == pytest.approx(8 * ENVIRONMENT_HOST_GIB)
    for part in ("GPU memory", "host memory"):
        assert "env.eval.total_num_envs" in found[part].fix
        assert "actor" not in found[part].fix


def test_every_node_has_its_share_of_the_environments(examine: Any) -> None:
    sizes = [*SIZES, "env.train.total_num_envs=64"]
    found, one = examine(FULL, *sizes, gpus=16)
    assert one["host_gib"] == pytest.approx(64 * ENVIRONMENT_HOST_GIB)
    found, two = examine(FULL, *sizes, "cluster.num_nodes=2", gpus=16, host_gib=100.0)
    assert two["host_gib"] == pytest.approx(32 * ENVIRONMENT_HOST_GIB)
    assert found["host memory"].status == "ok"
    assert "about 70 GiB on each of 2 nodes; 100 GiB are available here" in found["host memory"].detail


def test_memory_follows_the_placement(examine: Any) -> None:
    apart = "cluster.component_placement={actor: 0, rollout: 1, env: 1}"
    found, memory = examine(FULL, *SIZES, "~cluster.component_placement", f"+{apart}", gpus=2, gpu_gib=140.0)
    actor, rollout = memory["gpus"][0], memory["gpus"][1]
    assert not any(name.startswith("engine") for name in actor)
    assert not any(name.startswith("actor") for name in rollout)
    assert {"GPU memory, 0", "GPU memory, 1"} <= set(found)
    _, one = examine(FULL, *SIZES, gpus=1)
    _, four = examine(FULL, *SIZES, gpus=4)
    assert len(four["gpus"]) == 4
    # A quarter of the environments each; no_shard repeats the model, full_shard divides it.
    assert four["gpus"][0]["engine key/value cache"] == pytest.approx(one["gpus"][0]["engine key/value cache"] / 4)
    assert four["gpus"][0]["actor parameters"] == one["gpus"][0]["actor parameters"]
    _, sharded = examine(FULL, *SIZES, "actor.fsdp_config.sharding_strategy=full_shard", gpus=4)
    assert sharded["gpus"][0]["actor parameters"] == pytest.approx(one["gpus"][0]["actor parameters"] / 4)


def test_offloaded_sides_do_not_add_up(examine: Any) -> None:
    both = [f"{side}.enable_offload=True" for side in ("actor", "rollout")]
    _, together = examine(FULL, *SIZES, gpus=1)
    _, in_turns = examine(FULL, *SIZES, *both, gpus=1)
    engine = sum(size for name, size in together["gpus"][0].items() if name.startswith("engine"))
    assert sum(in_turns["gpus"][0].values()) == pytest.approx(sum(together["gpus"][0].values()) - engine)
    _, small = examine(FULL, *SIZES, *both, "actor.micro_batch_size=1", "env.train.total_num_envs=512", gpus=1)
    assert "engine weights" in small["gpus"][0]
    assert "actor parameters" not in small["gpus"][0]


def test_a_placement_that_cannot_be_read_gives_no_estimate(examine: Any) -> None:
    only = "+cluster.component_placement={actor: 0}"
    found, memory = examine(FULL, *SIZES, "~cluster.component_placement", only, gpus=1)
    assert found["GPU memory"].status == "warning"
    assert "does not place rollout" in found["GPU memory"].detail
    assert memory == {}


def test_the_command(tiny_checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["doctor", TINY, f"actor.model.model_path={tiny_checkpoint}", "--config-path", str(CONFIGS)]
    options = ["--only-config", "--json", str(tmp_path / "found.json"), "--gpus", "2", "--gpu-memory", "80"]
    result = CliRunner().invoke(app, [*arguments, *options])
    content = json.loads((tmp_path / "found.json").read_text())
    assert result.exit_code == (0 if content["passed"] else 1)
    assert "GPU memory" in result.output
    assert set(content["memory"]["gpus"]) == {"0", "1"}
    assert CliRunner().invoke(app, ["doctor", "--only-config"]).exit_code == 2
