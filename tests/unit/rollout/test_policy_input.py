# SPDX-License-Identifier: Apache-2.0
"""The policy's observations: two ways of transforming them, and what is refused."""

from __future__ import annotations

import logging

import pytest
import torch

from rlinf_phyai.errors import EngineUnusableError
from rlinf_phyai.rollout.build import build_policy
from rlinf_phyai.rollout.observation import BatchedTransforms, OpenPiTransforms, make_transforms
from rlinf_phyai.rollout.openpi_setup import load_openpi_setup

from .conftest import TOLERANCE, make_observation, rescore

# -- the two ways of transforming -------------------------------------------------------------------------------------


def test_liberos_transforms_are_recognised_and_others_are_not(make_config, caplog) -> None:
    setup = load_openpi_setup(make_config().actor.model)
    assert isinstance(make_transforms(setup, "cpu"), BatchedTransforms)
    with caplog.at_level(logging.WARNING):
        changed = type(setup)(setup.config, setup.inputs[::-1], setup.outputs)
        assert isinstance(make_transforms(changed, "cpu"), OpenPiTransforms)
    assert caplog.text.count("sample by sample on the CPU") == 1


@pytest.mark.parametrize("with_state", [False, True])
def test_both_ways_give_the_same_bits(with_state: bool, make_config) -> None:
    setup = load_openpi_setup(make_config(f"actor.model.openpi.discrete_state_input={with_state}").actor.model)
    batched, reference = make_transforms(setup, "cpu"), OpenPiTransforms(setup)
    env = make_observation(3, seed=6)
    observation = {
        "observation/image": env["main_images"],
        "observation/wrist_image": env["wrist_images"],
        "observation/state": env["states"],
        "prompt": env["task_descriptions"],
    }
    found, wanted = batched.inputs(dict(observation)), reference.inputs(dict(observation))
    assert wanted.image_masks == [True, True, False]
    assert torch.equal(found.pixel_values, wanted.pixel_values[:, :2])
    assert torch.equal(found.input_ids, wanted.input_ids)
    assert torch.equal(found.lang_lens, wanted.lang_lens)
    actions = torch.randn(3, 10, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(batched.actions(actions, found), reference.actions(actions, wanted))


def test_the_slow_way_samples_the_same(make_config, build) -> None:
    config = make_config()
    fast, actor = build(config)
    slow, _ = build(config)
    slow.transforms = OpenPiTransforms(load_openpi_setup(config.actor.model))
    observation = make_observation(3, seed=7)
    expected_actions, expected = fast.predict_action_batch(observation)
    actions, found = slow.predict_action_batch(observation)
    assert torch.equal(actions, expected_actions)
    assert torch.equal(found["prev_logprobs"], expected["prev_logprobs"])
    assert torch.equal(found["prev_values"], expected["prev_values"])
    torch.testing.assert_close(found["prev_logprobs"], rescore(actor, found)["logprobs"], atol=TOLERANCE, rtol=0)


# -- bad input ----------------------------------------------------------------------------------------------------------


def test_bad_observations_are_named(make_config, build) -> None:
    policy, _ = build(make_config())
    observation = make_observation(2)
    with pytest.raises(ValueError, match="wrist_image"):
        policy.predict_action_batch({**observation, "wrist_images": None})
    with pytest.raises(ValueError, match="equal lengths"):
        policy.predict_action_batch({**observation, "task_descriptions": ["one"]})
    with pytest.raises(ValueError, match=r"torch\.float32"):
        policy.predict_action_batch({**observation, "main_images": observation["main_images"].float()})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor.model.openpi.noise_method=flow_ode", "noise_method is 'flow_ode'"),
        ("actor.model.openpi.double_layer=true", "double_layer is on"),
        ("actor.model.openpi.safe_get_logprob=true", "safe_get_logprob is on"),
        ("actor.model.openpi.num_images_in_input=3", "num_images_in_input is 3"),
        ("actor.model.openpi.noise_level=0.0", "positive noise level"),
        ("rollout.phyai.params_dtype=int8", "params_dtype is 'int8'"),
        ("rollout.phyai.value_source=nobody", "allowed: 'auto', 'rollout', 'actor'"),
    ],
)
def test_unsupported_options_are_refused(override: str, message: str, make_config) -> None:
    config = make_config(override)
    with pytest.raises(ValueError, match=message):
        build_policy(config, config.actor.model, "cpu", 0, 2)


def test_value_source_actor_needs_the_critic_after_the_vlm(make_config) -> None:
    config = make_config("rollout.phyai.value_source=actor", "actor.model.openpi.value_after_vlm=false")
    with pytest.raises(ValueError, match="needs the critic after the VLM"):
        build_policy(config, config.actor.model, "cpu", 0, 2)


def test_writing_weights_outside_a_session_stops_the_policy(make_config, build) -> None:
    policy, _ = build(make_config())
    with torch.no_grad():
        policy.state_dict()["action_in_proj.bias"].add_(1)
    with pytest.raises(EngineUnusableError):
        policy.predict_action_batch(make_observation(1))
