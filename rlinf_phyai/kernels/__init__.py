# SPDX-License-Identifier: Apache-2.0
"""One interface per operation; ``torch_ops`` is the readable reference, every other backend is tested against it."""

from rlinf_phyai.kernels.registry import BACKENDS, OPERATIONS, Kernels, UnknownKernel, check_operations, resolve

__all__ = ["BACKENDS", "OPERATIONS", "Kernels", "UnknownKernel", "check_operations", "resolve"]
