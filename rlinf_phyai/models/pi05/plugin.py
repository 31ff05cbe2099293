# SPDX-License-Identifier: Apache-2.0
"""Builds a PI0.5 model for the engine: configuration, memory check, weights, tables, scheduler."""

from __future__ import annotations

import torch

from rlinf_phyai.errors import PhyaiError
from rlinf_phyai.kernels import Kernels
from rlinf_phyai.models.pi05 import fp8
from rlinf_phyai.models.pi05.checkpoint import LoadReport, canonical_name
from rlinf_phyai.models.pi05.configuration import PI05Config
from rlinf_phyai.models.pi05.loading import load_checkpoint
from rlinf_phyai.models.pi05.memory import check_memory
from rlinf_phyai.models.pi05.requests import PI05Args
from rlinf_phyai.models.pi05.scheduler import PI05Scheduler
from rlinf_phyai.models.pi05.tables import DerivedTables
from rlinf_phyai.models.pi05.weights import PI05Weights


class PI05Model:
    """One loaded model: what the engine needs to run it and to update its weights."""

    canonical_name = staticmethod(canonical_name)

    def __init__(
        self,
        args: PI05Args,
        kernels: Kernels,
        device: torch.device,
        params_dtype: torch.dtype,
        seed: int,
        progress: bool,
    ) -> None:
        if not isinstance(args, PI05Args):
            raise TypeError(f"the pi05 plugin needs PI05Args; found {type(args).__name__}.")
        self.args = args
        self.config = PI05Config.from_checkpoint(args.checkpoint_dir).with_overrides(**args.overrides())
        fp8_prefix = args.prefix_precision == "fp8"
        reason = fp8.unsupported_reason(self.config, device, params_dtype) if fp8_prefix else None
        if reason:
            raise PhyaiError(f"prefix_precision 'fp8' cannot be used: {reason}, or leave prefix_precision at None.")
        cameras = args.usual_cameras(self.config.num_cameras)
        check_memory(self.config, args.max_batch_size, cameras, device, params_dtype, fp8_prefix)
        self.weights = PI05Weights(self.config, device, params_dtype)
        self.load_report: LoadReport = load_checkpoint(self.weights, args.checkpoint_dir, args.weights, progress)
        if device.type == "cuda":
            # What loading leaves in torch's cache would otherwise house the small tensors that follow, and offloading could
            # not give it back.
            torch.cuda.empty_cache()
        positions = self.config.num_cameras * self.config.vision.num_tokens + self.config.tokenizer_max_length
        self.tables = DerivedTables(
            kernels,
            self.weights,
            max_positions=positions + self.config.suffix_length,
            masked_cameras=self.config.critic_after_vlm and self.config.num_cameras > 1,
            fp8_prefix=fp8_prefix,
        )
        generator = torch.Generator(device=device)
        generator.manual_seed(seed)
        self.scheduler = PI05Scheduler(kernels, self.weights, self.tables, args.max_batch_size, generator)
