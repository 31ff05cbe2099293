# SPDX-License-Identifier: Apache-2.0
"""The actor, given what the engine sampled, computes the log-probs and values that the engine reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf_phyai.engine import Engine
from rlinf_phyai.models.pi05 import PI05RolloutOutput

from .comparison import JOINT, Case, reported_log_probs, run_engine
from .reference import CAMERAS, IMAGE_SIZE, Batch, Reference

Measure = Callable[[dict[str, float]], dict[str, float]]
Engines = Callable[..., Engine]


@pytest.mark.parametrize("case", [Case((20, 1, 200), 3, 0), Case((7, 90), 3, JOINT), Case((13,), 10, 9)], ids=str)
def test_get_log_prob_value(case: Case, vlm_reference: Reference, engines: Engines, measure: Measure) -> None:
    batch = case.batch(vlm_reference.sizes.vocab)
    output = run_engine(engines("mean_token"), case, batch)
    log_probs, values = vlm_reference.rescore(
        batch,
        output.chains,
        case.denoise_inds(),
        noise_level=case.noise_level,
        joint_logprob=case.step == JOINT,
    )
    found = measure(
        {
            "log_probs": float((log_probs.mean(dim=1) - reported_log_probs(case, batch, output)).abs().max()),
            "values": float((values - output.values).abs().max()),
        }
    )
    assert max(found.values()) <= case.tolerance


@pytest.mark.parametrize("case", [Case((7, 90), 3, JOINT, chunk=5), Case((13, 2), 3, 2, chunk=5)], ids=str)
@pytest.mark.parametrize("chunk_critic", [False, True])
def test_value_of_each_step_after_the_expert(
    chunk_critic: bool, case: Case, expert_reference: Reference, engines: Engines, measure: Measure
) -> None:
    """Joint rescoring visits every step and gives all N values; the other mode gives that of the chosen step."""
    batch = case.batch(expert_reference.sizes.vocab)
    output = run_engine(engines("expert", chunk_critic_input=chunk_critic, action_chunk=5), case, batch)
    _, values = expert_reference.rescore(
        batch,
        output.chains,
        case.denoise_inds(),
        noise_level=case.noise_level,
        joint_logprob=case.step == JOINT,
        chunk_critic_input=chunk_critic,
        action_chunk=5,
    )
    assert output.values is not None
    reported = output.values if case.step == JOINT else output.values[:, [int(case.step)]]
    found = measure({"values": float((values - reported).abs().max())})
    assert found["values"] <= case.tolerance


def test_rescoring_notices_a_changed_chain(vlm_reference: Reference, engines: Engines) -> None:
    case = Case((13, 2), 3, 1)
    batch = case.batch(vlm_reference.sizes.vocab)
    output = run_engine(engines("mean_token"), case, batch)
    chains = output.chains.clone()
    chains[:, 2] += 1e-3
    log_probs, _ = vlm_reference.rescore(batch, chains, case.denoise_inds(), noise_level=case.noise_level)
    assert float((log_probs[:, 0] - output.log_probs[:, 1]).abs().max()) > 100 * case.tolerance


def raw_observation(size: int) -> dict[str, Tensor]:
    """What RLinf stores for the actor: uint8 camera images and the robot state."""
    gen = torch.Generator().manual_seed(5)
    shape = (size, IMAGE_SIZE, IMAGE_SIZE, 3)
    return {
        "observation/image": torch.randint(0, 256, shape, dtype=torch.uint8, generator=gen),
        "observation/wrist_image": torch.randint(0, 256, shape, dtype=torch.uint8, generator=gen),
        "observation/state": torch.randn(size, 32, generator=gen),
    }


def as_model_input(sample: dict[str, Any]) -> dict[str, Any]:
    """An input transform for RLinf's ``setup_wrappers`` that only renames (the images have the model's size already)."""
    images = (sample["observation/image"], sample["observation/wrist_image"], 0 * sample["observation/image"])
    return {
        "image": dict(zip(CAMERAS, images, strict=True)),
        "image_mask": dict(zip(CAMERAS, (True, True, False), strict=True)),
        "state": sample["observation/state"],
    }


def test_default_forward(vlm_reference: Reference, engines: Engines, measure: Measure) -> None:
    """The training forward itself, from the stored raw images: ``forward(forward_inputs=...)`` of the actor."""
    case = Case((21, 2, 200), 3, 2, chunk=5, env_dim=7)
    batch = case.batch(vlm_reference.sizes.vocab)
    raw = raw_observation(batch.size)
    cameras = torch.stack((raw["observation/image"], raw["observation/wrist_image"]), dim=1).permute(0, 1, 4, 2, 3)
    pixels = cameras.float() / 255.0 * 2.0 - 1.0
    output: PI05RolloutOutput = run_engine(engines("mean_token"), case, batch, pixel_values=pixels)
    vlm_reference.model.setup_wrappers(transforms=[as_model_input])
    forward_inputs = {
        "chains": output.chains,
        "denoise_inds": case.denoise_inds(),
        "tokenized_prompt": batch.input_ids,
        "tokenized_prompt_mask": batch.prompt_mask,
        **raw,
    }
    options = {"num_steps": 3, "noise_level": 0.5, "action_chunk": 5, "action_env_dim": 7}
    with vlm_reference.options(**options), torch.no_grad():
        result = vlm_reference.model(forward_inputs=forward_inputs, compute_values=True)
    assert output.values is not None
    found = measure(
        {
            "log_probs": float((result["logprobs"] - reported_log_probs(case, batch, output)).abs().max()),
            "values": float((result["values"] - output.values[:, 0]).abs().max()),
        }
    )
    assert result["logprobs"].shape == (3, 5, 7)
    assert max(found.values()) <= case.tolerance


def test_batch_helper_matches_rlinfs_camera_count(vlm_reference: Reference) -> None:
    """The reference's batch and RLinf's default configuration speak of the same two cameras."""
    batch: Batch = Case((1,), 1, 0).batch(vlm_reference.sizes.vocab)
    assert sum(batch.camera_mask) == vlm_reference.model.config.num_images_in_input
