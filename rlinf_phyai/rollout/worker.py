# SPDX-License-Identifier: Apache-2.0
"""RLinf's rollout worker with the engine as its policy.

Channels, pipeline stages and the weight-sync protocol stay RLinf's. Overridden are: building the model,
the weight sync (one engine session around it), the predictions of which only the value is used, offloading, and when a progress
bar is worth a line.
"""

from __future__ import annotations

import functools
import os
from typing import Any, Literal

import torch
from rlinf.scheduler import Channel, Worker
from rlinf.workers.rollout.hf import huggingface_worker
from rlinf.workers.rollout.hf.huggingface_worker import MultiStepRolloutWorker
from tqdm import tqdm

from rlinf_phyai.checksum import Checksum
from rlinf_phyai.rollout.build import build_policy
from rlinf_phyai.rollout.policy import PhyaiPolicy
from rlinf_phyai.signs import SignsOfLife, mark

BAR_EVERY_S = 15.0
"""Seconds between two lines of RLinf's progress bar; tqdm's own variable ``TQDM_DELAY`` says when the first one comes."""


class PhyaiRolloutWorker(SignsOfLife, MultiStepRolloutWorker):
    """One worker, one engine, one device."""

    hf_model: PhyaiPolicy  # RLinf's name for whatever policy a worker holds
    version: int

    _samples_left: int | None = None
    """Predictions of this rollout epoch whose actions are executed; None outside of an epoch."""

    def init_worker(self) -> None:
        """Loads the engine.

        Raises:
            NotImplementedError: ``rollout.expert_model``.
            ValueError, PhyaiError: see :func:`rlinf_phyai.rollout.build.build_policy`.
        """
        # Ray prints every state of a bar on a line of its own: none for a short rollout, one every few seconds for a long one.
        delay = float(os.environ.get("TQDM_DELAY", BAR_EVERY_S))
        huggingface_worker.tqdm = functools.partial(tqdm, delay=delay, mininterval=BAR_EVERY_S, leave=False)
        if self.cfg.rollout.get("expert_model", None):
            raise NotImplementedError(
                "rollout.expert_model (DAgger) is not supported by rollout_backend phyai; use rollout_backend:"
                " huggingface"
            )
        self.hf_model = build_policy(
            self.cfg, self.model_cfg, self._engine_device(), self._rank, self._environments_per_stage()
        )
        self.setup_sample_params()
        if self.enable_offload:
            self.offload_model()

    def _engine_device(self) -> torch.device:
        return torch.device("cpu") if self.device == "cpu" else torch.device(self.torch_device_type, self.device)

    def _environments_per_stage(self) -> int:
        """Training environments of this worker in one pipeline stage; evaluation's where a run only evaluates."""
        return self.per_node_train_batch_size if self.enable_train else self.per_node_eval_batch_size

    # -- predictions ------------------------------------------------------------------------------------------------

    async def generate_one_epoch(self, input_channel: Channel, output_channel: Channel) -> None:
        """RLinf's epoch: T predictions per stage, then one more per stage, of which only the value is used."""
        self._samples_left = self.n_train_chunk_steps * self.num_pipeline_stages
        try:
            await super().generate_one_epoch(input_channel, output_channel)
        finally:
            self._samples_left = None

    def predict(
        self, env_obs: dict[str, Any], mode: Literal["train", "eval"] = "train"
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """RLinf's prediction, except that the epoch's last one asks for the value alone."""
        mark("predict", mode)
        if mode == "train" and self._samples_left is not None:
            if self._samples_left == 0:
                return self._predict_value(env_obs)
            self._samples_left -= 1
        return super().predict(env_obs, mode=mode)

    @Worker.timer("predict")
    def _predict_value(self, env_obs: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
        values = self.hf_model.predict_values(env_obs)
        options = self.hf_model.options
        # RLinf sends these actions but executes none of them; NaN would show if one were.
        shape = (values.shape[0], options.action_chunk, options.action_env_dim)
        actions = torch.full(shape, float("nan"), dtype=torch.float64)
        return actions, {"prev_values": values, "expert_label_flag": False}

    def get_bootstrap_values(self, final_obs: dict[str, Any] | None) -> torch.Tensor | None:
        """Values of the states in which episodes ended: float32 ``[B, 1]``, or None as RLinf defines it."""
        if final_obs is None or not hasattr(self.hf_model, "value_head"):
            return None
        mark("values of final observations")
        return self.hf_model.predict_values(final_obs)

    # -- weights ----------------------------------------------------------------------------------------------------

    async def sync_model_from_actor(self) -> None:
        """RLinf's sync inside one engine session: all of the new weights or none, and the version moves at the end.

        Raises:
            WeightUpdateError: the sync did not fit the model; the engine then says how to recover.
        """
        before = self.version
        try:
            with self.hf_model.weight_session() as session:
                await super().sync_model_from_actor()
                session.version = self.version
        except BaseException:
            self.version = before
            raise

    def parameter_checksums(self) -> dict[str, Checksum]:
        """One checksum per parameter, for the comparison with the actor after the first sync."""
        return self.hf_model.parameter_checksums(getattr(self.weight_syncer, "bucket_dtype", None))

    @Worker.timer("offload")
    def offload_model(self) -> None:
        """Frees the device for the actor; RLinf calls it after every rollout with ``rollout.enable_offload``."""
        self.hf_model.engine.offload()

    @Worker.timer("reload")
    def reload_model(self) -> None:
        """Takes the memory back before a rollout. A weight sync did so already (see :class:`EngineWeights`)."""
        self.hf_model.engine.reload()
