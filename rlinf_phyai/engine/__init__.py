# SPDX-License-Identifier: Apache-2.0
"""The inference engine's public API."""

from rlinf_phyai.engine.config import DeviceConfig, EngineArgs, EngineConfig, RuntimeConfig
from rlinf_phyai.engine.engine import Engine
from rlinf_phyai.engine.weight_update import UpdateState
from rlinf_phyai.errors import (
    CheckpointError,
    EngineClosedError,
    EngineOffloadedError,
    EngineUnusableError,
    KernelPolicyError,
    PhyaiError,
    RequestError,
    WeightUpdateError,
)

__all__ = [
    "CheckpointError",
    "DeviceConfig",
    "Engine",
    "EngineArgs",
    "EngineClosedError",
    "EngineConfig",
    "EngineOffloadedError",
    "EngineUnusableError",
    "KernelPolicyError",
    "PhyaiError",
    "RequestError",
    "RuntimeConfig",
    "UpdateState",
    "WeightUpdateError",
]
