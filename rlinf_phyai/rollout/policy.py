# SPDX-License-Identifier: Apache-2.0
"""The policy that RLinf's rollout worker calls: observation -> engine request -> actions and replay tensors.

The result's contract is RLinf's: the actor replays a sample from ``forward_inputs`` (raw observation, prompt tokens,
denoising chain, step choice) and must find the reported log-probability again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rlinf_phyai.checksum import Checksum, checksums, common_dtype
from rlinf_phyai.engine import Engine
from rlinf_phyai.models.pi05 import PI05Request, PI05RolloutOutput, PI05RolloutRequest
from rlinf_phyai.rollout.observation import ModelInputs, Transforms
from rlinf_phyai.rollout.sampling import FlowSampler, Mode, SamplingPlan
from rlinf_phyai.rollout.weight_sync import EngineWeights, WeightSession

_LOG_2PI = 1.8378770664093453


@dataclass(frozen=True)
class PolicyOptions:
    """What the policy computes beside the actions.

    Attributes:
        action_chunk, action_env_dim: steps (c) and dimensions (d) whose log-probabilities are reported.
        joint_logprob: report the mean over the initial noise and all transitions instead of the stochastic one.
        critic: ``"vlm"`` (value from the prefix), ``"expert"`` (mean over the denoise steps) or None (no critic).
        value_source: ``"rollout"``: a value with every sample. ``"actor"``: the actor's rescoring supplies those of
            ordinary steps; only bootstrap values are computed here (critic ``"vlm"`` only).
        logprob_offset: added to every reported log-probability; a debugging aid that shows the correction at work.
    """

    action_chunk: int
    action_env_dim: int
    joint_logprob: bool = False
    critic: Literal["vlm", "expert"] | None = None
    value_source: str = "rollout"
    logprob_offset: float = 0.0

    def __post_init__(self) -> None:
        if self.value_source not in ("rollout", "actor"):
            raise ValueError(
                f"rollout.phyai.value_source is {self.value_source!r}; allowed: 'auto', 'rollout', 'actor'"
            )
        if self.value_source == "actor" and self.critic != "vlm":
            raise ValueError(
                "rollout.phyai.value_source: actor needs the critic after the VLM (actor.model.openpi.value_after_vlm:"
                f" True), found critic {self.critic!r}; use value_source: rollout"
            )


class PhyaiPolicy:
    """Stands where RLinf expects the rollout's model; it is no ``nn.Module``.

    Args:
        engine: loaded engine; batches above its ``max_batch_size`` are split.
        transforms: of the data config, see :func:`rlinf_phyai.rollout.observation.make_transforms`.
        sampler: draws noise and step choice.
        options: see :class:`PolicyOptions`.
        rename: maps RLinf's environment observation to openpi's names (RLinf's own ``obs_processor``).
    """

    def __init__(
        self,
        engine: Engine,
        transforms: Transforms,
        sampler: FlowSampler,
        options: PolicyOptions,
        rename: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> None:
        self.engine = engine
        self.transforms = transforms
        self.sampler = sampler
        self.options = options
        self._rename = rename
        self._weights = EngineWeights(engine)
        if options.critic is not None:
            self.value_head = options.critic  # RLinf asks for bootstrap values where this attribute exists

    # -- what RLinf calls on its model ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Named views of the engine's live weights."""
        return self._weights.state_dict()

    def load_state_dict(self, bucket: dict[str, Tensor], strict: bool = False) -> None:
        """One bucket of a weight sync; see :class:`EngineWeights`."""
        self._weights.load_state_dict(bucket, strict=strict)

    def weight_session(self) -> AbstractContextManager[WeightSession]:
        """The session that must span a whole weight sync."""
        return self._weights.session()

    def parameter_checksums(self, transport: torch.dtype | None = None) -> dict[str, Checksum]:
        """One checksum per parameter that the engine stores.

        Args:
            transport: type in which a weight sync sends parameters, where it is not their own.
        """
        stored = {name: tensor for name, tensor in self.state_dict().items() if not tensor.is_meta}
        return checksums(stored.items(), {name: common_dtype(t.dtype, transport) for name, t in stored.items()})

    def set_global_step(self, step: int) -> None:
        """Starts the random numbers of a training step."""
        self.sampler.set_global_step(step)

    def predict_action_batch(
        self, env_obs: dict[str, Any], mode: Mode = "train", **_: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        """Samples (``train``) or computes (``eval``) the actions of a batch.

        Args:
            env_obs: RLinf's observation: ``main_images``, ``wrist_images`` uint8 ``[B, h, w, 3]``,
                ``extra_view_images`` or None, ``states`` float32 ``[B, n]``, ``task_descriptions`` list of B strings.
            mode: ``eval`` makes every step deterministic, reports log-probabilities 0 and no value.

        Returns:
            Actions float64 ``[B, c, d]`` and a dict with ``prev_logprobs`` float32 ``[B, c, d]``, ``prev_values``
            float32 ``[B, 1]`` (NaN where not computed, 0 without a critic) and ``forward_inputs``; all on the CPU.

        Raises:
            ValueError: an observation that does not fit the data config.
            PhyaiError: the engine refused the request.
        """
        observation = self._rename(env_obs)
        batch = _batch_size(env_obs)
        plan = self.sampler.plan(batch, mode)
        compute_value = mode == "train" and self.options.critic is not None and self.options.value_source == "rollout"
        parts = [self._sample(observation, plan, rows, compute_value) for rows in self._chunks(batch)]
        # While a GPU works on what was queued above, copy what the environment may overwrite before the replay is sent.
        replay = {name: _copy(value) for name, value in observation.items() if isinstance(value, Tensor)}
        host = _to_host({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
        actions = host["actions"]
        forward_inputs = {
            "chains": host["chains"],
            "denoise_inds": plan.denoise_inds,
            "tokenized_prompt": host["tokenized_prompt"],
            "tokenized_prompt_mask": host["tokenized_prompt_mask"],
            "action": actions.flatten(1).contiguous(),
            "model_action": host["model_actions"].flatten(1).contiguous(),
            **replay,
        }
        result = {
            "prev_logprobs": host["log_probs"],
            "prev_values": host["values"] if compute_value else self._no_values(batch),
            "forward_inputs": forward_inputs,
        }
        return actions, result

    def predict_values(self, env_obs: dict[str, Any]) -> Tensor:
        """The critic's values of a batch, without actions where the critic reads the prefix only.

        Returns:
            float32 ``[B, 1]`` on the CPU; 0 without a critic, as RLinf's model reports.
        """
        batch = _batch_size(env_obs)
        if self.options.critic is None:
            return torch.zeros(batch, 1)
        observation = self._rename(env_obs)
        if self.options.critic == "vlm":
            values = [self.engine.value(self._value_request(observation, rows)) for rows in self._chunks(batch)]
            return torch.cat(values).cpu()
        plan = self.sampler.plan(batch, "train")
        parts = [self._sample(observation, plan, rows, compute_value=True) for rows in self._chunks(batch)]
        return torch.cat([part["values"] for part in parts]).cpu()

    # -- parts ------------------------------------------------------------------------------------------------------

    def _chunks(self, batch: int) -> Iterator[slice]:
        size = self.engine.max_batch_size
        return (slice(start, min(start + size, batch)) for start in range(0, batch, size))

    def _inputs(self, observation: dict[str, Any], rows: slice) -> ModelInputs:
        return self.transforms.inputs(
            {name: None if part is None else part[rows] for name, part in observation.items()}
        )

    def _value_request(self, observation: dict[str, Any], rows: slice) -> PI05Request:
        inputs = self._inputs(observation, rows)
        return PI05Request(
            inputs.pixel_values,
            inputs.input_ids,
            inputs.lang_lens,
            image_masks=inputs.image_masks,
            state=self._state(inputs),
        )

    def _state(self, inputs: ModelInputs) -> Tensor | None:
        """What PI0 reads of the robot's state."""
        if self.engine.model_config.pi05:
            return None
        assert inputs.state is not None
        return inputs.state.float()

    def _sample(
        self, observation: dict[str, Any], plan: SamplingPlan, rows: slice, compute_value: bool
    ) -> dict[str, Tensor]:
        """Queues one engine step; what it returns may still be being computed on the device."""
        inputs = self._inputs(observation, rows)
        request = PI05RolloutRequest(
            inputs.pixel_values,
            inputs.input_ids,
            inputs.lang_lens,
            noise=plan.noise[rows],
            image_masks=inputs.image_masks,
            sigmas=None if plan.sigmas is None else plan.sigmas[rows],
            step_noise=plan.step_noise[rows],
            compute_value=compute_value,
            stochastic_steps=None if plan.stochastic_steps is None else plan.stochastic_steps[rows],
            state=self._state(inputs),
        )
        output = self.engine.rollout_step(request)
        part = {
            "actions": self.transforms.actions(output.actions, inputs),
            "model_actions": output.actions,
            "chains": output.chains,
            "log_probs": self._log_probs(output, plan.denoise_inds[rows]),
            "tokenized_prompt": inputs.input_ids,
            "tokenized_prompt_mask": inputs.prompt_mask,
        }
        if compute_value:
            assert output.values is not None
            part["values"] = output.values.mean(dim=-1, keepdim=True)
        return part

    def _log_probs(self, output: PI05RolloutOutput, denoise_inds: Tensor) -> Tensor:
        """float32 ``[B, c, d]``: the stochastic transition, or with ``joint_logprob`` the mean over all terms."""
        options = self.options
        kept = output.log_probs[:, :, : options.action_chunk, : options.action_env_dim]
        if options.joint_logprob:
            start = output.chains[:, 0, : options.action_chunk, : options.action_env_dim]
            initial = -0.5 * _LOG_2PI - 0.5 * start.square()
            kept = torch.cat([initial[:, None], kept], dim=1).mean(dim=1)
        else:
            kept = kept[:, int(denoise_inds[0, 0])]  # one step for the whole batch; -1 (evaluation) is a step of zeros
        return kept + options.logprob_offset

    def _no_values(self, batch: int) -> Tensor:
        return torch.full((batch, 1), 0.0 if self.options.critic is None else float("nan"))


def _copy(tensor: Tensor) -> Tensor:
    """A copy by this thread alone: torch's copy waits for a team of threads, which on a node full of simulators takes milliseconds."""
    return torch.from_numpy(tensor.numpy().copy()) if tensor.device.type == "cpu" else tensor.clone()


def _batch_size(env_obs: dict[str, Any]) -> int:
    sizes = {
        name: len(value)
        for name, value in env_obs.items()
        if name in ("main_images", "wrist_images", "extra_view_images", "states", "task_descriptions")
        and value is not None
    }
    if "main_images" not in sizes or len(set(sizes.values())) != 1:
        raise ValueError(f"an observation batch needs main_images and equal lengths of all its parts; found {sizes}")
    return sizes["main_images"]


def _to_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """CPU copies with a single wait: the copies of CUDA tensors are queued together into pinned memory."""
    host: dict[str, Tensor] = {}
    waits: set[torch.device] = set()
    for name, tensor in tensors.items():
        if tensor.device.type != "cuda":
            host[name] = tensor.detach().cpu().contiguous()
            continue
        target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host[name] = target.copy_(tensor, non_blocking=True)
        waits.add(tensor.device)
    for device in waits:
        torch.cuda.current_stream(device).synchronize()
    return host
