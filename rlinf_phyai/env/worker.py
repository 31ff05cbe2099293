# SPDX-License-Identifier: Apache-2.0
"""RLinf's environment worker; its simulators must answer within ``rollout.phyai.simulator_timeout``."""

from __future__ import annotations

from omegaconf import OmegaConf
from rlinf.workers.env.env_worker import EnvWorker

from rlinf_phyai.env import DEFAULT_TIMEOUT_S
from rlinf_phyai.signs import SignsOfLife


class PhyaiEnvWorker(SignsOfLife, EnvWorker):
    """Stock RLinf, except that a dead or silent simulator raises an error that names it."""

    def init_worker(self) -> None:
        """Start the simulators, as RLinf does.

        Raises:
            SimulatorError: one of them died or did not answer in time; here, or in any later call.
        """
        # In the worker only: this import is LIBERO's too.
        from rlinf_phyai.env.simulators import watched_simulators

        timeout = OmegaConf.select(self.cfg, "rollout.phyai.simulator_timeout", default=DEFAULT_TIMEOUT_S)
        with watched_simulators(float(timeout), f"{self._group_name} rank {self._rank}"):
            super().init_worker()
