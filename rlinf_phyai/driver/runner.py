# SPDX-License-Identifier: Apache-2.0
"""RLinf's embodied runner with a sign of life while the workers start, and with checkpoints that are whole or absent.

Loading a full-size model takes minutes in several processes at once; a run that says nothing meanwhile looks stuck.
"""

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlinf.runners.embodied_runner import EmbodiedRunner

from rlinf_phyai import checkpoints
from rlinf_phyai.checksum import require_equal
from rlinf_phyai.driver.launch import say
from rlinf_phyai.driver.tensorboard_layout import add_layout

STEP_TABLE = "RLINF_PHYAI_STEP_TABLE"
STEP_FIGURES = {
    "env/success_once": "success",
    "env/return": "return",
    "train/actor/rollout_train_logprob_gap": "gap to the engine",
    "train/actor/grad_norm": "gradient norm",
}
"""Metric -> its name in the line of a step."""


class PhyaiRunner(EmbodiedRunner):
    """Runs the same loop as RLinf's; after the first weight sync, actor and rollout must hold the same parameters.

    Attributes:
        checkpoint: the latest whole checkpoint to continue from: saved, or resumed from; None where there is none.
    """

    checkpoint: Path | None = None
    _weights_compared = False

    def print_metrics_table_async(
        self, step: int, total_steps: int, start_time: float, metrics: dict[str, Any], start_step: int = 0
    ) -> None:
        """RLinf's table of all metrics after every step; one line with ``RLINF_PHYAI_STEP_TABLE=0``."""
        if os.environ.get(STEP_TABLE, "1") != "0":
            super().print_metrics_table_async(step, total_steps, start_time, metrics, start_step)
            return
        figures = [f"{label} {metrics[key]:.3g}" for key, label in STEP_FIGURES.items() if key in metrics]
        took = f"{metrics['time/step']:.1f} s"
        self.log_queue.put((say, (f"step {step + 1} of {total_steps}: {', '.join([took, *figures])}",)))

    def update_rollout_weights(self) -> None:
        """RLinf's weight sync. The first one is followed by a comparison of all parameters, frozen ones included.

        Raises:
            WeightUpdateError: parameters differ; the message names them and the settings that cause it.
        """
        # RLinf's loop announces the step without waiting, and Ray may run the sync before it. The weights would carry
        # the number of an earlier step, and the engine would draw that step's random numbers again.
        announced = [group.set_global_step(self.global_step) for group in (self.actor, self.rollout)]
        for handle in announced:
            handle.wait()
        super().update_rollout_weights()
        comparable = all(hasattr(group, "parameter_checksums") for group in (self.rollout, self.actor))
        if self._weights_compared or not comparable:  # RLinf's own workers cannot say what they hold
            return
        per_rollout = self.rollout.parameter_checksums().wait()
        dtypes = {name: found.dtype for name, found in per_rollout[0].items()}
        actor = self.actor.parameter_checksums(dtypes).wait()[0]
        for found in per_rollout:
            require_equal(actor, found)
        self._weights_compared = True

    def init_workers(self) -> None:
        """Start rollout, environment and actor workers as RLinf does, and print which of them are ready."""
        with StartProgress({"rollout": self.rollout, "env": self.env, "actor": self.actor}):
            super().init_workers()
        add_layout(self.metric_logger)
        if self.cfg.runner.get("resume_dir"):
            self.checkpoint = Path(self.cfg.runner.resume_dir)

    def _save_checkpoint(self) -> None:
        """RLinf's checkpoint, in a folder that has its name only when everything is there.

        Raises:
            CheckpointError: the actors wrote less than a whole checkpoint; it is removed.
        """
        logger = self.cfg.runner.logger
        folder = checkpoints.folder_of_step(logger.log_path, logger.experiment_name, self.global_step)
        started = time.monotonic()
        with checkpoints.written_whole(folder) as partial:
            self.actor.save_checkpoint(str(partial / "actor"), self.global_step).wait()
        self.checkpoint = folder
        size, free = checkpoints.size(folder), shutil.disk_usage(folder).free
        room = "" if free > size else "; warning: THERE IS NO ROOM FOR ANOTHER ONE"
        took = time.monotonic() - started
        say(f"checkpoint {folder}: {size / 1e9:.3g} GB in {took:.0f} s, {free / 1e9:.3g} GB free{room}")


class StartProgress:
    """Watches the ``init_worker`` calls of worker groups and prints a line per group, and one every ``every`` seconds.

    Args:
        groups: RLinf worker groups by the name to print.
        every: seconds between the lines that say what is being waited for.
        write: where lines go.
    """

    def __init__(self, groups: dict[str, Any], every: float = 15.0, write: Callable[[str], None] | None = None) -> None:
        self._groups = groups
        self._every = every
        self._write = write or (lambda line: print(line, flush=True))
        self._started: dict[str, tuple[float, Any]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "StartProgress":
        self._begin = time.monotonic()
        self._originals = {name: group.init_worker for name, group in self._groups.items()}
        for name, group in self._groups.items():
            group.init_worker = self._recorded(name, self._originals[name])
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._stop.set()
        self._thread.join()
        for name, group in self._groups.items():
            group.init_worker = self._originals[name]

    def _recorded(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def init_worker(*args: Any, **kwargs: Any) -> Any:
            handle = original(*args, **kwargs)
            self._started[name] = (time.monotonic(), handle)
            return handle

        return init_worker

    def _watch(self) -> None:
        ready: set[str] = set()
        last_line = self._begin
        stopped = False
        while not stopped:
            stopped = self._stop.wait(0.2)
            now = time.monotonic()
            for name, (start, handle) in list(self._started.items()):
                if name not in ready and handle.done():
                    ready.add(name)
                    last_line = now
                    self._write(f"[rlinf-phyai] {name} workers ready after {now - start:.0f} s")
            waiting = [name for name in self._started if name not in ready]
            if waiting and now - last_line >= self._every and not stopped:
                last_line = now
                self._write(
                    f"[rlinf-phyai] starting workers, {now - self._begin:.0f} s: waiting for {', '.join(waiting)}"
                )
