# SPDX-License-Identifier: Apache-2.0
"""The checks that look at files: every message names the exact path."""

import io
import json
import resource
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp

from rlinf_phyai.validation import Problem, find_problems
from tests.unit.validation.conftest import FULL, TINY, MakeConfig

CHECKS_TESTED = (
    "checkpoint",
    "weights_readable",
    "value_head",
    "model_sizes",
    "fp32_precision",
    "norm_stats",
    "tokenizer",
    "rl_weights",
    "resume_directory",
    "kernel_policy",
    "room_for_checkpoints",
)
PATH = "actor.model.model_path"
STATS = Path("physical-intelligence/libero/norm_stats.json")


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


def problems_of(config: MakeConfig, path: Path | str, **changes: object) -> list[Problem]:
    return find_problems(
        config(FULL, {PATH: str(path), **{k.replace("__", "."): v for k, v in changes.items()}}), gpus=2
    )


def the_problem(config: MakeConfig, path: Path | str, **changes: object) -> Problem:
    (problem,) = problems_of(config, path, **changes)
    assert problem.severity == "error"
    return problem


def test_missing_directory_lists_every_place_looked_at(config: MakeConfig, tmp_path: Path) -> None:
    reports = {p.check: str(p) for p in problems_of(config, tmp_path / "nowhere")}
    assert set(reports) == {"checkpoint"}  # whether it brings its tokenizer along is not known
    assert f"'{tmp_path / 'nowhere'}', which does not exist" in reports["checkpoint"]
    assert "make-tiny-checkpoint" in reports["checkpoint"]
    (tmp_path / "nowhere").mkdir()
    reports = {p.check: str(p) for p in problems_of(config, tmp_path / "nowhere")}
    assert {"checkpoint", "tokenizer"} <= set(reports)
    assert str(tmp_path / "nowhere/big_vision/paligemma_tokenizer.model") in reports["tokenizer"]
    assert str(tmp_path / "no_cache/big_vision/paligemma_tokenizer.model") in reports["tokenizer"]


def test_a_file_is_no_checkpoint(config: MakeConfig, checkpoint: Path) -> None:
    report = {p.check: str(p) for p in problems_of(config, checkpoint / "model.safetensors")}
    assert "which is a file" in report["checkpoint"]


def test_remote_checkpoint(config: MakeConfig) -> None:
    reports = {p.check: str(p) for p in problems_of(config, "gs://bucket/checkpoint")}
    assert "a local directory" in reports["checkpoint"]


def test_directory_without_weights(config: MakeConfig, checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    problem = the_problem(config, checkpoint)
    assert problem.check == "checkpoint"
    for word in ("holds no weights", "*.safetensors", "model_state_dict/full_weights.pt", "actor/model_state_dict"):
        assert word in str(problem)


@pytest.mark.parametrize("root", ["", "actor"])
def test_layouts_of_rl_runs(root: str, config: MakeConfig, checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    folder = checkpoint / root / "model_state_dict"
    folder.mkdir(parents=True)
    torch.save(weights, folder / "full_weights.pt")
    (checkpoint / "model.safetensors").unlink()
    assert problems_of(config, checkpoint) == []


def test_truncated_weights(config: MakeConfig, checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    problem = the_problem(config, checkpoint)
    assert problem.check == "weights_readable"
    assert str(file) in str(problem)
    assert "truncated" in str(problem)


def test_weights_of_another_model(config: MakeConfig, checkpoint: Path) -> None:
    save_file({"language_model.weight": torch.zeros(2, 2)}, checkpoint / "model.safetensors")
    problem = the_problem(config, checkpoint)
    assert problem.check == "weights_readable"
    assert "no PI0.5 or PI0 model" in str(problem)


def value_head(*sizes: int) -> dict[str, torch.Tensor]:
    layers = pairwise(sizes)
    return {
        f"value_head.mlp.{2 * i}.weight": torch.zeros(outputs, inputs) for i, (inputs, outputs) in enumerate(layers)
    }


@pytest.mark.parametrize(
    "sizes, after_vlm, fits",
    [
        ((64, 64, 32, 1), True, True),  # the tiny prefix is 64 wide, its critic has hidden sizes 64 and 32
        ((32, 64, 32, 1), False, True),  # the tiny expert is 32 wide
        ((32, 64, 32, 1), True, False),
        ((64, 64, 32, 1), False, False),
        ((64, 128, 32, 1), True, False),
    ],
)
def test_value_head_of_the_checkpoint(
    sizes: tuple[int, ...], after_vlm: bool, fits: bool, config: MakeConfig, checkpoint: Path
) -> None:
    file = checkpoint / "model.safetensors"
    save_file({**load_file(file), **value_head(*sizes)}, file)
    reports = problems_of(config, checkpoint, actor__model__openpi__value_after_vlm=after_vlm)
    if fits:
        assert reports == []
        return
    (problem,) = reports
    assert (problem.check, problem.key) == ("value_head", "actor.model.openpi.value_after_vlm")
    assert "value_head.mlp." in str(problem)
    assert f"{'64' if after_vlm else '32'} -> 64 -> 32 -> 1" in str(problem)


def test_value_head_of_full_size(config: MakeConfig, checkpoint: Path) -> None:
    """Without own sizes in config.json the critic has RLinf's."""
    (checkpoint / "config.json").unlink()
    file = checkpoint / "model.safetensors"
    save_file({**load_file(file), **value_head(64, 512, 256, 128, 1)}, file)
    problem = the_problem(config, checkpoint)
    assert problem.check == "value_head"
    assert "64 -> 1024 -> 512 -> 256 -> 1" in str(problem)


def test_sizes_in_config_json(config: MakeConfig, checkpoint: Path) -> None:
    content = json.loads((checkpoint / "config.json").read_text())
    content["rlinf_phyai"]["action_horizon"] = 4
    (checkpoint / "config.json").write_text(json.dumps(content))
    problem = the_problem(config, checkpoint)
    assert (problem.check, problem.key) == ("model_sizes", "actor.model.num_action_chunks")
    assert str(checkpoint / "config.json") in str(problem)
    (checkpoint / "config.json").write_text("{")
    problem = the_problem(config, checkpoint)
    assert problem.check == "model_sizes"
    assert "not valid JSON" in str(problem)


OWN: dict[str, tuple[object, str]] = {
    "a list": ([1], "expected a JSON object"),
    "null": (None, "expected a JSON object"),
    "a text for the sizes": ({"rlinf_phyai": "tiny"}, "found 'tiny', not an object"),
    "nothing for the sizes": ({"rlinf_phyai": {}}, "it lacks 'vision'"),
    "an unknown type": ({"params_dtype": "float16"}, "params_dtype is 'float16'; allowed: float32, bfloat16"),
    "no type": ({"params_dtype": None}, "params_dtype is None"),
    "another size": ({"depth": 3}, "unexpected keyword argument 'depth'"),
}


@pytest.mark.parametrize("precision", [None, "fp8"])  # that check reads the file too
@pytest.mark.parametrize("found, message", OWN.values(), ids=OWN)
def test_stated_sizes_that_describe_no_model(
    found: object, message: str, precision: str | None, config: MakeConfig, checkpoint: Path
) -> None:
    content = json.loads((checkpoint / "config.json").read_text())
    if isinstance(found, dict) and "rlinf_phyai" not in found:
        content["rlinf_phyai"] |= found
        found = content
    (checkpoint / "config.json").write_text(json.dumps(found))
    cfg = config(TINY, {PATH: str(checkpoint), "rollout.phyai.prefix_precision": precision})
    (problem,) = [p for p in find_problems(cfg, gpus=0) if p.check == "model_sizes"]
    assert problem.key == PATH
    assert message in str(problem)
    assert str(checkpoint / "config.json") in str(problem)


@pytest.mark.parametrize("key", ["actor.model.precision", "actor.fsdp_config.mixed_precision.reduce_dtype"])
def test_fp32_is_neutral_for_float32_only(key: str, config: MakeConfig, checkpoint: Path) -> None:
    assert find_problems(config(TINY, {PATH: str(checkpoint), key: "fp32"}), gpus=0) == []
    (checkpoint / "config.json").unlink()
    (problem,) = find_problems(config(TINY, {PATH: str(checkpoint), key: "fp32"}), gpus=0)
    assert (problem.check, problem.key) == ("fp32_precision", key)


def test_missing_statistics_name_the_exact_path(config: MakeConfig, checkpoint: Path) -> None:
    (checkpoint / STATS).unlink()
    problem = the_problem(config, checkpoint)
    assert (problem.check, problem.key) == ("norm_stats", PATH)
    assert str(checkpoint / STATS) in str(problem)


@pytest.mark.parametrize("override", [{"repo_id": "my/data"}, {"repo_id": "x", "assets": {"asset_id": "my/data"}}])
def test_statistics_of_an_overridden_asset(override: dict[str, object], config: MakeConfig, checkpoint: Path) -> None:
    changes = {PATH: str(checkpoint), "actor.model.openpi_data": override}
    (problem,) = find_problems(config(FULL, changes), gpus=2)
    assert str(checkpoint / "my/data/norm_stats.json") in str(problem)
    (checkpoint / "my").mkdir()
    shutil.move(checkpoint / STATS.parent, checkpoint / "my/data")
    assert find_problems(config(FULL, changes), gpus=2) == []


@pytest.mark.parametrize(
    "content, word",
    [
        ("{", "is not valid JSON"),
        ("{}", "no section norm_stats"),
        ('{"norm_stats": {"state": {"q01": [0], "q99": [1]}}}', "no q01 for actions"),
        (
            '{"norm_stats": {"state": {"q01": [0], "q99": null}, "actions": {"q01": [0], "q99": [1]}}}',
            "no q99 for state",
        ),
    ],
)
def test_broken_statistics(content: str, word: str, config: MakeConfig, checkpoint: Path) -> None:
    (checkpoint / STATS).write_text(content)
    problem = the_problem(config, checkpoint)
    assert problem.check == "norm_stats"
    assert word in str(problem)


def test_tokenizer_in_openpis_cache(
    config: MakeConfig, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.move(checkpoint / "big_vision", tmp_path / "big_vision")
    problem = the_problem(config, checkpoint)
    assert problem.check == "tokenizer"
    assert "OPENPI_DATA_HOME" in str(problem)
    monkeypatch.setenv("OPENPI_DATA_HOME", str(tmp_path))
    assert problems_of(config, checkpoint) == []


def test_weights_of_an_rl_run(config: MakeConfig, checkpoint: Path) -> None:
    folder = checkpoint / "run" / "model_state_dict"
    folder.mkdir(parents=True)
    file = folder / "full_weights.pt"
    missing = the_problem(config, checkpoint, runner__ckpt_path=str(file))
    assert (missing.check, missing.key) == ("rl_weights", "runner.ckpt_path")
    assert f"'{file}', which does not exist" in str(missing)
    directory = the_problem(config, checkpoint, runner__ckpt_path=str(checkpoint / "run"))
    assert "which is a directory" in str(directory)
    assert str(file) in directory.fix
    file.touch()
    assert "an empty file" in str(the_problem(config, checkpoint, runner__ckpt_path=str(file)))
    assert "no .pt file" in str(the_problem(config, checkpoint, runner__ckpt_path=str(checkpoint / "config.json")))
    torch.save({"action_in_proj.bias": torch.zeros(64)}, file)
    assert problems_of(config, checkpoint, runner__ckpt_path=str(file)) == []


def cut_short(content: bytes) -> bytes:
    return content[: len(content) // 2]


def broken_index(content: bytes) -> bytes:
    start = content.index(b"data.pkl") + 64
    return content[:start] + bytes(64) + content[start + 64 :]


def saved(state: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (cut_short, "central directory"),
        (lambda content: content[:-1], "central directory"),
        (broken_index, "cannot be read"),
        (lambda content: b"<html>not found</html>" * 99, "cannot be read"),
        (lambda content: saved({}), "it holds no tensor"),
        (lambda content: saved({"model": {"a": torch.zeros(1)}}), "no flat mapping"),
        (lambda content: saved([torch.zeros(1)]), "no flat mapping"),
        (lambda content: saved(Path("/")), "cannot be read"),
    ],
    ids=["half", "one byte short", "broken index", "a web page", "empty", "nested", "list", "an object"],
)
def test_rl_weights_that_no_worker_could_read(
    change: Callable[[bytes], bytes], cause: str, config: MakeConfig, checkpoint: Path, tmp_path: Path
) -> None:
    file = tmp_path / "full_weights.pt"
    file.write_bytes(change(saved({"action_in_proj.bias": torch.zeros(64)})))
    problem = the_problem(config, checkpoint, runner__ckpt_path=str(file))
    assert (problem.check, problem.key) == ("rl_weights", "runner.ckpt_path")
    assert f"'{file}', {file.stat().st_size} bytes" in problem.found
    assert cause in problem.reason
    assert "copy the file again" in problem.fix
    assert "\n" not in problem.reason


def test_weights_are_not_read(config: MakeConfig, checkpoint: Path, tmp_path: Path) -> None:
    """Gigabytes of a state dict must not pass through the check: its tensors stay pages of the file."""
    file = tmp_path / "full_weights.pt"
    torch.save({"action_in_proj.weight": torch.zeros(64 << 20)}, file)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert problems_of(config, checkpoint, runner__ckpt_path=str(file)) == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # kibibytes; the file has 256 MiB


def test_resume_directory(config: MakeConfig, checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "global_step_40"
    problem = the_problem(config, checkpoint, runner__resume_dir=str(folder))
    assert (problem.check, problem.key) == ("resume_directory", "runner.resume_dir")
    assert "does not exist" in str(problem)
    folder.mkdir()
    assert "no folder actor" in str(the_problem(config, checkpoint, runner__resume_dir=str(folder)))
    shards = folder / "actor" / "dcp_checkpoint"
    shards.mkdir(parents=True)
    unfinished = the_problem(config, checkpoint, runner__resume_dir=str(folder))
    assert f"which is not whole: {shards / '.metadata'} is missing" in str(unfinished)
    dcp.save({"weight": torch.zeros(3)}, checkpoint_id=shards, no_dist=True)
    assert problems_of(config, checkpoint, runner__resume_dir=str(folder)) == []
    partial = folder.with_name("global_step_80.partial")
    assert "was still writing" in str(the_problem(config, checkpoint, runner__resume_dir=str(partial)))
    for name in ("latest", "global_step_", "global_step_4x"):
        (tmp_path / name / "actor").mkdir(parents=True)
        assert "does not end in a step" in str(the_problem(config, checkpoint, runner__resume_dir=str(tmp_path / name)))


def test_room_for_checkpoints(config: MakeConfig, checkpoint: Path, tmp_path: Path) -> None:
    """7.2 MB per checkpoint of the tiny model: any disk holds a few, and none a billion."""
    changes: dict[str, object] = {"runner__logger__log_path": str(tmp_path / "logs"), "runner__save_interval": 40}
    assert problems_of(config, checkpoint, **changes) == []
    (problem,) = problems_of(config, checkpoint, **changes, runner__max_epochs=40 * 10**9 - 1)
    assert (problem.check, problem.key, problem.severity) == (
        "room_for_checkpoints",
        "runner.logger.log_path",
        "warning",
    )
    assert "of 1000000000 checkpoints" in problem.found
    assert "about 0.00722 GB; none is deleted" in problem.allowed
    assert problems_of(config, checkpoint, **changes, runner__max_epochs=40 * 10**9, runner__max_steps=80) == []
    assert problems_of(config, checkpoint, **changes | {"runner__save_interval": -1}, runner__max_epochs=10**12) == []


def test_kernel_policy_that_cannot_run_here(
    config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a cluster without GPU the policy is tried out; elsewhere the driver's own device says nothing about the workers'."""
    from rlinf_phyai.kernels import registry

    monkeypatch.setitem(registry.BACKENDS["rms_norm"], "absent", "rlinf_phyai.kernels.absent:rms_norm")
    file = tmp_path / "policy.yaml"
    file.write_text("operations: {rms_norm: absent}\n")
    changes = {"rollout.phyai.kernel_policy": str(file)}
    assert find_problems(config(FULL, changes), gpus=2) == []
    (problem,) = find_problems(config(TINY, changes), gpus=0)
    assert problem.check == "kernel_policy"
    assert "cannot run on cpu" in str(problem)
    file.write_text("fallback: torch\noperations: {rms_norm: absent}\n")
    assert find_problems(config(TINY, changes), gpus=0) == []


def test_what_is_refused_is_not_allowed(config: MakeConfig) -> None:
    """A packaged policy without kernels for a CPU: only the others are offered where there is no GPU."""
    (problem,) = find_problems(config(TINY, {"rollout.phyai.kernel_policy": "rlinf_bf16"}), gpus=0)
    assert problem.found == "'rlinf_bf16'"
    assert problem.allowed == "torch_reference, the path of a .yaml file whose kernels run on cpu, or null"
    (problem,) = find_problems(config(FULL, {"rollout.phyai.kernel_policy": "rlinf_bf17"}), gpus=2)
    assert problem.allowed == "rlinf_bf16, torch_reference, the path of a .yaml file, or null"


def test_kernel_policy_with_an_unknown_operation(config: MakeConfig, tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("operations: {rmsnorm: torch}\n")
    (problem,) = find_problems(config(FULL, {"rollout.phyai.kernel_policy": str(file)}), gpus=2)
    assert "'rms_norm'" in str(problem)


def test_files_can_be_left_out(config: MakeConfig) -> None:
    cfg = config(FULL, {PATH: "/on/another/machine", "rollout.phyai.kernel_policy": "theirs"})
    assert find_problems(cfg, gpus=2, look_at_files=False) == []
