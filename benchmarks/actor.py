# SPDX-License-Identifier: Apache-2.0
"""Rescoring and training time of the actor, by stage, full size on one GPU.

    python -m benchmarks.actor --samples 512 --micro-batch 128
    python -m benchmarks.actor --samples 3072 --choices fused fused+auto --hold-gib 40

Compared are RLinf's dense prefix, the prefix on real tokens by the actor's own modules and by the engine's kernels (``fused``),
with kept prefixes (``+cache``: a fixed memory; ``+auto``: what is free, from the second step on; ``--hold-gib``: another process
takes a part of the GPU meanwhile), and without a critic (``+nocritic``, as in GRPO). Random weights and images; RLinf's own FSDP
wrapping, optimizer and losses. Each figure includes everything the worker does for a micro-batch: indexing, input transforms,
transfers, forward, and for training the loss, backward pass and optimizer. What lies outside all stages is ``host and transfers``.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from benchmarks.common import RESULTS, random_actor, write_json
from benchmarks.inputs import PROMPT_LENGTHS
from benchmarks.stages import actor_stages

CHOICES = ("dense", "real_tokens", "fused", "fused+cache", "fused+auto", "fused+nocritic")
CHUNKS = 8  # chunk steps T of the synthetic step
FSDP = Path(__file__).resolve().parents[1] / "examples/embodiment/config/training_backend/fsdp.yaml"

CONFIG = """  # the sections that the actor reads, with the options of the full-size example
runner: {task_type: embodied, ckpt_path: null}
algorithm:
  adv_type: gae
  loss_type: actor_critic
  reward_type: chunk_level
  logprob_type: chunk_level
  entropy_bonus: 0
  group_size: 1
  update_epoch: 1
  clip_ratio_high: 0.2
  clip_ratio_low: 0.2
  value_clip: 0.2
  huber_delta: 10.0
  gamma: 0.99
  gae_lambda: 0.95
  filter_rewards: false
  recompute_logprobs: true
  importance_sampling_fix: true
  importance_sampling_clip: 1.0
env: {train: {rollout_epoch: 1, max_episode_steps: 240, auto_reset: false, ignore_terminations: false}}
rollout: {phyai: {value_source: rollout, kernel_policy: null}}
actor:
  seed: 42
  enable_offload: false
  model:
    model_type: openpi
    is_lora: false
    precision: null
    action_dim: 7
    num_action_chunks: 5
    num_steps: 3
    openpi: {num_steps: 3, noise_level: 0.5, noise_method: flow_sde, value_after_vlm: true}
  optim:
    {lr: 5.0e-6, value_lr: 1.0e-4, adam_beta1: 0.9, adam_beta2: 0.95, adam_eps: 1.0e-5, weight_decay: 0.01, clip_grad: 1.0}
  fsdp_config: ???
"""


def config(choice: str, micro_batch: int, samples: int, cache_gib: float, kernel_policy: str | None) -> DictConfig:
    """The options above for one step of ``samples`` observations and one optimizer step."""
    cfg = OmegaConf.create(CONFIG)
    cfg.actor.fsdp_config = OmegaConf.load(FSDP)
    prefix, _, variant = choice.partition("+")
    cfg.rollout.phyai.actor_prefix, cfg.rollout.phyai.kernel_policy = prefix, kernel_policy
    kept: dict[str, float | str] = {"cache": cache_gib, "auto": "auto"}
    cfg.rollout.phyai.actor_prefix_cache_gib = kept.get(variant, 0.0)
    if variant == "nocritic":
        cfg.algorithm.merge_with({"adv_type": "grpo", "loss_type": "actor", "group_size": 2})
    cfg.actor.micro_batch_size, cfg.actor.global_batch_size = micro_batch, samples
    if not torch.cuda.is_available():
        cfg.actor.fsdp_config.strategy = "fsdp2"
    return cfg


def set_transforms(model: Any) -> None:
    """openpi's LIBERO transforms, less tokenizer and statistics: the prompt is replaced, PI0.5 ignores the state."""
    from openpi import transforms
    from openpi.models.model import ModelType
    from rlinf.models.embodiment.openpi.policies.libero_policy import LiberoInputs

    def drop_prompt(sample: dict[str, Any]) -> dict[str, Any]:
        sample.pop("prompt", None)
        return sample

    resize, pad = transforms.ResizeImages(224, 224), transforms.PadStatesAndActions(32)
    steps = [LiberoInputs(ModelType.PI05), drop_prompt, resize, pad]
    model.setup_wrappers(transforms=steps)


def make_batch(model: Any, samples: int, seed: int = 0) -> dict[str, Any]:
    """A step's trajectories as the actor receives them: random images, actions sampled by RLinf's own model."""
    from openpi.models.model import Observation

    from rlinf_phyai.actor.observations import ReplayTransform

    g = torch.Generator().manual_seed(seed)
    b = samples // CHUNKS
    lens = torch.tensor([PROMPT_LENGTHS[i % len(PROMPT_LENGTHS)] for i in range(b)])
    mask = torch.arange(200) < lens[:, None]
    device = next(model.parameters()).device
    steps = []
    for _ in range(CHUNKS):
        pictures = torch.randint(0, 256, (2, b, 16, 16, 3), generator=g, dtype=torch.uint8)
        pictures = pictures.repeat_interleave(16, 2).repeat_interleave(16, 3)
        inputs = {
            "tokenized_prompt": torch.where(mask, torch.randint(1, 1000, (b, 200), generator=g), 0),
            "tokenized_prompt_mask": mask,
            "observation/image": pictures[0].contiguous(),
            "observation/wrist_image": pictures[1].contiguous(),
            "observation/state": torch.zeros(b, 8),
        }
        on_device = ReplayTransform(32)({name: tensor.to(device) for name, tensor in inputs.items()})
        output = model.sample_actions(Observation.from_dict(on_device), mode="train")
        inputs |= {"chains": output["chains"].cpu(), "denoise_inds": output["denoise_inds"].cpu()}
        steps.append((inputs, output["prev_logprobs"].cpu(), output["prev_values"].cpu()))
    values = torch.stack([step[2] for step in steps])
    dones = torch.zeros(CHUNKS + 1, b, 5, dtype=torch.bool)
    return {
        "prev_logprobs": torch.stack([step[1] for step in steps]),
        "prev_values": torch.cat([values, values[-1:]]),
        "rewards": torch.rand(CHUNKS, b, 5, generator=g),
        "dones": dones,
        "terminations": dones.clone(),
        "truncations": dones.clone(),
        "forward_inputs": {name: torch.stack([step[0][name] for step in steps]) for name in steps[0][0]},
    }


def copy_batch(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch that the worker may change; the tensors are shared."""
    return {k: dict(v) if isinstance(v, dict) else v for k, v in batch.items()}


def seconds(function: Callable[[], Any]) -> tuple[float, Any]:
    """Wall time with the GPU's work finished, and the result."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    result = function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin, result


def measure(model: Any, batch: dict[str, Any], args: argparse.Namespace, choice: str) -> dict[str, Any]:
    """Times and memory of the last of ``args.rounds`` steps; metrics of the first, which has learnt nothing yet."""
    from rlinf_phyai.actor.in_process import in_process_actor

    cfg = config(choice, args.micro_batch, args.samples, args.cache_gib, args.kernel_policy)
    found: dict[str, Any] = {}
    if torch.cuda.is_available():
        found["gib_before"] = torch.cuda.memory_allocated() / 2**30  # the model; more is left from the choice before
    actor = in_process_actor(cfg, model_provider=lambda worker: model)
    deviations = []
    with actor_stages(actor, model) as stages:
        for _ in range(args.rounds):
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            actor.rollout_batch = actor._process_received_rollout_batch(copy_batch(batch))
            stages.take()
            for part, work in (("rescoring", actor.compute_advantages_and_returns), ("training", actor.run_training)):
                taken, result = seconds(work)
                if part == "rescoring":
                    found.setdefault("logprobs", actor.rollout_batch["prev_logprobs"])
                by_stage = stages.take()
                by_stage["host and transfers"] = taken * 1e3 - sum(by_stage.values())
                found[f"{part}_ms_per_observation"] = taken / args.samples * 1e3
                found[f"{part}_stages"] = {name: ms / args.samples for name, ms in by_stage.items()}
            found.setdefault("metrics", {k: v for k, v in result.items() if k.startswith("actor/")})
            deviations.append(result["actor/first_update/ratio_max_dev"])
            found["prefixes_kept"] = result.get("actor/prefixes_kept", 0.0)
    found["ratio_max_dev"] = max(deviations)  # of any step
    found["budget"] = str(actor._kept_prefixes.budget)
    if torch.cuda.is_available():
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        found["peak_reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    return found


@contextmanager
def held_by_another_process(gib: float) -> Iterator[None]:
    """Inside the block another process holds so much of the GPU's memory."""
    if not gib:
        yield
        return
    context = torch.multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(gib, ready, done), daemon=True)
    process.start()
    try:
        while not ready.wait(1):
            if not process.is_alive():
                raise RuntimeError(f"the process that should hold {gib:g} GiB ended with {process.exitcode}")
        yield
    finally:
        done.set()
        process.join(60)


def _hold(gib: float, ready: Any, done: Any) -> None:
    memory = torch.empty(int(gib * 2**30), dtype=torch.uint8, device="cuda")
    ready.set()
    done.wait()
    del memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=512, help="observations per step (a multiple of 16)")
    parser.add_argument("--micro-batch", type=int, default=128)
    parser.add_argument("--choices", nargs="+", choices=CHOICES, default=list(CHOICES))
    parser.add_argument("--cache-gib", type=float, default=64.0, help="memory for kept prefixes (+cache)")
    parser.add_argument("--kernel-policy", default="rlinf_bf16", help="of the fused prefix")
    parser.add_argument("--rounds", type=int, default=2, help="steps; the last one is reported")
    parser.add_argument("--hold-gib", type=float, default=0.0, help="GPU memory that another process holds meanwhile")
    parser.add_argument("--output", type=Path, default=RESULTS / "actor.json")
    args = parser.parse_args()

    from rlinf_phyai.actor.in_process import start_process_group

    start_process_group()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results: dict[str, Any] = {}
    scores = {}
    batch: dict[str, Any] | None = None
    for prefix in args.choices:
        model = random_actor(device=device)
        set_transforms(model)
        batch = batch or make_batch(model, args.samples)
        with held_by_another_process(args.hold_gib):
            results[prefix] = measure(model, batch, args, prefix)
        del model
        gc.collect()  # worker and model refer to each other
        scores[prefix] = results[prefix].pop("logprobs")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if "dense" in results:
        for choice in results.keys() - {"dense"}:
            for name in ("rescoring", "training"):
                key = f"{name}_ms_per_observation"
                results[choice][f"{name}_share_of_dense"] = results[choice][key] / results["dense"][key]
            gap = (scores["dense"] - scores[choice]).abs()
            results[choice]["logprob_gap_to_dense"] = {"mean": float(gap.mean()), "max": float(gap.max())}

    print_tables(results, args)
    arguments = {name: value for name, value in vars(args).items() if name != "output"}
    write_json(args.output, {"benchmark": "actor", "arguments": arguments, **results})


def print_tables(results: dict[str, Any], args: argparse.Namespace) -> None:
    """The choices' totals, and milliseconds per observation by stage."""
    console = Console()
    table = Table(title=f"Actor, {args.samples} observations, micro-batch {args.micro_batch}")
    columns = (
        "rescoring ms/obs",
        "training ms/obs",
        "ratio max dev",
        "gap to dense",
        "kept",
        "peak GiB",
        "reserved GiB",
    )
    for column in ("prefix", *columns):
        table.add_column(column)
    for choice, row in results.items():
        table.add_row(
            choice,
            f"{row['rescoring_ms_per_observation']:.2f}",
            f"{row['training_ms_per_observation']:.2f}",
            f"{row['ratio_max_dev']:g}",
            f"{row['logprob_gap_to_dense']['mean']:.5f}" if "logprob_gap_to_dense" in row else "",
            f"{row['prefixes_kept']:.0%}",
            f"{row.get('peak_gib', 0):.1f}",
            f"{row.get('peak_reserved_gib', 0):.1f}",
        )
    console.print(table)
    for choice, row in results.items():
        console.print(f"{choice}: prefixes kept, {row['budget']}")
    for part in ("rescoring", "training"):
        table = Table(title=f"{part}, ms per observation")
        for column in ("stage", *results):
            table.add_column(column)
        for stage in dict.fromkeys(stage for row in results.values() for stage in row[f"{part}_stages"]):
            times = (row[f"{part}_stages"].get(stage) for row in results.values())
            table.add_row(stage, *("" if ms is None else f"{ms:.3f}" for ms in times))
        console.print(table)


if __name__ == "__main__":
    main()
