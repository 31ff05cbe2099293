# SPDX-License-Identifier: Apache-2.0
"""Score the same observations with engine and actor, take one update that learns nothing, and judge the figures."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig, open_dict
from rlinf.utils.utils import materialize_tensor

from rlinf_phyai.actor.limits import Limits, Verdict, judge
from rlinf_phyai.check.diagnosis import likely_cause

Observe = Callable[[torch.Tensor | None], dict[str, Any]]
"""The next observation batch, given the actions ``[B, c, d]`` just taken (``None`` at first)."""


@dataclass
class Result:
    """Outcome of a check.

    Attributes:
        verdicts: in the order of the table.
        metrics: everything that the actor reported.
        p, q: float32 log-probs ``[T, B, c, d]`` of actor and engine.
    """

    verdicts: list[Verdict]
    metrics: dict[str, float]
    p: torch.Tensor
    q: torch.Tensor

    @property
    def cause(self) -> str | None:
        """What probably went wrong, if that can be told."""
        return likely_cause({verdict.name: verdict for verdict in self.verdicts}, self.p, self.q)

    @property
    def passed(self) -> bool:
        """Every verdict is within its limit."""
        return all(verdict.ok for verdict in self.verdicts)


def check_config(cfg: DictConfig, samples: int) -> DictConfig:
    """A copy of a training config for one update of ``samples`` observations on one rank with learning rate 0."""
    cfg = copy.deepcopy(cfg)
    with open_dict(cfg):
        cfg.algorithm.recompute_logprobs = True
        cfg.algorithm.importance_sampling_fix = True
        if not cfg.algorithm.get("importance_sampling_clip"):
            cfg.algorithm.importance_sampling_clip = 1.0
        cfg.algorithm.update_epoch = 1
        cfg.algorithm.filter_rewards = False
        cfg.env.train.rollout_epoch = 1
        cfg.actor.optim.lr = cfg.actor.optim.value_lr = 0.0
        cfg.actor.micro_batch_size = math.gcd(int(cfg.actor.micro_batch_size), samples)
        cfg.actor.global_batch_size = samples
        cfg.actor.enable_offload = False
        cfg.rollout.phyai.value_source = "rollout"
        cfg.rollout.phyai.self_check = "off"
        cfg.rollout.phyai.progress = False
        if not torch.cuda.is_available():
            cfg.actor.fsdp_config.strategy = "fsdp2"
    return cfg


def send_weights(actor: Any, policy: Any) -> None:
    """What a weight sync does: the actor's trainable parameters into the engine. (Value heads start random.)"""
    state = actor.get_rollout_state_dict()
    names = set(actor.param_names_need_sync)
    bucket = {name: materialize_tensor(tensor) for name, tensor in state.items() if name in names}
    with policy.weight_session():
        policy.load_state_dict(bucket)


def compare(actor: Any, policy: Any, observe: Observe, steps: int, limits: Limits) -> Result:
    """Run the check on a built actor and policy whose weights should be the same.

    Args:
        actor: from :func:`rlinf_phyai.actor.in_process.in_process_actor`, built with :func:`check_config`.
        policy: from :func:`rlinf_phyai.rollout.build.build_policy`.
        observe: see :data:`Observe`.
        steps: chunk steps T.
        limits: of the judged figures.
    """
    verdicts = [_weights(actor, policy)]
    first = observe(None)
    verdicts.append(_inputs(actor, policy, first))
    batch = _collect(policy, observe, first, steps)
    q = batch["prev_logprobs"].clone()
    before = {name: materialize_tensor(p).clone() for name, p in actor.model.named_parameters()}
    actor.rollout_batch = actor._process_received_rollout_batch(batch)
    actor.compute_advantages_and_returns()
    p = actor.rollout_batch["prev_logprobs"]
    metrics = actor.run_training()
    verdicts += judge(actor.correction_metrics, limits)
    for name, meaning in _EXACT.items():
        value = metrics.get(name, math.nan)
        verdicts.append(Verdict(name, value, "exactly 0", value == 0.0, meaning))
    moved = [name for name, p in actor.model.named_parameters() if not torch.equal(materialize_tensor(p), before[name])]
    verdicts.append(
        Verdict(
            "parameters that an update with learning rate 0 moved",
            len(moved),
            "exactly 0",
            not moved,
            f"for example {', '.join(moved[:3])}: something else than the learning rate changes weights",
        )
    )
    return Result(verdicts, metrics, p, q)


_EXACT = {
    "actor/first_update/ratio_max_dev": "rescoring and training do not compute the same: something is not deterministic",
    "actor/first_update/clip_fraction": "PPO clips before anything was learnt",
    "actor/approx_kl": "the update's policy differs from the rescored one though nothing was learnt",
}


def _weights(actor: Any, policy: Any) -> Verdict:
    """Bit-for-bit comparison of every parameter that the engine stores."""
    stored = policy.parameter_checksums()
    wanted = actor.parameter_checksums({name: found.dtype for name, found in stored.items()})
    different = [name for name, found in stored.items() if name in wanted and wanted[name] != found]
    return Verdict(
        "parameters that differ",
        len(different),
        "exactly 0",
        not different,
        f"the engine's weights are stale or from another checkpoint: {', '.join(different[:3])}",
    )


def _inputs(actor: Any, policy: Any, observation: dict[str, Any]) -> Verdict:
    """Pixels and prompt tokens, from both sides' own transforms."""
    from openpi.models.model import Observation

    model = actor.model
    renamed = model.obs_processor(dict(observation))
    seen = Observation.from_dict(model.input_transform(renamed, transpose=False))
    images, masks, tokens, prompt, _ = model._preprocess_observation(seen, train=False)
    used = [image.cpu() for image, mask in zip(images, masks, strict=True) if bool(mask.all())]
    theirs = torch.stack([i if i.shape[1] == 3 else i.permute(0, 3, 1, 2) for i in used], dim=1)
    inputs = policy.transforms.inputs(policy._rename(observation))
    ours = inputs.pixel_values.float().cpu()[:, : theirs.shape[1]]
    wrong = int((ours != theirs).any(dim=2).sum())
    name, meaning = "input pixels that differ", "the observation reaches the two models differently"
    if wrong and torch.equal(ours.flip(1), theirs):
        meaning = "the cameras are swapped"
    elif not wrong:
        ids = torch.where(inputs.prompt_mask.cpu(), inputs.input_ids.cpu(), 0)
        wrong = int((ids != torch.where(prompt.cpu(), tokens.cpu(), 0)).sum())
        name, meaning = ("input pixels and prompt tokens that differ", "the prompts are tokenised differently")
    return Verdict(name, wrong, "exactly 0", not wrong, meaning)


def _collect(policy: Any, observe: Observe, first: dict[str, Any], steps: int) -> dict[str, Any]:
    """A rollout batch as the actor receives it: ``T`` chunk steps of the policy's own actions."""
    results, values, observation = [], [], first
    for _ in range(steps):
        actions, result = policy.predict_action_batch(observation, mode="train")
        results.append(result)
        values.append(result["prev_values"])
        observation = observe(actions)
    values.append(policy.predict_values(observation))
    batch, chunk = results[0]["prev_logprobs"].shape[:2]
    dones = torch.zeros(steps + 1, batch, chunk, dtype=torch.bool)
    rewards = torch.rand(steps, batch, chunk, generator=torch.Generator().manual_seed(0))
    return {
        "prev_logprobs": torch.stack([result["prev_logprobs"] for result in results]),
        "prev_values": torch.stack(values),
        "rewards": rewards,
        "dones": dones,
        "terminations": dones.clone(),
        "truncations": dones.clone(),
        "forward_inputs": {
            name: torch.stack([result["forward_inputs"][name] for result in results])
            for name in results[0]["forward_inputs"]
        },
    }
