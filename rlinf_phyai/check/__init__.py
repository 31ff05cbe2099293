# SPDX-License-Identifier: Apache-2.0
"""``rlinf-phyai check``: do engine and actor compute the same policy on this config, checkpoint and machine?

:mod:`compare` does the work, :mod:`observations` supplies its inputs, :mod:`report` shows the result.
"""
