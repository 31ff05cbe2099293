# SPDX-License-Identifier: Apache-2.0
"""What the rollout policy adds to the engine: ``predict_action_batch`` (host observation in, host actions and replay
out) against ``rollout_step`` (device request in, device output out), full size, random weights, one GPU.

    python -m benchmarks.predict --batches 1,8,32

Observations are two 256x256 uint8 cameras on the host. Needs neither RLinf nor openpi. Also checks that the resize on
the GPU gives Pillow's bits.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import RESULTS, write_json
from rlinf_phyai.engine import DeviceConfig, Engine, EngineArgs, EngineConfig, RuntimeConfig
from rlinf_phyai.models.pi05 import PI05Args, PI05Config, PI05RolloutRequest
from rlinf_phyai.models.pi05.libero_sentences import LIBERO_SENTENCES
from rlinf_phyai.models.pi05.processor import NormStats, PI05Processor, ProcessorOptions
from rlinf_phyai.models.pi05.random_checkpoint import make_random_checkpoint
from rlinf_phyai.models.pi05.resize import PilBilinearResize
from rlinf_phyai.models.pi05.tiny import train_tokenizer
from rlinf_phyai.models.pi05.tokenizer import PromptTokenizer
from rlinf_phyai.rollout.observation import BatchedTransforms
from rlinf_phyai.rollout.policy import PhyaiPolicy, PolicyOptions, _copy, _to_host
from rlinf_phyai.rollout.sampling import FlowSampler, SamplingOptions

STEPS = 3


def build(checkpoint: Path, max_batch: int, policy: str | None) -> PhyaiPolicy:
    """The policy as the worker builds it, with LIBERO's transforms."""
    engine = Engine(
        EngineArgs(
            plugin="pi05",
            plugin_args=PI05Args(checkpoint, max_batch, True, num_steps=STEPS, value_mode="mean_token"),
            config=EngineConfig(
                DeviceConfig("cuda", torch.bfloat16), RuntimeConfig(kernel_policy=policy, progress=False)
            ),
        )
    )
    stats = {
        name: NormStats(np.zeros(width), np.ones(width), -np.ones(width), np.ones(width))
        for name, width in (("state", 8), ("actions", 7))
    }
    processor = PI05Processor(ProcessorOptions(), PromptTokenizer(train_tokenizer(1024), 200), stats, engine.device)
    sampler = FlowSampler(SamplingOptions(STEPS, 0.5), (10, 32), 0, 0, engine.device)
    options = PolicyOptions(5, 7, critic="vlm", value_source="actor")
    return PhyaiPolicy(engine, BatchedTransforms(processor, 5), sampler, options, rename)


def rename(env_obs: dict[str, Any]) -> dict[str, Any]:
    """RLinf's renaming of LIBERO's observation."""
    return {
        "observation/image": env_obs["main_images"],
        "prompt": env_obs["task_descriptions"],
        "observation/state": env_obs["states"],
        "observation/wrist_image": env_obs["wrist_images"],
    }


def observation(batch: int) -> dict[str, Any]:
    """One observation batch as the environment worker sends it."""
    generator = torch.Generator().manual_seed(batch)
    images = torch.randint(0, 256, (2, batch, 256, 256, 3), dtype=torch.uint8, generator=generator)
    return {
        "main_images": images[0].clone(),
        "wrist_images": images[1].clone(),
        "extra_view_images": None,
        "states": torch.randn(batch, 8, generator=generator),
        "task_descriptions": [LIBERO_SENTENCES[index % len(LIBERO_SENTENCES)] for index in range(batch)],
    }


def wall_ms(
    function: Callable[[], Any], repeats: int = 20, choose: Callable[[list[float]], float] = statistics.median
) -> float:
    """Median (or as ``choose`` says) wall milliseconds, device work included."""
    samples = []
    for _ in range(repeats + 3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        function()
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - begin) * 1e3)
    return choose(samples[3:])


def measure(policy: PhyaiPolicy, batch: int) -> dict[str, float]:
    """Milliseconds of the whole prediction, of the engine's part and of the parts around it."""
    obs = observation(batch)
    renamed = rename(obs)
    inputs = policy.transforms.inputs(renamed)
    plan = policy.sampler.plan(batch, "train")
    request = PI05RolloutRequest(
        inputs.pixel_values,
        inputs.input_ids.cuda(),
        inputs.lang_lens,
        plan.noise,
        None,
        plan.sigmas.cuda(),
        plan.step_noise,
        False,
    )
    output = policy.engine.rollout_step(request)
    row = {
        "batch": batch,
        "predict": wall_ms(lambda: policy.predict_action_batch(obs)),
        "predict_best": wall_ms(lambda: policy.predict_action_batch(obs), choose=min),
        "rollout_step": wall_ms(lambda: policy.engine.rollout_step(request)),
        "inputs": wall_ms(lambda: policy.transforms.inputs(renamed)),
        "upload": wall_ms(lambda: [obs[name].cuda() for name in ("main_images", "wrist_images")]),
        "plan": wall_ms(lambda: policy.sampler.plan(batch, "train")),
        "actions": wall_ms(lambda: policy.transforms.actions(output.actions, inputs)),
        "replay": wall_ms(lambda: [_copy(value) for value in renamed.values() if isinstance(value, torch.Tensor)]),
        "to_host": wall_ms(
            lambda: _to_host({"chains": output.chains, "actions": output.actions, "log_probs": output.log_probs})
        ),
        "values": wall_ms(lambda: policy.predict_values(obs), 5),
    }
    row["overhead_percent"] = 100 * (row["predict"] / row["rollout_step"] - 1)
    return row


def resize_is_exact() -> bool:
    """Both GPU resizes against Pillow for a handful of camera sizes."""
    levels = torch.arange(256, dtype=torch.float32, device="cuda")
    for height, width in ((256, 256), (480, 640), (128, 128), (225, 223), (640, 480)):
        images = torch.randint(0, 256, (2, height, width, 3), dtype=torch.uint8)
        wanted = PilBilinearResize(224, 224, use_pillow=True)(images)
        pixels = torch.empty(2, 3, 224, 224, device="cuda")
        PilBilinearResize(224, 224).to_levels(images.cuda(), levels, pixels)
        for found in (PilBilinearResize(224, 224)(images.cuda()), pixels.to(torch.uint8)):
            if not torch.equal(found.cpu(), wanted):
                return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--policy", default="rlinf_bf16")
    parser.add_argument("--output", type=Path, default=RESULTS / "predict.json")
    args = parser.parse_args()
    batches = [int(batch) for batch in args.batches.split(",")]
    exact = resize_is_exact()
    print(f"resize on the GPU equals Pillow: {exact}", flush=True)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as scratch:
        make_random_checkpoint(Path(scratch), PI05Config(value_mode="mean_token"), device="cuda")
        torch.cuda.empty_cache()
        policy = build(Path(scratch), max(batches), args.policy)
    rows = []
    for batch in batches:
        rows.append(measure(policy, batch))
        print("  ".join(f"{name} {value:.3g}" for name, value in rows[-1].items()), flush=True)
    write_json(args.output, {"policy": args.policy, "denoise_steps": STEPS, "resize_exact": exact, "rows": rows})


if __name__ == "__main__":
    main()
