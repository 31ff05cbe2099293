# SPDX-License-Identifier: Apache-2.0
"""How far the engine's scores are from the actor's on one GPU: full size, bf16, random weights, random observations.

    python -m benchmarks.parity --batches 1,8,32

The yardstick is the actor's own rollout mode: its ``sample_actions`` scored by its own training-mode forward.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.common import RESULTS, random_actor, save_actor, write_json
from benchmarks.engine import add_engine_options, build_engine, chosen_policy
from benchmarks.inputs import Observations, make_observations
from rlinf_phyai.engine import Engine

CHUNK, ENV_DIM = 5, 7


def actor_score(
    actor: Any, observations: Observations, chains: Tensor, step: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The actor's training-mode mean and std [B, H, D], log-prob [B, H, D] of transition ``step`` and value [B]."""
    actor.train()
    batch = chains.shape[0]
    images, masks, tokens, token_masks, state = actor._preprocess_observation(observations.openpi(), train=False)
    with torch.no_grad():
        output, pad_masks, cache = actor._build_prefix_cache(images, masks, tokens, token_masks)
        index = torch.full((batch,), step, device=chains.device)
        mean, std, _, _ = actor.sample_mean_var_val(
            chains[:, step], index, state, pad_masks, cache, "flow_sde", actor.config.num_steps, False
        )
        log_prob = actor.get_logprob_norm(chains[:, step + 1], mean, std)
        value = actor.get_value_from_vlm(output)
    return mean, std, log_prob, value


@contextlib.contextmanager
def fixed_noise(actor: Any, observations: Observations, step: int) -> Iterator[None]:
    """The actor draws the given step noises and the given stochastic step."""
    from rlinf.models.embodiment.openpi import openpi_action_model

    position = iter(range(observations.step_noise.shape[1]))

    def next_noise(shape: Any, device: Any) -> Tensor:
        return observations.step_noise[:, next(position)]

    draw = mock.Mock(randint=mock.Mock(return_value=step))
    noise = mock.patch.object(actor, "sample_noise", next_noise)
    with noise, mock.patch.object(openpi_action_model, "random", draw):
        yield


def gaps(chains: Tensor, q: Tensor, p: Tensor, mean: Tensor, std: Tensor, noise: Tensor, step: int) -> dict[str, Any]:
    """Figures over the elements that training sees ([:, :5, :7])."""
    crop = (slice(None), slice(0, CHUNK), slice(0, ENV_DIM))
    gap = (p - q)[crop]
    own_mean = chains[:, step + 1] - std * noise
    shift = ((mean - own_mean) / std)[crop]
    chunk = gap.sum(dim=(1, 2))
    return {
        "abs_gap_mean": gap.abs().mean().item(),
        "abs_gap_max": gap.abs().max().item(),
        "chunk_weight_mean": chunk.exp().mean().item(),
        "chunk_abs_gap_mean": chunk.abs().mean().item(),
        "effective_sample_size": (chunk.exp().sum().square() / (2 * chunk).exp().sum() / chunk.numel()).item(),
        "kl_per_chunk": (0.5 * shift.square()).sum(dim=(1, 2)).mean().item(),
        "shift_per_dim": shift.abs().mean(dim=(0, 1)).tolist(),
    }


def measure(engine: Engine, actor: Any, batch: int, step: int) -> dict[str, Any]:
    observations = make_observations(batch, sde_step=step)
    out = engine.rollout_step(observations.request(compute_value=True))
    assert out.values is not None
    mean, std, p, value = actor_score(actor, observations, out.chains, step)
    noise = observations.step_noise[:, step]
    own = gaps(out.chains, out.log_probs[:, step], p, mean, std, noise, step)
    own["value_gap_max"] = (out.values[:, 0] - value).abs().max().item()

    actor.eval()
    with fixed_noise(actor, observations, step):
        sampled = actor.sample_actions(observations.openpi(), noise=observations.noise, mode="train")
    mean, std, p, value = actor_score(actor, observations, sampled["chains"], step)
    chains = sampled["chains"]
    rollout_mean = chains[:, step + 1] - std * noise
    q = actor.get_logprob_norm(chains[:, step + 1], rollout_mean, std)
    q[:, :CHUNK, :ENV_DIM] = sampled["prev_logprobs"]
    yardstick = gaps(chains, q, p, mean, std, noise, step)
    yardstick["value_gap_max"] = (sampled["prev_values"][:, 0] - value).abs().max().item()
    action_gap = (out.actions - sampled["actions"]).abs().max().item()
    return {"batch": batch, "step": step, "phyai": own, "actor_rollout": yardstick, "action_gap_max": action_gap}


def digest(engine: Engine, batch: int) -> str:
    """Hash of every output bit of one fixed request."""
    out = engine.rollout_step(make_observations(batch).request(compute_value=True))
    parts = [t.cpu().numpy().tobytes() for t in (out.actions, out.chains, out.log_probs, out.values) if t is not None]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def batch_dependence(engine: Engine, batch: int) -> dict[str, float]:
    """The same observation alone and inside a batch."""
    big = make_observations(batch)
    one = Observations(*(t[:1] for t in vars(big).values()))
    a, b = engine.rollout_step(one.request()), engine.rollout_step(big.request())
    return {
        "actions_max": (a.actions - b.actions[:1]).abs().max().item(),
        "log_prob_abs_mean": (a.log_probs - b.log_probs[:1])[:, 0].abs().mean().item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--steps", default="0,2", help="stochastic steps to measure")
    add_engine_options(parser)
    parser.add_argument("--output", type=Path, default=RESULTS / "parity.json")
    args = parser.parse_args()
    batches = [int(b) for b in args.batches.split(",")]
    actor = random_actor()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as scratch:
        save_actor(actor, Path(scratch))
        policy = chosen_policy(args, Path(scratch))
        engine, eager = (
            build_engine(Path(scratch), max(batches), policy, graphs, args.prefix_precision) for graphs in (True, False)
        )
        rows = [measure(engine, actor, batch, int(step)) for batch in batches for step in args.steps.split(",")]
        checks = {f"graph_equals_eager_B{b}": digest(engine, b) == digest(eager, b) for b in batches}
        checks["digest"] = digest(engine, batches[-1])  # compare over two processes
        checks["alone_vs_batch"] = batch_dependence(engine, max(batches))
    engine_options = {"policy": engine.kernel_policy.name, "prefix_precision": args.prefix_precision}
    write_json(args.output, {**engine_options, "rows": rows, "checks": checks})
    table = Table(title="rollout score q against the actor's training-mode score p")
    for column in (
        "B",
        "step",
        "who",
        "|p-q| mean",
        "max",
        "KL/chunk",
        "w mean",
        "ESS",
        "value gap",
        "|dmu|/sigma per dim",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        for who in ("phyai", "actor_rollout"):
            f = row[who]
            table.add_row(
                str(row["batch"]), str(row["step"]), who, f"{f['abs_gap_mean']:.4f}", f"{f['abs_gap_max']:.3f}",
                f"{f['kl_per_chunk']:.2e}", f"{f['chunk_weight_mean']:.3f}", f"{f['effective_sample_size']:.4f}",
                f"{f['value_gap_max']:.4f}",
                " ".join(f"{x:.3f}" for x in f["shift_per_dim"]),
            )  # fmt: skip
    console = Console(width=150)
    console.print(table)
    console.print(checks)


if __name__ == "__main__":
    main()
