# SPDX-License-Identifier: Apache-2.0
"""Errors of the engine. Every message names the tensor or key, what was found, what is allowed and what to change."""


class PhyaiError(Exception):
    """Base class of all errors that this package raises on purpose."""


class RequestError(PhyaiError, ValueError):
    """A request has a wrong shape, dtype, device or value; nothing was computed."""


class CheckpointError(PhyaiError, ValueError):
    """A checkpoint is missing, truncated or does not fit the model; nothing was loaded."""


class KernelPolicyError(PhyaiError, ValueError):
    """A kernel policy names an unknown operation or backend, or one that cannot run on this device."""


class WeightUpdateError(PhyaiError, RuntimeError):
    """A weight update was used out of order or got a tensor that does not fit; the rejected batch was not written."""


class EngineUnusableError(PhyaiError, RuntimeError):
    """The weights may be a mixture of two versions: close this engine and build a new one."""


class EngineClosedError(PhyaiError, RuntimeError):
    """The engine was closed; build a new one."""


class EngineOffloadedError(PhyaiError, RuntimeError):
    """The engine's memory is on the host; call ``reload()`` first."""
