# SPDX-License-Identifier: Apache-2.0
"""RLinf's rollout worker on top of the engine: observations in, actions and replay tensors out."""
