# SPDX-License-Identifier: Apache-2.0
"""Ways to start a run, and ways in which it must not go on."""

from __future__ import annotations

import math
import signal
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rlinf_phyai.evaluation.outcomes import Episode
from rlinf_phyai.evaluation.report import Evaluation
from rlinf_phyai.models.pi05.libero_sentences import LIBERO_SENTENCES
from tests.integration.conftest import TINY, StartProgram

pytestmark = pytest.mark.integration

CONFIRMED = "every worker confirmed"


def test_users_own_config_directory(start: StartProgram, tmp_path: Path, repository: Path) -> None:
    """Own groups ``env`` and ``model`` win over ours, ``hydra.searchpath`` adds the rest, and the engine's group is found.

    The run also reports log-probs that are 0.01 too high per element, which must come out as the weight exp(-0.35).
    """
    examples = repository / "examples" / "embodiment" / "config"
    config_dir = tmp_path / "my_configs"
    for group, name, change in (
        ("env", "libero_spatial", "task_suite_name: libero_spatial"),
        ("model", "pi0_5", "use_proprio: True"),
    ):
        text = (examples / group / f"{name}.yaml").read_text()
        assert change in text
        (config_dir / group).mkdir(parents=True)
        (config_dir / group / "mine.yaml").write_text(text.replace(change, f"{change}\nmine: {group}"))
    config = (examples / f"{TINY}.yaml").read_text()
    config = config.replace(
        "- size: tiny", "- size: tiny\n- override env@env.train: mine\n- override model@actor.model: mine", 1
    )
    config += f"\nhydra:\n  searchpath:\n  - file://{examples}\n"
    (config_dir / "mine.yaml").write_text(config)

    program = start(
        "module",
        "runner.max_epochs=1",
        "rollout.phyai.debug_logprob_offset=0.01",
        config_dir=config_dir,
        config="mine",
    )
    run = program.finish()
    run.assert_success()
    cfg = OmegaConf.load(run.log_dir / "config.yaml")
    assert (cfg.env.train.mine, cfg.actor.model.mine) == ("env", "model")
    assert "rollout PhyaiRolloutWorker" in run.output

    scalars = run.scalars()
    assert scalars["train/actor/rollout_train_logprob_gap"] == pytest.approx([0.01], abs=1e-4)
    assert scalars["train/actor/importance_sampling_weight"] == pytest.approx([math.exp(-0.35)], rel=1e-3)
    assert scalars["train/actor/importance_sampling_clip_fraction"] == [0.0]
    assert scalars["train/actor/first_update/ratio_max_dev"] == [0.0]
    assert program.left_over() == []


def test_stock_backend_through_the_launcher(start: StartProgram) -> None:
    """RLinf's own workers, unchanged, by the same command; the user's override beats the launcher's."""
    program = start("launcher", "rollout.rollout_backend=huggingface", "runner.max_epochs=1")
    run = program.finish()
    run.assert_success()
    assert f"{CONFIRMED}: actor EmbodiedFSDPActor, rollout MultiStepRolloutWorker, env EnvWorker" in run.output
    scalars = run.scalars()
    assert len(scalars["env/success_once"]) == 1
    assert not any("importance_sampling" in tag for tag in scalars)
    assert program.left_over() == []


def test_plugin_that_breaks_in_the_workers_stops_the_run(start: StartProgram, tmp_path: Path, repository: Path) -> None:
    """RLinf writes a log line and goes on with its own model; the driver must notice."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "class Broken:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'rlinf_phyai.plugin' and 'CLUSTER_NODE_RANK' in os.environ:\n"
        "            raise ImportError('broken on purpose')\n"
        "sys.meta_path.insert(0, Broken())\n"
    )
    program = start(
        "launcher",
        "rollout.rollout_backend=huggingface",  # its workers need nothing of ours, so only the question can tell
        environment={"PYTHONPATH": f"{tmp_path}:{repository}"},
    )
    run = program.finish()
    assert run.exit_code == 1
    # Without the plugin the CPU's actor and rollout workers cannot start; the environment worker lives to tell why.
    assert "stopped: Worker 0 of EnvGroup cannot load rlinf_phyai.plugin" in run.output
    assert "Worker 0 of ActorGroup did not start" in run.output
    assert "broken on purpose" in run.output
    assert CONFIRMED not in run.output
    assert program.left_over() == []


def test_users_extension_module_that_fails_in_the_workers_stops_the_run(
    start: StartProgram, tmp_path: Path, repository: Path
) -> None:
    """The module that the user named in RLINF_EXT_MODULE is called in driver and workers, and may not fail in silence."""
    (tmp_path / "my_extension.py").write_text(
        "import os\n"
        "def register():\n"
        "    print('my_extension registers', 'worker' if 'CLUSTER_NODE_RANK' in os.environ else 'driver', flush=True)\n"
        "    if os.environ.get('GROUP_NAME') == 'RolloutGroup':\n"
        "        raise ValueError('no licence on this node')\n"
    )
    program = start(
        "launcher", environment={"RLINF_EXT_MODULE": "my_extension", "PYTHONPATH": f"{tmp_path}:{repository}"}
    )
    run = program.finish()
    assert run.exit_code == 1
    assert "my_extension registers driver" in run.output
    assert "stopped: Worker 0 of RolloutGroup runs without rlinf_phyai" in run.output
    assert "no licence on this node" in run.output
    assert program.left_over() == []


@pytest.mark.parametrize("number, exit_code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_ends_everything(start: StartProgram, number: signal.Signals, exit_code: int) -> None:
    """Ctrl-C (to the whole process group) and SIGTERM (to the launcher's pid) leave no process behind."""
    program = start("launcher")
    program.wait_for(CONFIRMED)
    program.look()
    assert program.descendants
    if number is signal.SIGINT:
        program.signal_group(number)
    else:
        program.process.send_signal(number)
    run = program.finish(timeout=120)
    assert run.exit_code == exit_code
    assert f"stopped by {number.name}" in run.output
    assert program.left_over() == []


def test_refused_config_starts_nothing(start: StartProgram) -> None:
    """A config that cannot work ends with a message and exit code 1, before Ray."""
    run = start("launcher", "algorithm.recompute_logprobs=False").finish(timeout=300)
    assert run.exit_code == 1
    assert "algorithm.importance_sampling_fix" in run.output
    assert "Traceback" not in run.output
    assert "ray" not in run.output.lower()


def test_evaluation(start: StartProgram) -> None:
    """The evaluation program runs the same config without an actor, and says which episode of which task ended how."""
    program = start("evaluation", "env.eval.video_cfg.save_video=True")
    run = program.finish()
    run.assert_success()
    assert f"{CONFIRMED}: rollout PhyaiRolloutWorker, env EvaluationEnvWorker" in run.output
    scalars = run.scalars()
    assert scalars["eval/success_once"] == [0.0]
    assert scalars["eval/task_1/success_once"] == [0.0]
    assert not any("task_id" in tag or "trial_id" in tag for tag in scalars)
    found = Evaluation.read(run.log_dir)
    # RLinf hands out initial states in order: trial 0 of every task, then trial 1
    assert found.episodes == [Episode(0, 0, False, 10), Episode(1, 0, False, 10)]
    assert len(found.sentences) == 10
    assert found.sentences[0] in LIBERO_SENTENCES
    assert f"0 {found.sentences[0]}" in run.output  # the table
    (video,) = (run.log_dir / "video" / "eval").rglob("*.mp4")
    assert video.stat().st_size > 10_000
    assert program.left_over() == []
