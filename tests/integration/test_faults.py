# SPDX-License-Identifier: Apache-2.0
"""Real runs in which a part breaks: the cause is named, everything ends soon, checkpoints stay whole, and it goes on.

Two runs are enough to see most of it on every change; the marked ones break other parts in the same way.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from rlinf_phyai.checkpoints import missing_parts
from tests.integration.conftest import TINY, Program, Run, StartProgram

pytestmark = pytest.mark.integration

CONFIRMED = "every worker confirmed"
END_S = 60.0  # from the fault, or from its discovery, to the end of the last process


def worker_pid(program: Program, class_name: str) -> int:
    """The process of the only worker of a class: Ray prints it before every line that a worker writes."""
    found = re.search(rf"\({class_name} pid=(\d+)\)", program.output.read_text())
    assert found
    return int(found.group(1))


def simulators(program: Program) -> list[psutil.Process]:
    env_worker = psutil.Process(worker_pid(program, "PhyaiEnvWorker"))
    return [child for child in env_worker.children() if any("spawn_main" in part for part in child.cmdline())]


def checkpoint_folder(log_dir: Path, step: int) -> Path:
    return log_dir / TINY / "checkpoints" / f"global_step_{step}"


def ends_because(program: Program, *causes: str, since: float | None = None) -> Run:
    """The run ends within a minute with exit code 1, says why at its end, and leaves no process."""
    since = time.monotonic() if since is None else since
    run = program.finish(timeout=300)
    seconds = time.monotonic() - since
    assert run.exit_code == 1, run.output[-6000:]
    end = run.output[run.output.rindex("stopped: ") :]
    for cause in causes:
        assert re.search(cause, end), end
    assert program.left_over() == []
    assert seconds < END_S, f"the end took {seconds:.0f} s"
    print(f"ended after {seconds:.1f} s: {end}")
    return run


STALL_S = 40.0  # no healthy phase of the tiny run lasts that long
BARS = {"TQDM_DELAY": "0"}  # a rollout says when it begins
STALL_SOON = (f"rollout.phyai.stall_timeout={STALL_S}", f"rollout.phyai.simulator_timeout={STALL_S - 5}")


@dataclass(frozen=True)
class Interrupted:
    """A run whose rollout worker was stopped in the rollout of its second step."""

    run: Run
    checkpoint: Path


@pytest.fixture(scope="module")
def interrupted(start: StartProgram) -> Interrupted:
    program = start("launcher", "runner.save_interval=1", "runner.max_epochs=3", *STALL_SOON, environment=BARS)
    program.wait_for("Generating Rollout Epochs:   0%", times=2)
    pid = worker_pid(program, "PhyaiRolloutWorker")
    os.kill(pid, signal.SIGSTOP)
    run = ends_because(
        program,
        rf"no worker made progress for \d+ s. The run was ended \(rollout.phyai.stall_timeout: {STALL_S:g}\)",
        rf"\n- RolloutGroup rank 0 \(process {pid} on [\d.]+, stopped\) is stopped\n +in generate\(\) for \d+ s; last sign of life: ",
        r"\n- EnvGroup rank 0 \(process \d+ on [\d.]+, \w+\) waits for another worker\n +in interact\(\) for",
        r"\n- ActorGroup rank 0 \(process \d+ on [\d.]+, \w+\) waits for another worker\n +in recv_rollout_trajectories\(\) for",
        since=time.monotonic() + STALL_S,
    )
    assert run.output.index("warning: no worker made progress for") < run.output.rindex("no worker made progress for")
    return Interrupted(run, checkpoint_folder(run.log_dir, 1))


def test_stopped_rollout_worker_leaves_a_checkpoint_to_continue_from(interrupted: Interrupted) -> None:
    assert (
        f"to continue from the latest checkpoint: runner.resume_dir={interrupted.checkpoint}" in interrupted.run.output
    )
    assert missing_parts(interrupted.checkpoint / "actor") == []
    assert [folder.name for folder in interrupted.checkpoint.parent.iterdir()] == ["global_step_1"]


def test_continued_run_whose_disk_is_full_keeps_what_it_has(start: StartProgram, interrupted: Interrupted) -> None:
    """The second step runs; its checkpoint does not fit, here because the actor's process may write small files only."""
    program = start(
        "launcher",
        f"runner.resume_dir={interrupted.checkpoint}",
        "runner.save_interval=1",
        "runner.max_epochs=3",
    )
    program.wait_for("actor workers ready")
    _, hard = resource.prlimit(worker_pid(program, "PhyaiActorWorker"), resource.RLIMIT_FSIZE)
    resource.prlimit(worker_pid(program, "PhyaiActorWorker"), resource.RLIMIT_FSIZE, (100_000, hard))
    program.wait_for("function save_checkpoint: exception")
    run = ends_because(program, r"ActorGroup rank 0 in save_checkpoint\(\) raised CheckpointError: .*: File too large")
    assert f"Resuming training from checkpoint directory {interrupted.checkpoint}" in run.output
    assert f"to continue from the latest checkpoint: runner.resume_dir={interrupted.checkpoint}" in run.output
    assert list(checkpoint_folder(run.log_dir, 2).parent.iterdir()) == []  # nor anything that looks like one


@pytest.mark.long
def test_two_runs_at_once_that_break_one_after_the_other(start: StartProgram) -> None:
    """Each has a Ray of its own. A simulator of the first hangs; the second does not notice, and then its actor is killed."""
    first = start("launcher", "rollout.phyai.simulator_timeout=60")
    first.wait_for(CONFIRMED)
    second = start("launcher", "runner.max_epochs=20")
    first.wait_for("actor workers ready")
    healthy, stopped = simulators(first)
    stopped.send_signal(signal.SIGSTOP)
    second.wait_for(CONFIRMED)
    assert "this run starts one of its own" in second.output.read_text()
    first.wait_for("did not answer")
    ends_because(
        first,
        rf"EnvGroup rank 0 in \w+\(\) raised SimulatorError: simulator 1 of EnvGroup rank 0 \(process {stopped.pid}, stopped\) "
        r"did not answer the command '\w+' within 60 s and was killed",
    )
    assert not healthy.is_running()

    second.wait_for("Global Step:    1/")
    os.kill(worker_pid(second, "PhyaiActorWorker"), signal.SIGKILL)
    ends_because(second, r"ActorGroup rank 0 in \w+\(\): its process \d+ on [\d.]+ died without raising anything")


def test_killed_rollout_worker(start: StartProgram) -> None:
    program = start("launcher", "runner.save_interval=1", "runner.max_epochs=3")
    program.wait_for("global_step_1: ")  # saved; the second step begins
    os.kill(worker_pid(program, "PhyaiRolloutWorker"), signal.SIGKILL)
    run = ends_because(
        program,
        r"RolloutGroup rank 0 in \w+\(\): its process \d+ on [\d.]+ died without raising anything: it was killed",
    )
    assert f"runner.resume_dir={checkpoint_folder(run.log_dir, 1)}" in run.output


@pytest.mark.long
def test_worker_in_a_deadlock(start: StartProgram) -> None:
    """Its event loop is blocked, so no Ray call reaches it; the report shows the line."""
    program = start(
        "driver",
        "runner.save_interval=1",
        "runner.max_epochs=2",
        *STALL_SOON,
        environment={"FAULT": "deadlock@1", **BARS},
    )
    program.wait_for("Generating Rollout Epochs:   0%", times=2)
    run = ends_because(
        program,
        r"\n- RolloutGroup rank 0 \(process \d+ on [\d.]+, \w+\) is busy, or blocked by itself",
        r"in generate\(\) for \d+ s; last sign of life: predict train, \d+ s ago",
        r"tests/integration/faults.py:\d+ in predict_action_batch: lock.acquire\(\)\n",
        since=time.monotonic() + STALL_S,
    )
    assert f"runner.resume_dir={checkpoint_folder(run.log_dir, 1)}" in run.output


@pytest.mark.long
def test_stopped_environment_worker_ends_an_evaluation(start: StartProgram) -> None:
    program = start("evaluation", *STALL_SOON, environment=BARS)
    program.wait_for("Evaluating Rollout Epochs:   0%")
    pid = worker_pid(program, "EvaluationEnvWorker")
    os.kill(pid, signal.SIGSTOP)
    ends_because(
        program,
        rf"\n- EnvGroup rank 0 \(process {pid} on [\d.]+, stopped\) is stopped\n +in evaluate\(\) for \d+ s",
        r"\n- RolloutGroup rank 0 \(process \d+ on [\d.]+, \w+\) waits for another worker\n +in evaluate\(\) for \d+ s",
        since=time.monotonic() + STALL_S,
    )


@pytest.mark.long
def test_simulator_that_is_killed(start: StartProgram) -> None:
    program = start("launcher")
    program.wait_for("actor workers ready")
    simulators(program)[1].kill()
    ends_because(program, r"EnvGroup rank 0 in \w+\(\) raised SimulatorError: simulator 1 of .* was killed by SIGKILL")


@pytest.mark.long
def test_worker_that_ray_kills_for_memory() -> None:
    """Ray does so above a share of the machine's memory; here that share is so small that it is always exceeded."""
    script = (
        "import ray, time\n"
        "from rlinf_phyai import plugin\n"
        "ray.init(address='local', include_dashboard=False)\n"
        "class Worker:\n"
        "    def __init__(self):\n"
        "        self.ballast = bytearray(200_000_000)\n"
        "        time.sleep(60)\n"
        "worker = ray.remote(Worker).remote()\n"
        "print('SAID', plugin._problem('Worker 0 of EnvGroup', Worker, worker.__ray_call__.remote(plugin.report), 60.0))\n"
    )
    environment = {**os.environ, "RAY_memory_usage_threshold": "0.01", "RAY_USAGE_STATS_ENABLED": "0"}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    (said,) = [line for line in result.stdout.splitlines() if line.startswith("SAID ")]
    assert re.match(r"SAID Worker 0 of EnvGroup: Ray killed its process: .*low on memory", said), said
    assert said.endswith("estimates what environments take.")


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"mounting a small file system is not allowed here: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.long
def test_disk_that_is_really_full(start: StartProgram, tmp_path: Path) -> None:
    """The first checkpoint, of about 8 MB, fits; the second does not."""
    with small_disk(tmp_path / "disk", 12) as disk:
        program = start("launcher", "runner.save_interval=1", "runner.max_epochs=3", f"runner.logger.log_path={disk}")
        program.wait_for("function save_checkpoint: exception")
        run = ends_because(
            program, r"ActorGroup rank 0 in save_checkpoint\(\) raised CheckpointError: .*: No space left"
        )
        first = checkpoint_folder(disk, 1)
        assert "THERE IS NO ROOM FOR ANOTHER ONE" in run.output
        assert f"to continue from the latest checkpoint: runner.resume_dir={first}" in run.output
        assert [folder.name for folder in first.parent.iterdir()] == ["global_step_1"]
        assert missing_parts(first / "actor") == []


@pytest.mark.long
def test_run_in_a_cluster_that_somebody_started(start: StartProgram, own_ray: tuple[str, psutil.Process]) -> None:
    """With RAY_ADDRESS the run joins; at its end its workers go and the cluster stays."""
    address, head = own_ray
    program = start("launcher", "runner.max_epochs=1", environment={"RAY_ADDRESS": address})
    run = program.finish()
    run.assert_success()
    assert f"Connecting to existing Ray cluster at address: {address}" in run.output
    processes = [" ".join(process.cmdline()) for process in head.children(recursive=True)]
    assert not [command for command in processes if "RolloutWorker" in command]
    assert any("gcs_server" in command for command in processes)
    port = int(address.split(":")[1])
    assert any(c.laddr.port == port for c in psutil.net_connections("tcp") if c.status == "LISTEN")


@pytest.fixture
def own_ray() -> Iterator[tuple[str, psutil.Process]]:
    """Address and process of a cluster, started as a user would before, without any of our variables in its environment."""
    script = (
        "import ray, sys\n"
        "context = ray.init(address='local', include_dashboard=False)\n"
        "print('ADDRESS', context.address_info['gcs_address'], flush=True)\n"
        "sys.stdin.read()\n"
    )
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environment |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    head = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert head.stdin
    assert head.stdout

    address = next((line.split()[1] for line in head.stdout if line.startswith("ADDRESS ")), None)
    assert address, "Ray did not start"
    yield address, psutil.Process(head.pid)
    head.stdin.close()
    head.wait(60)
