# SPDX-License-Identifier: Apache-2.0
"""RLinf's FSDP actor with rescoring and importance-sampling correction.

Four hooks of ``EmbodiedFSDPActor`` are overridden, each as small as it can be: ``compute_advantages_and_returns``
rescores before GAE, ``train_micro_batch`` hands the weight to the corrected loss, ``run_training`` adds the metrics,
and ``setup_model_and_optimizer`` trims the list of synchronised weights. With ``recompute_logprobs`` and
``importance_sampling_fix`` off, none of them does anything and the worker is stock RLinf, bit for bit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from rlinf.hybrid_engines.weight_syncer.bucket_syncer import BucketWeightSyncer
from rlinf.utils.utils import materialize_tensor
from rlinf.workers.actor.fsdp_actor_worker import EmbodiedFSDPActor

from rlinf_phyai.actor.correction import CorrectionConfig, advantage_weights
from rlinf_phyai.actor.gaussian import GaussianSettings, gaussian_metrics
from rlinf_phyai.actor.kept_prefixes import KeptPrefixes
from rlinf_phyai.actor.limits import Limits, judge
from rlinf_phyai.actor.losses import (
    CORRECTED_LOSSES,
    LOSS_PREFIX,
    FirstUpdate,
    MicroBatchCorrection,
    correcting,
    register_corrected_losses,
)
from rlinf_phyai.actor.metrics import CorrectionSums, first_update_metrics
from rlinf_phyai.actor.model import KEYS_KEY, LAYOUT_KEY, POOLED_KEY, choose_prefix, keep_cache_whole, use_real_tokens
from rlinf_phyai.actor.monitor import ADVICE, CorrectionMonitor
from rlinf_phyai.actor.prefix import PromptLayout
from rlinf_phyai.actor.rescoring import BatchPlan, load, longest, rescore, upload
from rlinf_phyai.actor.values import (
    actor_values,
    check_value_source,
    choose_value_source,
    refuse_missing_values,
    value_gap_metrics,
)
from rlinf_phyai.checkpoints import explained
from rlinf_phyai.checksum import Checksum, checksums
from rlinf_phyai.engine.kernel_policy import load_kernel_policy
from rlinf_phyai.errors import PhyaiError
from rlinf_phyai.kernels import Kernels, resolve
from rlinf_phyai.models.pi05.lora import merge_adapters, plain_names
from rlinf_phyai.signs import SignsOfLife, mark

UNUSED_BY_ACTIONS = ("gemma_expert.lm_head.weight",)
"""Trainable by name only: the action path never reads the expert's language head (0.5 GB at full size)."""


class PhyaiActorWorker(SignsOfLife, EmbodiedFSDPActor):
    """See the module's docstring. ``cfg`` is RLinf's resolved config; the copy held here may name a corrected loss."""

    def __init__(self, cfg: DictConfig) -> None:
        self.correction = CorrectionConfig.from_config(cfg)
        super().__init__(corrected_config(cfg, self.correction))
        self._setup_correction()

    def _setup_correction(self) -> None:
        """Choices of the config, and the state of the current training step."""
        # After the expert, the rollout averages V over all denoise steps while the rescoring sees one of them.
        openpi = self.cfg.actor.model.get("openpi") or {}
        self._values_comparable = bool(openpi.get("value_after_vlm", False)) and self.cfg.algorithm.adv_type == "gae"
        source = OmegaConf.select(self.cfg, "rollout.phyai.value_source", default="auto")
        check_value_source(source, self.correction.recompute, self._values_comparable)
        self._value_source = choose_value_source(source, self.correction.recompute, self._values_comparable)
        self._kept_prefixes = KeptPrefixes(
            OmegaConf.select(self.cfg, "rollout.phyai.actor_prefix_cache_gib", default=0),
            self._torch_device,
            self._logger.info,
            repeatable=self._world_size == 1 or whole_on_every_rank(self.cfg.actor.fsdp_config),
        )
        self._gaussian = GaussianSettings.from_config(self.cfg)
        self._monitor = CorrectionMonitor()
        self._self_check = OmegaConf.select(self.cfg, "rollout.phyai.self_check", default="off")
        self._correction_metrics: dict[str, float] = {}
        self._weight_normalizer = 1.0
        self._first_update: FirstUpdate | None = None
        self._micro_batches_seen = 0
        self._observations: Iterator[dict[str, Any]] = iter(())

    @property
    def correction_metrics(self) -> dict[str, float]:
        """Figures of the last rescoring, the same on every rank; NaN where no sample contributed."""
        return dict(self._correction_metrics)

    def model_provider_func(self) -> torch.nn.Module:
        """RLinf's model; its prefix runs on real tokens where ``rollout.phyai.actor_prefix`` says so."""
        model = self._load_model()
        choice = OmegaConf.select(self.cfg, "rollout.phyai.actor_prefix", default="auto")
        self.prefix = choose_prefix(choice, model, self.correction.recompute)
        self._lora_scale = lora_scale(model)
        self._logger.info(f"actor prefix: {self.prefix} (rollout.phyai.actor_prefix: {choice})")
        if self.prefix == "dense":
            return keep_cache_whole(model)
        return use_real_tokens(model, self._prefix_kernels() if self.prefix == "fused" else None)

    def _prefix_kernels(self) -> Kernels:
        """Those of the engine's policy.

        Raises:
            KernelPolicyError, UnknownKernel: the policy does not exist or cannot run on this device.
        """
        policy = load_kernel_policy(OmegaConf.select(self.cfg, "rollout.phyai.kernel_policy"))
        return resolve(policy.operations, self._torch_device, policy.fallback)[0]

    @property
    def _torch_device(self) -> torch.device:
        return torch.device(self.device) if isinstance(self.device, str) else torch.device("cuda", self.device)

    def _load_model(self) -> torch.nn.Module:
        return super().model_provider_func()

    def setup_model_and_optimizer(self) -> None:
        """As RLinf; afterwards the bucket syncer no longer ships weights that no action depends on.

        (The patch syncer compares the key sets of both sides and keeps its full list.) Of a matrix with a LoRA adapter the merged one
        is shipped: see :meth:`get_rollout_state_dict`.
        """
        super().setup_model_and_optimizer()
        if self._lora_scale is not None:
            self.param_names_need_sync = plain_names(self.param_names_need_sync)
        if isinstance(self.weight_syncer, BucketWeightSyncer):
            self.param_names_need_sync = [n for n in self.param_names_need_sync if not n.endswith(UNUSED_BY_ACTIONS)]

    def get_rollout_state_dict(self) -> dict[str, torch.Tensor]:
        """What the rollout should hold: RLinf's state dict, LoRA adapters merged into their matrices."""
        state = super().get_rollout_state_dict()
        return state if self._lora_scale is None else merge_adapters(state, self._lora_scale, materialize_tensor)

    def parameter_checksums(self, dtypes: dict[str, torch.dtype]) -> dict[str, Checksum]:
        """Checksums of the parameters that ``dtypes`` names, each cast to the type named there.

        Every rank must be asked: sharded parameters are gathered one after the other.
        """
        offloaded = self.is_weight_offloaded
        if offloaded:
            self.load_param_and_grad(self.device, False)
        state = self.get_rollout_state_dict()
        found = checksums(((name, materialize_tensor(tensor)) for name, tensor in state.items()), dtypes)
        if offloaded:
            self.offload_param_and_grad()
        return found

    def save_checkpoint(self, save_path: str, step: int = 0) -> None:
        """RLinf's; a full disk is called a full disk.

        Raises:
            CheckpointError: nothing can be written to ``save_path``.
        """
        with explained(Path(save_path)):
            super().save_checkpoint(save_path, step)

    # -- before training ---------------------------------------------------------------------------------------------

    def compute_advantages_and_returns(self) -> dict[str, Any]:
        """Rescore the step if asked, then RLinf's GAE or group advantage. Metrics wait for :meth:`run_training`.

        Raises:
            ValueError: a shape or value that rescoring or GAE cannot use.
        """
        self._correction_metrics = {}
        if self.correction.recompute:
            with self.worker_timer("actor/recompute_logprobs"):
                self._rescore_step()
        if self.cfg.algorithm.adv_type == "gae":
            refuse_missing_values(self.rollout_batch["prev_values"])
        return super().compute_advantages_and_returns()

    def _rescore_step(self) -> None:
        batch = self.rollout_batch
        q = batch["prev_logprobs"]
        if self.is_weight_offloaded:
            self.load_param_and_grad(self.device)
        self.model.train()
        plan = BatchPlan.of(
            steps=q.shape[0],
            envs=q.shape[1],
            micro_batch_size=self.cfg.actor.micro_batch_size,
            global_batch_size=self.cfg.actor.global_batch_size,
            world_size=self._world_size,
            seed=self.cfg.actor.seed + self._rank,
        )
        if self.prefix != "dense":
            prompts = longest(batch["forward_inputs"]["tokenized_prompt_mask"], plan)
            # While only the critic is trained, the expert keeps no activations, gradients and moments.
            self._kept_prefixes.begin(prompts, typical=self.critic_warmup_steps == 0)
        scores = rescore(batch["forward_inputs"], plan, self._score, logprob_shape=q.shape, device=self.device)
        if self.prefix != "dense":
            self._kept_prefixes.agree()
        p, values = scores["logprobs"], scores.get("values")
        batch["rollout_logprobs"] = q.float()
        batch["prev_logprobs"] = p
        # RLinf's training would shuffle a copy of all observations, 10 GB at full size; it gets them by micro-batch instead.
        inputs = batch["forward_inputs"]
        self._observations = load(
            {key: inputs.pop(key) for key in list(inputs) if key.startswith("observation/")},
            plan,
            self.device,
            epochs=self.update_epoch,
            wanted=lambda index: self._kept_prefixes.get(index) is None,
        )
        if POOLED_KEY in scores:
            inputs[POOLED_KEY] = scores[POOLED_KEY]
        if values is not None and self._values_comparable and self._value_source == "rollout":
            mask = batch.get("loss_mask")
            self._correction_metrics.update(value_gap_metrics(values, batch["prev_values"], mask, self.device))
        if self._value_source == "actor":
            batch["prev_values"] = actor_values(values, batch["prev_values"])

        self._measure(p, batch["rollout_logprobs"])

    def _measure(self, p: torch.Tensor, q: torch.Tensor) -> None:
        """Metrics of the step over all ranks; rank 0 warns where they leave their limits."""
        mask = self.rollout_batch.get("loss_mask")
        sums = CorrectionSums.of(p, q, mask, self.correction, batch_dims=2).all_reduce(self.device)
        self._weight_normalizer = sums.bounded_mean
        self._correction_metrics.update(sums.metrics())
        if self._gaussian is not None:
            steps = self.rollout_batch["forward_inputs"]["denoise_inds"][..., 0]
            level = float(self.model._get_noise_level(torch.device("cpu"), torch.float32))  # of this global step
            settings = replace(self._gaussian, noise_level=level)
            self._correction_metrics.update(gaussian_metrics(p, q, steps, mask, settings, self.device))
        self._check_first_step()
        if self._rank == 0:
            for message in self._monitor.check(self._correction_metrics):
                self._logger.warning(f"importance-sampling correction: {message}")

    def _check_first_step(self) -> None:
        """``rollout.phyai.self_check``: before anything is learnt, rollout and actor must agree.

        Every rank sees the same reduced figures, so all of them stop or none.

        Raises:
            PhyaiError: with ``stop``, a figure beyond its limit.
        """
        choice, self._self_check = self._self_check, "off"
        if choice not in ("warn", "stop"):
            return
        prefix_precision = OmegaConf.select(self.cfg, "rollout.phyai.prefix_precision")
        limits = Limits.for_dtype(torch.bfloat16, prefix_precision)
        failed = [verdict for verdict in judge(self._correction_metrics, limits) if not verdict.ok]
        if not failed:
            self._logger.info("self-check: rollout and actor agree within the limits.")
            return
        message = "self-check: rollout and actor disagree before the first update. " + "; ".join(map(str, failed))
        message += f". {ADVICE}"
        if choice == "stop":
            raise PhyaiError(f"{message} (rollout.phyai.self_check: stop)")
        if self._rank == 0:
            self._logger.warning(message)

    def _score(self, forward_inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Scores of one micro-batch; its prefix may be kept."""
        mark("micro-batch of rescoring")
        compute_values = self.cfg.algorithm.adv_type == "gae"
        if self.prefix != "dense":
            forward_inputs[LAYOUT_KEY] = _layout(forward_inputs)
        output = self._kept_prefixes.scored(lambda: self._forward(forward_inputs, compute_values))
        if self.prefix != "dense":
            self._kept_prefixes.add(output[KEYS_KEY])
        wanted = ("logprobs", "values", POOLED_KEY) if compute_values else ("logprobs",)
        return {key: output[key] for key in wanted if output.get(key) is not None}

    def _forward(self, forward_inputs: dict[str, Any], compute_values: bool) -> dict[str, Any]:
        """The forward of RLinf's ``train_micro_batch``, argument by argument."""
        with self.amp_context:
            output: dict[str, Any] = self.model(
                forward_inputs=upload(forward_inputs, self.device),
                compute_logprobs=True,
                compute_entropy=self.cfg.algorithm.entropy_bonus > 0,
                compute_values=compute_values,
                use_cache=False,
            )
        return output

    # -- training ----------------------------------------------------------------------------------------------------

    def run_training(self) -> dict[str, float]:  # type: ignore[override]
        """RLinf's update epochs; the returned metrics (tagged ``train/``) gain those of the correction."""
        if not self.correction.recompute:
            return super().run_training()
        self._first_update, self._micro_batches_seen = FirstUpdate(), 0
        try:
            with self._kept_prefixes.training():
                metrics = super().run_training()
        finally:
            self._observations = iter(())
        # What no sample contributed to (a denoise step that was never drawn, say) is NaN on every rank: there is nothing to plot.
        own = (
            self._correction_metrics
            | self._kept_prefixes.metrics
            | first_update_metrics(self._first_update, self.device)
        )
        metrics.update({name: value for name, value in own.items() if not math.isnan(value)})
        self._first_update = None
        return metrics

    def train_micro_batch(self, micro_batch: dict[str, Any], metrics: dict[str, list[float]], *, is_last: bool) -> None:
        """RLinf's step on one micro-batch, with what the corrected loss needs in place."""
        mark("micro-batch of training")
        if not self.correction.recompute:
            return super().train_micro_batch(micro_batch, metrics, is_last=is_last)
        weights = None
        if self.correction.weights_advantage:
            p, q = micro_batch["prev_logprobs"], micro_batch["rollout_logprobs"]
            weights = advantage_weights(p, q, self.correction, normalizer=self._weight_normalizer).to(self.device)
        inputs = micro_batch["forward_inputs"]
        if self.prefix != "dense":
            inputs = self._with_known_prefix(inputs)
        micro_batch = micro_batch | {"forward_inputs": inputs | upload(next(self._observations), self.device)}
        self._kept_prefixes.budget.watch()
        before_first_step = self._micro_batches_seen < self.gradient_accumulation
        self._micro_batches_seen += 1
        with correcting(MicroBatchCorrection(weights, self._first_update if before_first_step else None)):
            super().train_micro_batch(micro_batch, metrics, is_last=is_last)

    def _with_known_prefix(self, forward_inputs: dict[str, Any]) -> dict[str, Any]:
        """Add what the rescoring of this very micro-batch left."""
        keys = self._kept_prefixes.get(self._micro_batches_seen)
        if keys is not None:
            return forward_inputs | {KEYS_KEY: keys}
        return forward_inputs | {LAYOUT_KEY: _layout(forward_inputs)}


def lora_scale(model: torch.nn.Module) -> float | None:
    """The factor of all LoRA adapters of a model, None where it has none.

    Raises:
        ValueError: adapters with different factors.
    """
    adapted: Iterator[Any] = (module for module in model.modules() if hasattr(module, "lora_A"))
    scales = {float(module.scaling["default"]) for module in adapted}
    if len(scales) > 1:
        raise ValueError(f"the model's LoRA adapters have different scales {sorted(scales)}; one for all is supported.")
    return scales.pop() if scales else None


def whole_on_every_rank(fsdp_config: DictConfig) -> bool:
    """A forward needs no other rank: FSDP1 without sharding. (FSDP2 always divides the parameters.)"""
    return bool(fsdp_config.strategy == "fsdp" and fsdp_config.get("sharding_strategy", "no_shard") == "no_shard")


def _layout(forward_inputs: dict[str, Any]) -> PromptLayout:
    return PromptLayout.of(forward_inputs["tokenized_prompt"], forward_inputs["tokenized_prompt_mask"])


def corrected_config(cfg: DictConfig, correction: CorrectionConfig) -> DictConfig:
    """``cfg`` itself without rescoring; otherwise a copy whose ``algorithm.loss_type`` names the corrected twin.

    Raises:
        ValueError: the loss has no corrected twin.
    """
    if not correction.recompute:
        return cfg
    loss_type = cfg.algorithm.loss_type
    if loss_type not in CORRECTED_LOSSES:
        raise ValueError(
            f"algorithm.loss_type is {loss_type!r}; algorithm.recompute_logprobs works with "
            f"{', '.join(CORRECTED_LOSSES)}. Choose one of these or turn the correction off."
        )
    register_corrected_losses()
    cfg = copy.deepcopy(cfg)
    with open_dict(cfg):
        cfg.algorithm.loss_type = LOSS_PREFIX + loss_type
    return cfg
