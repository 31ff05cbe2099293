# SPDX-License-Identifier: Apache-2.0
"""RLinf's environment worker, with an eye on its simulators."""
