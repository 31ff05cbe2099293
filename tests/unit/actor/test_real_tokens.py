# SPDX-License-Identifier: Apache-2.0
"""The prefix on real tokens against RLinf's own dense forward, float32."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from rlinf_phyai.actor.model import KEYS_KEY, LAYOUT_KEY, POOLED_KEY, choose_prefix, use_real_tokens
from rlinf_phyai.actor.prefix import PromptLayout
from rlinf_phyai.kernels import resolve

SENTENCES = [
    "pick up the black bowl between the plate and the ramekin and place it on the plate",
    "turn on the stove",
    "pick up the black bowl and put it on the stove",
]


@pytest.fixture(scope="module")
def model_config(base_config: DictConfig, tmp_path_factory: pytest.TempPathFactory) -> DictConfig:
    """Three layers: the rows of padding and of the masked camera must survive more than one."""
    from rlinf_phyai.models.pi05.stated_sizes import GemmaSizes, StatedSizes, VisionSizes
    from rlinf_phyai.models.pi05.tiny import make_tiny_checkpoint

    sizes = StatedSizes(
        vision=VisionSizes(patch_size=112, num_layers=1),
        prefix=GemmaSizes(width=64, mlp_dim=160, depth=3),
        expert=GemmaSizes(width=32, mlp_dim=96, depth=3),
        tokenizer_max_length=64,
    )
    cfg = copy.deepcopy(base_config.actor.model)
    cfg.model_path = str(make_tiny_checkpoint(tmp_path_factory.mktemp("three_layers"), seed=3, config=sizes))
    return cfg


def build(model_config: DictConfig, **openpi: Any) -> Any:
    from rlinf_phyai.actor.model_provider import build_openpi

    cfg = OmegaConf.merge(model_config, {"openpi": openpi})
    torch.manual_seed(0)
    return build_openpi(cfg).train()


@pytest.fixture(scope="module")
def replay(model_config: DictConfig) -> dict[str, torch.Tensor]:
    """``forward_inputs`` of a batch of three with prompts of different lengths, as the rollout stores them."""
    g = np.random.default_rng(0)
    batch = len(SENTENCES)
    observation = {
        "main_images": torch.from_numpy(g.integers(0, 256, (batch, 256, 256, 3), dtype=np.uint8)),
        "wrist_images": torch.from_numpy(g.integers(0, 256, (batch, 256, 256, 3), dtype=np.uint8)),
        "extra_view_images": None,
        "states": torch.from_numpy(g.normal(size=(batch, 8)).astype(np.float32)),
        "task_descriptions": SENTENCES,
    }
    model = build(model_config).eval()
    torch.manual_seed(1)
    _, result = model.predict_action_batch(observation, mode="train")
    assert len(set(result["forward_inputs"]["tokenized_prompt_mask"].sum(dim=1).tolist())) == batch
    return result["forward_inputs"]


@pytest.fixture(params=["real_tokens", "fused"])
def shorten(request: pytest.FixtureRequest) -> Any:
    """``shorten(model)`` gives the model one of the two prefixes on real tokens."""
    kernels = resolve({}, torch.device("cpu"))[0] if request.param == "fused" else None
    return lambda model: use_real_tokens(model, kernels)


def forward(model: Any, replay: dict[str, torch.Tensor], compute_values: bool = True, **extra: torch.Tensor) -> dict:
    return model(forward_inputs={**replay, **extra}, compute_values=compute_values)


@pytest.mark.parametrize("mode", ["mean_token", "last_token", "first_token"])
@pytest.mark.parametrize("samples", [slice(0, 3), slice(1, 2)])
def test_log_probs_and_values_equal_the_dense_actors(model_config, shorten, replay, mode, samples):
    dense = build(model_config, value_vlm_mode=mode)
    ours = shorten(copy.deepcopy(dense))
    part = {key: value[samples] for key, value in replay.items()}
    with torch.no_grad():
        expected, got = forward(dense, part), forward(ours, part)
    torch.testing.assert_close(got["logprobs"], expected["logprobs"], rtol=0, atol=1e-5)
    torch.testing.assert_close(got["values"], expected["values"], rtol=0, atol=1e-5)
    assert got["logprobs"].abs().max() > 0.5  # not a comparison of zeros


def test_pooling_over_valid_tokens_only_would_fail(model_config, replay):
    """The tolerance above tells the exact value from the one that ignores the padding."""
    dense = build(model_config)
    wrong = use_real_tokens(copy.deepcopy(dense))
    from rlinf_phyai.actor import prefix

    original = prefix.pool
    prefix.pool = lambda h, padded, layout: (h * layout.valid[..., None]).sum(1) / layout.valid.sum(1, keepdim=True)
    try:
        with torch.no_grad():
            difference = (forward(wrong, replay)["values"] - forward(dense, replay)["values"]).abs().max()
    finally:
        prefix.pool = original
    assert difference > 1e-4


def test_value_after_the_expert(model_config, shorten, replay):
    dense = build(model_config, value_after_vlm=False)
    ours = shorten(copy.deepcopy(dense))
    with torch.no_grad():
        expected, got = forward(dense, replay), forward(ours, replay)
    torch.testing.assert_close(got["values"], expected["values"], rtol=0, atol=1e-5)
    assert got[POOLED_KEY] is None


def test_joint_log_probs(model_config, shorten, replay):
    dense = build(model_config, joint_logprob=True)
    ours = shorten(copy.deepcopy(dense))
    joint = {**replay, "denoise_inds": torch.arange(3).expand(3, -1)}
    with torch.no_grad():
        torch.testing.assert_close(
            forward(ours, joint)["logprobs"], forward(dense, joint)["logprobs"], rtol=0, atol=1e-5
        )


def test_learned_noise_and_its_entropy(model_config, replay):
    dense = build(model_config, joint_logprob=True, noise_method="flow_noise")
    ours = use_real_tokens(copy.deepcopy(dense))
    joint = {**replay, "denoise_inds": torch.arange(3).expand(3, -1)}
    outputs = []
    for model in (dense, ours):
        output = forward(model, joint)
        (output["logprobs"].mean() + output["entropy"].mean()).backward()
        outputs.append(output | {"gradient": model.noise_head.mlp_logvar.moduleList[0][0].weight.grad})
    for name in ("logprobs", "entropy", "gradient"):
        torch.testing.assert_close(outputs[1][name], outputs[0][name], rtol=0, atol=1e-5)
    assert outputs[0]["entropy"].shape == (3, 1)
    assert outputs[0]["gradient"].abs().max() > 1e-3


def test_gradients_equal_the_dense_actors(model_config, shorten, replay):
    dense = build(model_config)
    ours = shorten(copy.deepcopy(dense))
    gradients = []
    for model in (dense, ours):
        output = forward(model, replay)
        (output["logprobs"].sum() / 100 + output["values"].sum()).backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert any("value_head" in name for name in gradients[0])
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-3, atol=1e-5, msg=name)


def test_rescoring_and_training_agree_bit_for_bit(model_config, shorten, replay):
    """Rescoring: no gradient, masked rows computed. Training: gradient, pooled input reused, last layer cut short."""
    model = shorten(build(model_config))
    with torch.no_grad():
        rescored = forward(model, replay)
    trained = forward(model, replay, **{POOLED_KEY: rescored[POOLED_KEY]})
    assert torch.equal(rescored["logprobs"], trained["logprobs"])
    assert torch.equal(rescored["values"], trained["values"])
    assert trained["logprobs"].requires_grad
    assert trained["values"].requires_grad


def test_no_value_is_computed_where_none_is_asked_for(model_config, shorten, replay, monkeypatch):
    model = shorten(build(model_config))
    monkeypatch.setattr(model, "_masked_rows", lambda *a: pytest.fail("masked rows without a critic"))
    monkeypatch.setattr(model.value_head, "forward", lambda *a: pytest.fail("the value head ran"))
    output = forward(model, replay, compute_values=False)
    assert output[POOLED_KEY] is None
    assert torch.equal(output["values"], torch.zeros(3))


def test_fewer_rows_go_through_the_layers(model_config, shorten, replay):
    rows: list[int] = []
    model = shorten(build(model_config))
    layer = model.paligemma_with_expert.paligemma.language_model.layers[0]

    def count(module: Any, args: tuple[torch.Tensor], kwargs: dict[str, Any]) -> None:
        rows.append(args[0].numel() // args[0].shape[-1] // len(SENTENCES))

    layer.register_forward_pre_hook(count, with_kwargs=True)
    with torch.no_grad():
        output = forward(model, replay)
        longest = int(replay["tokenized_prompt_mask"].sum(dim=1).max())
        assert rows == [2 * 4 + longest, 4 + 1]  # two cameras and the prompt; the masked camera and one padded position
        rows.clear()
        forward(model, replay, **{POOLED_KEY: output[POOLED_KEY]})
    assert rows == [2 * 4 + longest]


def test_known_keys_replace_the_prefix_bit_for_bit(model_config, shorten, replay, monkeypatch):
    model = shorten(build(model_config))
    layout = PromptLayout.of(replay["tokenized_prompt"], replay["tokenized_prompt_mask"])
    with torch.no_grad():
        rescored = forward(model, replay, **{LAYOUT_KEY: layout})
    fresh = forward(model, replay)
    without_images = {k: v for k, v in replay.items() if not k.startswith("observation/")}
    known = {KEYS_KEY: rescored[KEYS_KEY], POOLED_KEY: rescored[POOLED_KEY]}
    monkeypatch.setattr(model, "embed_prefix", lambda *a: pytest.fail("the prefix ran again"))
    reused = forward(model, without_images, **known)
    for key in ("logprobs", "values"):
        assert torch.equal(reused[key], fresh[key])
        assert torch.equal(rescored[key], fresh[key])
        assert reused[key].requires_grad


def run_out_of_memory(*unused: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_under_fsdp1(model_config, shorten, replay, process_group, use_orig_params):
    """The wrapping of the full-size recipe, by RLinf's own policy: weights exist inside a module's call only."""
    from rlinf.hybrid_engines.fsdp.utils import get_fsdp_wrap_policy
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    dense = build(model_config)
    model = shorten(copy.deepcopy(dense))
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=get_fsdp_wrap_policy(
            module=model, config=OmegaConf.create({}), is_lora=False, model_type="openpi"
        ),
        sharding_strategy=ShardingStrategy.NO_SHARD,
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
    ).train()
    layout = PromptLayout.of(replay["tokenized_prompt"], replay["tokenized_prompt_mask"])
    layer = next(m for n, m in wrapped.named_modules() if n.endswith("language_model.layers.1"))
    handle = layer.register_forward_pre_hook(run_out_of_memory)
    with torch.no_grad():
        expected = forward(dense, replay)
        with pytest.raises(torch.OutOfMemoryError):  # the actor then frees memory and repeats the call
            forward(wrapped, replay, **{LAYOUT_KEY: layout})
        handle.remove()
        rescored = forward(wrapped, replay, **{LAYOUT_KEY: layout})
    for key in ("logprobs", "values"):
        torch.testing.assert_close(rescored[key], expected[key], rtol=0, atol=1e-5)
    pooled = {POOLED_KEY: rescored[POOLED_KEY]}
    for extra in ({LAYOUT_KEY: layout}, {KEYS_KEY: rescored[KEYS_KEY]}):
        trained = forward(wrapped, replay, **pooled, **extra)
        assert torch.equal(trained["logprobs"], rescored["logprobs"])
        (trained["logprobs"].sum() + trained["values"].sum()).backward()


def test_prompt_layout(replay):
    tokens, mask = replay["tokenized_prompt"], replay["tokenized_prompt_mask"]
    assert PromptLayout.of(tokens, mask) == PromptLayout(int(mask.sum(dim=1).max()), False)
    assert PromptLayout.of(tokens[:1], mask[:1]).even
    with pytest.raises(ValueError, match="right-padded with zeros"):
        PromptLayout.of(torch.ones_like(tokens), mask)


def test_sampling_keeps_rlinfs_own_transform(model_config, shorten):
    model = shorten(build(model_config))
    observation = {
        "observation/image": torch.zeros(1, 256, 256, 3, dtype=torch.uint8),
        "observation/wrist_image": torch.zeros(1, 256, 256, 3, dtype=torch.uint8),
        "observation/state": torch.zeros(1, 8),
        "prompt": ["turn on the stove"],
    }
    assert model.input_transform(observation, transpose=False)["tokenized_prompt_mask"].any()


def test_sampling_is_rlinfs_own(model_config, shorten):
    from openpi.models.model import Observation

    dense = build(model_config).eval()
    ours = shorten(copy.deepcopy(dense))
    results = []
    for model in (dense, ours):
        inputs = {
            "observation/image": torch.full((1, 256, 256, 3), 9, dtype=torch.uint8),
            "observation/wrist_image": torch.full((1, 256, 256, 3), 80, dtype=torch.uint8),
            "observation/state": torch.zeros(1, 8),
            "prompt": ["turn on the stove"],
        }
        observation = Observation.from_dict(model.input_transform(inputs, transpose=False))
        torch.manual_seed(0)
        random.seed(0)
        results.append(model.sample_actions(observation, mode="train"))
    for name in ("actions", "prev_logprobs", "prev_values"):
        assert torch.equal(results[0][name], results[1][name])
    assert results[0]["prev_values"].abs().max() > 0


def test_the_replay_transform_equals_openpis(model_config, shorten, replay):
    from openpi.models.model import Observation

    model = shorten(build(model_config))
    reference = Observation.from_dict(type(model).__mro__[2].input_transform(model, replay, transpose=False))
    model.input_transform(replay, transpose=False)
    assert model._replay_checked
    fast = Observation.from_dict(model._replay_transform(replay))
    for name, image in reference.images.items():
        assert torch.equal(fast.images[name], image), name
        assert torch.equal(fast.image_masks[name], reference.image_masks[name].bool()), name


def test_a_transform_that_differs_is_not_used(model_config, shorten, replay, monkeypatch):
    model = shorten(build(model_config))
    monkeypatch.setattr(
        model._replay_transform, "_resize", lambda x: torch.zeros(len(x), 3, 224, 224, dtype=torch.uint8)
    )
    expected = shorten(build(model_config))
    with torch.no_grad():
        assert torch.equal(forward(model, replay)["logprobs"], forward(expected, replay)["logprobs"])
    assert model._replay_transform is None


def test_prompts_with_a_gap_are_refused(model_config, shorten, replay):
    model = shorten(build(model_config))
    mask = replay["tokenized_prompt_mask"].clone()
    mask[0, 3] = False
    with pytest.raises(ValueError, match="not right-padded"):
        forward(model, replay, tokenized_prompt_mask=mask)


@pytest.mark.parametrize(
    "choice, openpi, recompute, expected",
    [
        ("auto", {}, True, "fused"),
        ("fused", {}, False, "fused"),
        ("auto", {}, False, "dense"),
        ("dense", {}, True, "dense"),
        ("real_tokens", {}, False, "real_tokens"),
        ("auto", {"train_expert_only": False}, True, "dense"),
    ],
)
def test_choice_of_the_prefix(model_config, choice, openpi, recompute, expected):
    assert choose_prefix(choice, build(model_config, **openpi), recompute) == expected


def test_refused_choices(model_config):
    with pytest.raises(ValueError, match="'sparse'; allowed: auto, fused, real_tokens, dense"):
        choose_prefix("sparse", None, True)
    with pytest.raises(ValueError, match=r"train_expert_only is not set.*Use 'dense'"):
        choose_prefix("real_tokens", build(model_config, train_expert_only=False), True)
