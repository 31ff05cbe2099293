# SPDX-License-Identifier: Apache-2.0
"""The policy against RLinf's own actor model: what it reports is what the actor finds when it replays the sample."""

from __future__ import annotations

import shutil

import pytest
import torch

from rlinf_phyai.models.pi05 import scheduler
from rlinf_phyai.models.pi05.stated_sizes import TINY_SIZES
from rlinf_phyai.models.pi05.tiny import ASSET_ID, make_tiny_checkpoint

from .conftest import TOLERANCE, make_observation, rescore


def test_the_result_has_the_shapes_and_dtypes_of_the_contract(make_config, build) -> None:
    policy, _ = build(make_config())
    actions, result = policy.predict_action_batch(make_observation(3))
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in result["forward_inputs"].items()}
    assert (tuple(actions.shape), actions.dtype) == ((3, 5, 7), torch.float64)
    assert (tuple(result["prev_logprobs"].shape), result["prev_logprobs"].dtype) == ((3, 5, 7), torch.float32)
    assert (tuple(result["prev_values"].shape), result["prev_values"].dtype) == ((3, 1), torch.float32)
    assert found == {
        "chains": ((3, 4, 10, 32), torch.float32),
        "denoise_inds": ((3, 3), torch.int64),
        "tokenized_prompt": ((3, 200), torch.int64),
        "tokenized_prompt_mask": ((3, 200), torch.bool),
        "action": ((3, 35), torch.float64),
        "model_action": ((3, 320), torch.float32),
        "observation/image": ((3, 256, 256, 3), torch.uint8),
        "observation/wrist_image": ((3, 256, 256, 3), torch.uint8),
        "observation/state": ((3, 8), torch.float32),
    }
    everything = [actions, result["prev_logprobs"], result["prev_values"], *result["forward_inputs"].values()]
    assert all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in everything)
    assert torch.equal(result["forward_inputs"]["action"].view(3, 5, 7), actions)
    assert torch.equal(
        result["forward_inputs"]["model_action"].view(3, 10, 32), result["forward_inputs"]["chains"][:, -1]
    )


def test_an_fp8_prefix_shows_in_the_gap_and_in_nothing_else(make_config, build) -> None:
    """Emulated here. Its reported score is still that of its own action, so the gap is a small, honest mismatch."""
    gaps = []
    for precision in ("null", "fp8"):
        policy, actor = build(make_config(f"rollout.phyai.prefix_precision={precision}"))
        _, result = policy.predict_action_batch(make_observation(4))
        rescored = rescore(actor, result)
        gaps.append(float((rescored["logprobs"] - result["prev_logprobs"]).abs().mean()))
    assert gaps[0] < TOLERANCE < gaps[1] < 0.1


def test_the_contract_is_the_one_rlinf_itself_keeps(make_config, build) -> None:
    """Names, shapes and dtypes of RLinf's own prediction, in train and in eval mode."""
    policy, actor = build(make_config())
    for mode in ("train", "eval"):
        observation = make_observation(2)
        with torch.no_grad():
            wanted_actions, wanted = actor.predict_action_batch(observation, mode=mode)
        actions, found = policy.predict_action_batch(observation, mode=mode)
        assert actions.dtype == wanted_actions.dtype
        assert actions.shape == wanted_actions.shape
        assert set(found) == set(wanted)
        assert set(found["forward_inputs"]) == set(wanted["forward_inputs"])
        for name, tensor in wanted["forward_inputs"].items():
            assert found["forward_inputs"][name].dtype == tensor.dtype, name
            assert found["forward_inputs"][name].shape == tensor.shape, name
        for name in ("tokenized_prompt", "tokenized_prompt_mask"):
            assert torch.equal(found["forward_inputs"][name], wanted["forward_inputs"][name]), name


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param([], id="default"),
        pytest.param(["actor.model.openpi.num_steps=1"], id="one-step"),
        pytest.param(["actor.model.openpi.num_steps=4", "actor.model.openpi.ignore_last=true"], id="ignore-last"),
        pytest.param(["actor.model.openpi.joint_logprob=true"], id="joint"),
        pytest.param(["actor.model.openpi.noise_method=flow_noise"], id="flow-noise"),
        pytest.param(
            ["actor.model.openpi.noise_method=flow_noise", "actor.model.openpi.joint_logprob=true"],
            id="flow-noise-joint",
        ),
        pytest.param(
            ["actor.model.openpi.noise_method=flow_cps", "actor.model.openpi.ignore_last=true"], id="flow-cps"
        ),
        pytest.param(["actor.model.openpi.value_vlm_mode=last_token"], id="last-token"),
        pytest.param(["actor.model.openpi.value_vlm_mode=first_token"], id="first-token"),
        pytest.param(["actor.model.openpi.discrete_state_input=true"], id="state-in-prompt"),
        pytest.param(["actor.model.openpi.action_chunk=3", "actor.model.openpi.action_env_dim=4"], id="smaller-chunk"),
    ],
)
def test_the_actor_finds_the_reported_log_probabilities_and_values(overrides, make_config, build) -> None:
    policy, actor = build(make_config(*overrides))
    _, result = policy.predict_action_batch(make_observation(5, seed=1))
    replayed = rescore(actor, result)
    assert result["prev_logprobs"].abs().min() > 0
    torch.testing.assert_close(result["prev_logprobs"], replayed["logprobs"], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(result["prev_values"][:, 0], replayed["values"], atol=TOLERANCE, rtol=0)
    assert result["prev_values"].std() > 10 * TOLERANCE  # the values differ, so the comparison says something


@pytest.mark.parametrize("after_vlm", [True, False])
def test_pi0_is_replayed_by_the_actor(after_vlm: bool, make_config, build, checkpoint, tmp_path) -> None:
    """PI0 reads the state beside the prompt, normalised by mean and deviation, and LIBERO's actions relative to it."""
    folder = make_tiny_checkpoint(tmp_path, seed=4, config=TINY_SIZES["pi0"])
    shutil.copy(checkpoint / ASSET_ID / "norm_stats.json", folder / ASSET_ID / "norm_stats.json")
    openpi = "actor.model.openpi"
    paths = [f"actor.model.model_path={folder}", f"rollout.model.model_path={folder}"]
    config = make_config(*paths, f"{openpi}.config_name=pi0_libero", f"{openpi}.value_after_vlm={after_vlm}")
    policy, actor = build(config)
    observation = make_observation(3, seed=8)
    actions, result = policy.predict_action_batch(observation)
    replayed = rescore(actor, result)
    torch.testing.assert_close(result["prev_logprobs"], replayed["logprobs"], atol=TOLERANCE, rtol=0)
    if after_vlm:
        torch.testing.assert_close(result["prev_values"][:, 0], replayed["values"], atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(policy.predict_values(observation), result["prev_values"], atol=1e-5, rtol=0)
    moved = {**observation, "states": observation["states"] + 0.5}
    inputs = result["forward_inputs"] | {"observation/state": moved["states"]}
    gap = (rescore(actor, {"forward_inputs": inputs})["logprobs"] - result["prev_logprobs"]).abs().max()
    assert gap > 10 * TOLERANCE  # the state matters
    processed = actor.input_transform(actor.obs_processor(observation), transpose=False)
    model_actions = result["forward_inputs"]["model_action"].view(3, 10, 32)
    wanted = actor.output_transform({"actions": model_actions, "state": processed["state"]})["actions"]
    assert torch.equal(actions, wanted)


def test_annealed_noise_follows_the_step_that_rlinf_sets(make_config, build) -> None:
    """The runner tells actor and rollout the global step before each training step."""
    policy, actor = build(make_config("actor.model.openpi.noise_anneal=true"))
    observation, differ = make_observation(2), []
    try:
        for step in (0, 200):
            policy.set_global_step(step)
            _, result = policy.predict_action_batch(observation)
            for told in (step, 77):
                actor.set_global_step(told)
                gap = (rescore(actor, result)["logprobs"] - result["prev_logprobs"]).abs().max()
                differ.append(float(gap) > TOLERANCE)
    finally:
        actor.set_global_step(0)
    assert differ == [False, True, False, True]


def test_a_critic_after_the_expert_reports_the_mean_over_the_steps(make_config, build) -> None:
    policy, actor = build(make_config("actor.model.openpi.value_after_vlm=false"))
    _, result = policy.predict_action_batch(make_observation(3))
    inputs = result["forward_inputs"]
    per_step = []
    for step in range(3):  # the actor evaluates one chosen step at a time
        replayed = rescore(actor, {"forward_inputs": {**inputs, "denoise_inds": torch.full((3, 3), step)}})
        per_step.append(replayed["values"])
    wanted = torch.stack(per_step).mean(dim=0)
    torch.testing.assert_close(result["prev_values"][:, 0], wanted, atol=TOLERANCE, rtol=0)
    assert policy.predict_values(make_observation(3)).shape == (3, 1)


def test_actions_are_those_of_rlinfs_output_transform(make_config, build) -> None:
    policy, actor = build(make_config())
    actions, result = policy.predict_action_batch(make_observation(4))
    model_actions = result["forward_inputs"]["model_action"].view(4, 10, 32)
    wanted = actor.output_transform({"actions": model_actions, "state": torch.zeros(4, 32)})["actions"]
    assert torch.equal(actions, wanted)


def test_a_batch_above_the_maximum_is_split_without_a_trace(make_config, build) -> None:
    whole, _ = build(make_config(), max_batch_size=5)
    split, _ = build(make_config(), max_batch_size=2)
    observation = make_observation(5, seed=2)
    assert split.engine.max_batch_size == 2
    expected_actions, expected = whole.predict_action_batch(observation)
    actions, found = split.predict_action_batch(observation)
    torch.testing.assert_close(actions, expected_actions, atol=1e-5, rtol=0)
    for name in ("prev_logprobs", "prev_values"):
        torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=0)
    for name, tensor in expected["forward_inputs"].items():
        torch.testing.assert_close(found["forward_inputs"][name], tensor, atol=1e-5, rtol=0)
    torch.testing.assert_close(split.predict_values(observation), expected["prev_values"], atol=1e-5, rtol=0)


def test_a_sample_does_not_depend_on_its_neighbours_prompts(make_config, build) -> None:
    """The longest prompt of a batch sets the padding of all; results must not notice."""
    policy, _ = build(make_config())
    observation = make_observation(5, seed=3)
    values = policy.predict_values(observation)
    for row in range(5):
        alone = {name: None if part is None else part[row : row + 1] for name, part in observation.items()}
        torch.testing.assert_close(policy.predict_values(alone)[0], values[row], atol=1e-5, rtol=0)


def test_evaluation_repeats_for_the_same_start_and_is_not_random(make_config, build) -> None:
    config = make_config()
    first, actor = build(config)
    second, _ = build(config)
    observation = make_observation(3, seed=4)
    actions, result = first.predict_action_batch(observation, mode="eval")
    again, _ = second.predict_action_batch(observation, mode="eval")
    assert torch.equal(actions, again)
    assert not result["prev_logprobs"].any()
    assert result["prev_values"].isnan().all()
    assert bool((result["forward_inputs"]["denoise_inds"] == -1).all())
    # RLinf's own evaluation from the same noise ends at the same actions.
    noise = result["forward_inputs"]["chains"][:, 0]
    from openpi.models.model import Observation

    processed = actor.input_transform(actor.obs_processor(observation), transpose=False)
    wanted = actor.sample_actions(Observation.from_dict(processed), noise=noise, mode="eval")["actions"]
    torch.testing.assert_close(result["forward_inputs"]["model_action"].view(3, 10, 32), wanted, atol=1e-4, rtol=0)


def test_the_debug_offset_shifts_every_reported_element(make_config, build) -> None:
    plain, _ = build(make_config())
    shifted, _ = build(make_config("rollout.phyai.debug_logprob_offset=0.01"))
    observation = make_observation(2)
    _, expected = plain.predict_action_batch(observation)
    _, found = shifted.predict_action_batch(observation)
    difference = found["prev_logprobs"] - expected["prev_logprobs"]
    torch.testing.assert_close(difference, torch.full((2, 5, 7), 0.01), atol=2e-6, rtol=0)
    assert torch.equal(found["forward_inputs"]["chains"], expected["forward_inputs"]["chains"])


@pytest.mark.parametrize(
    "overrides, source",
    [
        ((), "actor"),
        (("algorithm.recompute_logprobs=false",), "rollout"),
        (("algorithm.adv_type=grpo",), "rollout"),
        (("actor.model.openpi.value_after_vlm=false",), "rollout"),
    ],
    ids=["ppo", "no rescoring", "grpo", "critic after the expert"],
)
def test_auto_leaves_the_values_to_the_actor_where_they_are_the_same(make_config, build, overrides, source) -> None:
    usual = ("rollout.phyai.value_source=auto", "algorithm.adv_type=gae", "algorithm.recompute_logprobs=true")
    policy, _ = build(make_config(*usual, *overrides))
    assert policy.options.value_source == source


def test_values_from_the_actor_leave_nan_except_where_asked(make_config, build) -> None:
    policy, _ = build(make_config("rollout.phyai.value_source=actor"))
    reference, _ = build(make_config())
    observation = make_observation(2)
    _, result = policy.predict_action_batch(observation)
    _, expected = reference.predict_action_batch(observation)
    assert result["prev_values"].shape == (2, 1)
    assert result["prev_values"].isnan().all()
    assert torch.equal(result["prev_logprobs"], expected["prev_logprobs"])
    torch.testing.assert_close(policy.predict_values(observation), expected["prev_values"], atol=1e-6, rtol=0)


def test_without_a_critic_no_value_is_computed_and_rlinf_asks_for_no_bootstrap(make_config, build, monkeypatch) -> None:
    for function in ("fill_cache_and_value", "value_from_expert"):
        monkeypatch.setattr(scheduler, function, lambda *_: pytest.fail("the engine computed a value"))
    policy, _ = build(make_config("actor.model.add_value_head=false", "actor.model.openpi.add_value_head=false"))
    _, result = policy.predict_action_batch(make_observation(2))
    assert torch.equal(result["prev_values"], torch.zeros(2, 1))
    assert torch.equal(policy.predict_values(make_observation(2)), torch.zeros(2, 1))
    assert not hasattr(policy, "value_head")


def test_the_replay_survives_an_environment_that_reuses_its_buffers(make_config, build) -> None:
    policy, _ = build(make_config())
    observation = make_observation(2)
    kept = observation["main_images"].clone()
    _, result = policy.predict_action_batch(observation)
    observation["main_images"].zero_()
    assert torch.equal(result["forward_inputs"]["observation/image"], kept)


def test_ranks_sample_differently_and_repeatably(make_config, build) -> None:
    observation = make_observation(2)
    chains = []
    for rank in (0, 1, 0):
        policy, _ = build(make_config(), rank=rank)
        chains.append(policy.predict_action_batch(observation)[1]["forward_inputs"]["chains"])
    assert not torch.equal(chains[0], chains[1])
    assert torch.equal(chains[0], chains[2])
