# SPDX-License-Identifier: Apache-2.0
"""Runs one case through the reference and the engine and measures how far apart they are."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from rlinf_phyai.engine import Engine
from rlinf_phyai.models.pi05 import PI05RolloutOutput, PI05RolloutRequest

from .reference import HORIZON, PROMPT_TOKENS, Batch, Reference, ReferenceOutput, flow_sde_sigmas, make_batch

JOINT, EVAL = "joint", "eval"


@dataclasses.dataclass(frozen=True)
class Case:
    """One point of the grid: prompt lengths (one per sample), denoise steps, and which steps are stochastic.

    ``step`` is the SDE step of the non-joint mode, ``"joint"`` or ``"eval"``. ``chunk`` and ``env_dim`` are the crop.
    """

    lengths: tuple[int, ...]
    num_steps: int
    step: int | str
    noise_level: float = 0.5
    ignore_last: bool = False
    chunk: int = HORIZON
    env_dim: int = 32
    seed: int = 0
    noise_method: str = "flow_sde"

    def __str__(self) -> str:
        last = "-ignore_last" if self.ignore_last else ""
        last += "" if self.noise_method == "flow_sde" else f"-{self.noise_method}"
        return f"B{len(self.lengths)}-L{'.'.join(map(str, self.lengths))}-N{self.num_steps}-{self.step}{last}"

    @property
    def tolerance(self) -> float:
        return 5e-5 if self.num_steps >= 10 else 1e-5

    @property
    def sde_steps(self) -> list[int]:
        if self.step == JOINT:
            return list(range(self.num_steps))
        return [] if self.step == EVAL else [int(self.step)]

    def batch(self, vocab: int, cameras_used: int = 2, prompt_tokens: int = PROMPT_TOKENS) -> Batch:
        return make_batch(list(self.lengths), self.num_steps, 1000 + self.seed, vocab, cameras_used, prompt_tokens)

    def sigmas(self) -> Tensor | None:
        if self.noise_method == "flow_noise":
            return None
        if self.noise_method == "flow_cps":
            return self.stochastic_steps() * math.sin(math.pi / 2 * self.noise_level)
        return flow_sde_sigmas(self.num_steps, self.noise_level, self.sde_steps, len(self.lengths))

    def stochastic_steps(self) -> Tensor:
        """bool (B, N)."""
        return torch.tensor([[i in self.sde_steps for i in range(self.num_steps)]] * len(self.lengths))

    def denoise_inds(self) -> Tensor:
        """What RLinf stores beside a chain (not for evaluation): int64 (B, N)."""
        steps = range(self.num_steps) if self.step == JOINT else [int(self.step)] * self.num_steps
        return torch.tensor([list(steps)] * len(self.lengths))


def run_reference(reference: Reference, case: Case, batch: Batch, **options: object) -> ReferenceOutput:
    """RLinf's sampling of a case."""
    return reference.sample(
        batch,
        case.step if isinstance(case.step, int) else None,
        mode="eval" if case.step == EVAL else "train",
        noise_method=case.noise_method,
        noise_level=case.noise_level,
        ignore_last=case.ignore_last,
        joint_logprob=case.step == JOINT,
        action_chunk=case.chunk,
        action_env_dim=case.env_dim,
        **options,
    )


def engine_request(case: Case, batch: Batch, **changes: object) -> PI05RolloutRequest:
    """The same inputs as an engine request: used cameras only, no mask."""
    fields: dict[str, object] = {
        "pixel_values": batch.pixels[:, : sum(batch.camera_mask)],
        "input_ids": batch.input_ids,
        "lang_lens": batch.lang_lens,
        "noise": batch.noise,
        "sigmas": case.sigmas(),
        "step_noise": batch.step_noise,
        "stochastic_steps": case.stochastic_steps() if case.noise_method == "flow_noise" else None,
    }
    return PI05RolloutRequest(**(fields | changes))  # type: ignore[arg-type]


def run_engine(engine: Engine, case: Case, batch: Batch, **changes: object) -> PI05RolloutOutput:
    return engine.rollout_step(engine_request(case, batch, **changes))


def reported_log_probs(case: Case, batch: Batch, output: PI05RolloutOutput) -> Tensor:
    """The log-probs [B, c, d] that a controller reports from the engine's per-transition ones."""
    cropped = output.log_probs[:, :, : case.chunk, : case.env_dim]
    if case.step == JOINT:
        initial = -0.5 * batch.noise.square() - 0.5 * math.log(2 * math.pi)
        return torch.cat((initial[:, None, : case.chunk, : case.env_dim], cropped), dim=1).mean(dim=1)
    # RLinf reports the last transition of an evaluation (its index is -1); all of them are 0 there.
    return cropped[:, case.step if isinstance(case.step, int) else -1]


def deviations(case: Case, batch: Batch, expected: ReferenceOutput, output: PI05RolloutOutput) -> dict[str, float]:
    """Largest absolute difference per quantity; values after the expert are averaged over the steps, as RLinf does."""
    assert output.values is not None

    def largest(a: Tensor, b: Tensor) -> float:
        assert a.shape == b.shape, f"{tuple(a.shape)} and {tuple(b.shape)}"
        assert torch.isfinite(a).all()
        assert torch.isfinite(b).all()
        return float((a - b).abs().max())

    return {
        "actions": largest(output.actions, expected.actions),
        "chains": largest(output.chains, expected.chains),
        "log_probs": largest(reported_log_probs(case, batch, output), expected.log_probs),
        "values": largest(output.values.mean(dim=1, keepdim=True), expected.values),
    }


def rescored(reference: Reference, case: Case, batch: Batch, output: PI05RolloutOutput) -> tuple[Tensor, Tensor]:
    """The actor's log-probs [B, c, d] of the engine's chain, and its entropy [B, 1 or N + 1, H, D]."""
    log_probs, _, entropy = reference.rescore_with_entropy(
        batch,
        output.chains,
        case.denoise_inds(),
        noise_method=case.noise_method,
        noise_level=case.noise_level,
        joint_logprob=case.step == JOINT,
    )
    return log_probs[:, :, : case.chunk, : case.env_dim].mean(dim=1), entropy


def measured(
    reference: Reference, engine: Engine, case: Case, batch: Batch | None = None, **changes: object
) -> dict[str, float]:
    """:func:`deviations` of one rollout, and of the actor's rescoring of the engine's own chain; ``changes`` to the request."""
    batch = batch or case.batch(reference.sizes.vocab)
    output = run_engine(engine, case, batch, **changes)
    found = deviations(case, batch, run_reference(reference, case, batch), output)
    if case.step != EVAL:
        again, _ = rescored(reference, case, batch, output)
        found["rescored"] = float((again - reported_log_probs(case, batch, output)).abs().max())
    return found


def assert_rescored(found: dict[str, float], case: Case) -> None:
    """A rescored log-prob moves by |z| times the means' distance over the deviation, which starts at 0.08 in flow-noise: a
    fifth of flow-SDE's."""
    for name, value in found.items():
        assert value <= case.tolerance * (5 if name == "rescored" else 1), (name, found)
