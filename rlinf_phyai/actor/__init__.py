# SPDX-License-Identifier: Apache-2.0
"""RLinf's FSDP actor with rescoring and importance-sampling correction.

Import the modules directly: ``correction``, ``metrics`` and ``rescoring`` need torch only; ``losses`` and ``worker``
need RLinf.
"""
