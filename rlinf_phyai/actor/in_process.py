# SPDX-License-Identifier: Apache-2.0
"""The actor without Ray: a rank in this process, for tests, benchmarks and checks.

RLinf's workers are built inside Ray actors. What an actor computes does not need Ray, so this module builds one with
everything that ``EmbodiedFSDPActor.__init__`` sets up except its place in the cluster; model, FSDP, optimizer and
every method are the real ones.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
from omegaconf import DictConfig
from rlinf.hybrid_engines.fsdp.fsdp_model_manager import FSDPModelManager
from rlinf.hybrid_engines.weight_syncer.bucket_syncer import BucketWeightSyncer
from rlinf.scheduler import Worker
from rlinf.scheduler.hardware import AcceleratorType

from rlinf_phyai.actor.correction import CorrectionConfig
from rlinf_phyai.actor.worker import PhyaiActorWorker, corrected_config


def start_process_group(rank: int = 0, world_size: int = 1, store: torch.distributed.Store | None = None) -> None:
    """A default process group, unless there is one: NCCL where CUDA is available, gloo otherwise.

    Args:
        rank, world_size: of this process.
        store: where the ranks meet; needed for more than one.
    """
    from rlinf_phyai.platforms import cpu

    os.environ.setdefault("LOCAL_RANK", str(rank))
    cpu.install()
    if not torch.distributed.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        store = store or torch.distributed.HashStore()
        torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size)


def in_process_actor(
    cfg: DictConfig,
    *,
    worker_class: type = PhyaiActorWorker,
    model_provider: Callable[[Any], torch.nn.Module] | None = None,
) -> Any:
    """Build an actor worker; :func:`start_process_group` must have been called.

    Args:
        cfg: RLinf's resolved config. Of its sections, ``algorithm``, ``actor``, ``runner``, ``rollout.phyai`` and
            ``env.train`` are read; ``actor.global_batch_size`` counts this one rank.
        worker_class: ``PhyaiActorWorker`` or RLinf's ``EmbodiedFSDPActor``.
        model_provider: builds the model from the worker in place of RLinf's loader.

    Returns:
        the worker, its model and optimizer built.
    """
    cfg = copy.deepcopy(cfg)
    ours = issubclass(worker_class, PhyaiActorWorker)

    class InProcess(worker_class):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            self._rank, self._world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
            self._accelerator_type = AcceleratorType.NO_ACCEL
            self._timer_metrics: dict[str, Any] = {}
            self._group_name = "actor"
            used = cfg
            if ours:
                self.correction = CorrectionConfig.from_config(cfg)
                used = corrected_config(cfg, self.correction)
            FSDPModelManager.__init__(self, used.actor, self._world_size, self._rank)
            self.cfg = used
            self.torch_platform = Worker.torch_platform
            self.enable_offload = used.actor.get("enable_offload", False)
            self.enable_sft_co_train = False
            self.version = 0
            self.weight_syncer = BucketWeightSyncer(1 << 29, None, "cpu")
            per_rank = used.actor.global_batch_size // self._world_size
            self.gradient_accumulation = per_rank // used.actor.micro_batch_size
            self.update_epoch = used.algorithm.get("update_epoch", 1)
            if ours:
                self._setup_correction()

        if model_provider is not None and ours:

            def _load_model(self) -> torch.nn.Module:
                return model_provider(self)

        elif model_provider is not None:

            def model_provider_func(self) -> torch.nn.Module:
                return model_provider(self)

    worker = InProcess()
    worker.init_worker()
    return worker
