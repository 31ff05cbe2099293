# SPDX-License-Identifier: Apache-2.0
"""PI0.5 rollout engine and importance-corrected actor for RLinf.

Importing this package imports nothing else: the engine (:mod:`rlinf_phyai.engine`) works without RLinf, and RLinf's
workers import :mod:`rlinf_phyai.plugin` only.
"""

__version__ = "0.1.0"
