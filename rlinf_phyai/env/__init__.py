# SPDX-License-Identifier: Apache-2.0
"""RLinf's environment worker, with an eye on its simulators."""

DEFAULT_TIMEOUT_S = 600.0
"""``rollout.phyai.simulator_timeout`` of a config without it."""
