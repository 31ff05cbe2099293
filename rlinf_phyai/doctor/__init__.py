# SPDX-License-Identifier: Apache-2.0
"""``rlinf-phyai doctor``: checks an installation part by part, each by using it, and a config against this machine.

Checks are small functions grouped by subject; none of them can end the doctor, whatever is missing.
"""

from rlinf_phyai.doctor import cluster, gpu, simulator, software
from rlinf_phyai.doctor.finding import Broken, Check, Doubtful, Finding, run_all

__all__ = ["CHECKS", "Broken", "Check", "Doubtful", "Finding", "run_all"]

CHECKS: tuple[Check, ...] = (*software.CHECKS, *gpu.CHECKS, *simulator.CHECKS, *cluster.CHECKS)
"""The checks of the installation, in the table's order."""
