# SPDX-License-Identifier: Apache-2.0
"""Real runs: Ray, LIBERO, the tiny model. Each takes a minute or two, so tests share them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

TINY = "libero_spatial_ppo_openpi_pi05_phyai_tiny"
TIMEOUT_S = 1500.0  # a machine that is busy with other things may be ten times slower


@dataclass(frozen=True)
class Run:
    """A finished run."""

    exit_code: int
    output: str
    seconds: float
    log_dir: Path
    record_dir: Path

    def scalars(self) -> dict[str, list[float]]:
        """Every TensorBoard scalar, one value per step."""
        from rlinf_phyai.run_summary import read_scalars

        return {tag: [value for _, value in series] for tag, series in read_scalars(self.log_dir).items()}

    def assert_success(self) -> None:
        assert self.exit_code == 0, f"exit code {self.exit_code}:\n{self.output[-6000:]}"


class Program:
    """A program in a process group and, towards the tests, a session of its own."""

    def __init__(self, command: list[str], folder: Path, environment: dict[str, str] | None = None) -> None:
        self.record_dir = folder / "record"
        self.log_dir = folder / "logs"
        self.output = folder / "output.txt"
        self._started = time.monotonic()
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, "RECORD_DIR": str(self.record_dir), **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.descendants: set[psutil.Process] = set()

    def wait_for(self, text: str, timeout: float = TIMEOUT_S, times: int = 1) -> None:
        """Until the output contains ``text`` that many times."""
        deadline = time.monotonic() + timeout
        while self.output.read_text().count(text) < times:
            assert self.process.poll() is None, f"ended before {text!r}:\n{self.output.read_text()[-6000:]}"
            assert time.monotonic() < deadline, f"no {text!r} within {timeout} s:\n{self.output.read_text()[-6000:]}"
            self.look()
            time.sleep(0.2)

    def look(self) -> None:
        """Remember the processes that exist below this program now."""
        try:
            self.descendants.update(psutil.Process(self.process.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return

    def finish(self, timeout: float = TIMEOUT_S) -> Run:
        """Wait for the end."""
        deadline = time.monotonic() + timeout
        while self.process.poll() is None:
            if time.monotonic() > deadline:
                self.kill()
                pytest.fail(f"not finished within {timeout} s:\n{self.output.read_text()[-6000:]}")
            self.look()
            time.sleep(0.5)
        seconds = time.monotonic() - self._started
        return Run(self.process.returncode, self.output.read_text(), seconds, self.log_dir, self.record_dir)

    def signal_group(self, number: int) -> None:
        """What a terminal does on Ctrl-C."""
        os.killpg(self.process.pid, number)

    def left_over(self, grace: float = 5.0) -> list[str]:
        """Processes of this program that outlive it."""
        _, alive = psutil.wait_procs(list(self.descendants), timeout=grace)
        return [" ".join(process.cmdline()) or process.name() for process in alive if process.is_running()]

    def kill(self) -> None:
        self.look()
        os.killpg(self.process.pid, signal.SIGKILL)
        for process in self.descendants:
            if process.is_running():
                process.kill()
        self.process.wait(30)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A run that is too slow is ended by :meth:`Program.finish`, which shows its output; pytest's limit lies above that."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S + 300))


@pytest.fixture(scope="session")
def programs() -> list[Program]:
    """Those that the present test has started."""
    return []


@pytest.fixture(autouse=True)
def no_program_outlives_its_test(programs: list[Program]) -> Iterator[None]:
    """A test that fails half-way leaves its program to the next ones otherwise."""
    yield
    for program in programs:
        if program.process.poll() is None:
            program.kill()
    programs.clear()


StartProgram = Callable[..., Program]


@pytest.fixture(scope="session")
def start(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path, repository: Path, programs: list[Program]
) -> StartProgram:
    """``start("launcher" | "driver" | "module", *overrides, ...)``: the tiny run by one of three ways to start it."""
    examples = repository / "examples" / "embodiment"

    def start_program(
        way: str,
        *overrides: str,
        config_dir: Path = examples / "config",
        config: str = TINY,
        environment: dict[str, str] | None = None,
    ) -> Program:
        folder = tmp_path_factory.mktemp(way)
        named = [f"--config-path={config_dir}", f"--config-name={config}"]
        commands: dict[str, list[str]] = {
            "launcher": ["bash", str(examples / "run_embodiment.sh"), config],
            "evaluation": ["bash", str(examples / "eval_embodiment.sh"), config],
            "driver": [sys.executable, str(repository / "tests" / "integration" / "driver.py"), *named],
            "module": [sys.executable, "-m", "rlinf_phyai.train", *named],
        }
        own = [f"actor.model.model_path={tiny_checkpoint}", f"runner.logger.log_path={folder / 'logs'}"]
        variables = {"VIRTUAL_ENV": sys.prefix, "PYTHONPATH": str(repository), **(environment or {})}
        programs.append(Program([*commands[way], *own, *overrides], folder, variables))
        return programs[-1]

    return start_program


BuildModel = Callable[..., Any]


@pytest.fixture(scope="session")
def build_actor_model(tiny_checkpoint: Path, repository: Path) -> BuildModel:
    """``build_actor_model(weights, config, overrides)``: RLinf's model with given weights, as the actor builds it."""
    from hydra import compose, initialize_config_dir
    from rlinf.models import get_model

    from rlinf_phyai import plugin

    def build(weights: dict[str, Any], config: str = TINY, overrides: Sequence[str] = ()) -> Any:
        plugin.register()
        with initialize_config_dir(str(repository / "examples" / "embodiment" / "config"), version_base="1.3"):
            cfg = compose(config, [f"actor.model.model_path={tiny_checkpoint}", *overrides])
        model = get_model(cfg.actor.model)
        model.load_state_dict(weights)
        return model.train()

    return build


@pytest.fixture(scope="session")
def recorded_run(start: StartProgram) -> Run:
    """Two training steps with the phyai backend, everything recorded, the engine's values too, and a checkpoint after each."""
    run = start("driver", "runner.save_interval=1", "rollout.phyai.value_source=rollout").finish()
    run.assert_success()
    return run


def load(path: Path) -> Any:
    """A file that the driver recorded."""
    import torch

    return torch.load(path, weights_only=False)


def checkpoint_of(run: Run, step: int) -> Path:
    """The folder that RLinf's runner wrote after a training step."""
    (folder,) = run.log_dir.glob(f"*/checkpoints/global_step_{step}")
    return folder


UNREAD_WEIGHT = "paligemma_with_expert.gemma_expert.lm_head.weight"  # the engine keeps its name only


def assert_every_rank_equals_the_actor(sync: dict[str, Any], ranks: int = 1) -> None:
    """Of a recorded sync: every parameter that is computed with, bit for bit."""
    import torch

    actor = sync["actor"]
    assert len(sync["rollout"]) == ranks
    for rollout in sync["rollout"]:
        assert list(rollout) == list(actor)
        held = {name: tensor for name, tensor in rollout.items() if not tensor.is_meta}
        assert set(actor) - set(held) == {UNREAD_WEIGHT}
        for name, tensor in held.items():
            assert torch.equal(tensor, actor[name]), name


def rlinfs_logprobs(model: Any, batch: dict[str, Any]) -> Any:
    """float32 [chunks, environments, chunk, action dimensions] of a batch's recorded actions, by RLinf's model."""
    import torch

    inputs = {key: value.flatten(0, 1) for key, value in batch["forward_inputs"].items()}
    with torch.no_grad():
        found = model(forward_inputs=inputs, compute_values=False)["logprobs"]
    return found.reshape(batch["prev_logprobs"].shape)


def assert_scores_are_rlinfs(model: Any, batch: dict[str, Any]) -> None:
    """What the engine reported about real observations is what RLinf's model computes from the replay data."""
    import torch

    torch.testing.assert_close(batch["prev_logprobs"], rlinfs_logprobs(model, batch), atol=1e-5, rtol=0)


def tasks_of(suite: str) -> set[str]:
    """The sentences of LIBERO's tasks; no other suite has one of them."""
    from libero.libero.benchmark import get_benchmark_dict

    languages = {
        name: {task.language for task in get_benchmark_dict()[name]().tasks}
        for name in ("libero_spatial", "libero_object", "libero_goal", "libero_10")
    }
    mine = languages.pop(suite)
    assert not mine & set().union(*languages.values())
    return mine


def prompts(batch: dict[str, Any], checkpoint: Path) -> list[str]:
    """What the policy was told in every step of every environment."""
    import sentencepiece

    from rlinf_phyai.models.pi05.tiny import TOKENIZER_FILE

    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(checkpoint / TOKENIZER_FILE))
    inputs = batch["forward_inputs"]
    rows = zip(
        inputs["tokenized_prompt"].flatten(0, 1), inputs["tokenized_prompt_mask"].flatten(0, 1).bool(), strict=True
    )
    return [tokenizer.decode(tokens[mask].tolist()).strip() for tokens, mask in rows]
