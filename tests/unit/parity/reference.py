# SPDX-License-Identifier: Apache-2.0
"""The judge of the engine: RLinf's own PI0.5 policy class at a small size, in float32 on the CPU.

``OpenPi0ForRLActionPrediction`` is used as installed: **no method of it, of openpi's ``PI0Pytorch`` or of the Gemma and
SigLIP modules below it is overridden**. Only sizes are patched while it is built (depth, heads, MLP widths, vocabulary,
SigLIP width). What RLinf hard-codes stays as it is: 3 cameras of 256 tokens, 200 prompt tokens, widths 2048 and 1024.

Two seams make a call repeatable, both on names that the class looks up at run time: the instance attribute
``sample_noise`` (returns the given step noise) and the module global ``random`` (returns the given step choice).
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ..engine.checkpoints import PI05Sizes, fill_parameters, write_checkpoint

CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
PROMPT_TOKENS = 200
IMAGE_SIZE = 224
HORIZON = 10
ACTION_DIM = 32

REFERENCE_SIZES = PI05Sizes(
    vision_width=64,
    vision_mlp=96,
    vision_layers=2,
    vision_heads=4,
    prefix_width=2048,
    prefix_mlp=32,
    expert_width=1024,
    expert_mlp=40,
    layers=2,
    heads=4,
    kv_heads=1,
    head_dim=16,
    vocab=64,
    image_size=IMAGE_SIZE,
    patch_size=14,
    prompt_tokens=PROMPT_TOKENS,
    horizon=HORIZON,
    action_dim=ACTION_DIM,
    value_hidden=(1024, 512, 256),
    value_after_vlm=True,
)


@dataclasses.dataclass
class Batch:
    """One set of inputs, shared by the reference and the engine.

    ``pixels`` (B, 3, 3, 224, 224) f32 in [-1, 1]; ``camera_mask`` 3 bools; ``input_ids`` (B, 200) i64 right padded with
    0; ``lang_lens`` (B,) i64; ``noise`` (B, H, D) f32; ``step_noise`` (B, N, H, D) f32; ``state`` (B, D) f32, which PI0 reads.
    """

    pixels: Tensor
    camera_mask: tuple[bool, bool, bool]
    input_ids: Tensor
    lang_lens: Tensor
    noise: Tensor
    step_noise: Tensor
    state: Tensor

    @property
    def size(self) -> int:
        return int(self.pixels.shape[0])

    @property
    def prompt_mask(self) -> Tensor:
        """(B, 200) bool, True on real prompt tokens."""
        return torch.arange(self.input_ids.shape[1])[None] < self.lang_lens[:, None]


def make_batch(
    lengths: list[int], num_steps: int, seed: int, vocab: int, cameras_used: int = 2, prompt_tokens: int = PROMPT_TOKENS
) -> Batch:
    """Random inputs, one sample per prompt length. Unused cameras are black (-1) and masked, as in LIBERO."""
    gen = torch.Generator().manual_seed(seed)
    size = len(lengths)
    pixels = torch.rand(size, 3, 3, IMAGE_SIZE, IMAGE_SIZE, generator=gen) * 2 - 1
    # A slow gradient on top of the noise: patches of one image differ in their mean, as in a real photo.
    ramp = torch.linspace(-0.5, 0.5, IMAGE_SIZE)
    pixels = (pixels * 0.5 + ramp[:, None] * torch.rand(size, 3, 3, 1, 1, generator=gen)).clamp(-1, 1)
    pixels[:, cameras_used:] = -1.0
    ids = torch.zeros(size, prompt_tokens, dtype=torch.int64)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(1, vocab, (length,), generator=gen)
    return Batch(
        pixels=pixels,
        camera_mask=tuple(i < cameras_used for i in range(3)),  # type: ignore[arg-type]
        input_ids=ids,
        lang_lens=torch.tensor(lengths, dtype=torch.int64),
        noise=torch.randn(size, HORIZON, ACTION_DIM, generator=gen),
        step_noise=torch.randn(size, num_steps, HORIZON, ACTION_DIM, generator=gen),
        state=torch.randn(size, ACTION_DIM, generator=gen),
    )


def flow_sde_sigmas(num_steps: int, noise_level: float, steps: list[int], size: int) -> Tensor:
    """(B, N) noise plan: sigma_i = noise_level * sqrt(t_i / (1 - t~_i)) on ``steps``, 0 (an ODE step) elsewhere.

    Written from the formula in float64 and rounded once, so that it does not share code with either side.
    """
    plan = torch.zeros(num_steps, dtype=torch.float64)
    times = [1 - i / num_steps for i in range(num_steps)] + [0.0]
    for i in steps:
        guarded = times[1] if times[i] == 1 else times[i]
        plan[i] = noise_level * (times[i] / (1 - guarded)) ** 0.5
    return plan.float()[None].repeat(size, 1)


@contextlib.contextmanager
def patched_sizes(sizes: PI05Sizes) -> Iterator[None]:
    """While active, openpi builds its modules with ``sizes``; classes and methods stay the installed ones."""
    import openpi.models.gemma as gemma
    import openpi.models_pytorch.gemma_pytorch as gemma_pytorch

    variants = {
        "gemma_2b": (sizes.prefix_width, sizes.prefix_mlp),
        "gemma_300m": (sizes.expert_width, sizes.expert_mlp),
    }

    def get_config(variant: str) -> Any:
        width, mlp = variants[variant]
        return gemma.Config(
            width=width,
            depth=sizes.layers,
            mlp_dim=mlp,
            num_heads=sizes.heads,
            num_kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
        )

    paligemma, expert = gemma_pytorch.PaliGemmaForConditionalGeneration, gemma_pytorch.GemmaForCausalLM

    def small_paligemma(config: Any) -> Any:
        config._vocab_size = config.image_token_index = config.text_config.vocab_size = sizes.vocab
        vision = config.vision_config
        vision.hidden_size, vision.intermediate_size = sizes.vision_width, sizes.vision_mlp
        vision.num_hidden_layers, vision.num_attention_heads = sizes.vision_layers, sizes.vision_heads
        vision.projection_dim = sizes.prefix_width
        return paligemma(config=config)

    def small_expert(config: Any) -> Any:
        config.vocab_size = sizes.vocab
        return expert(config=config)

    with (
        mock.patch.object(gemma, "get_config", get_config),
        mock.patch.object(gemma_pytorch, "PaliGemmaForConditionalGeneration", small_paligemma),
        mock.patch.object(gemma_pytorch, "GemmaForCausalLM", small_expert),
    ):
        yield


@dataclasses.dataclass
class ReferenceOutput:
    """What the actor returns: actions (B,H,D), chains (B,N+1,H,D), log-probs (B,c,d), values, denoise_inds (B,N)."""

    actions: Tensor
    chains: Tensor
    log_probs: Tensor
    values: Tensor
    denoise_inds: Tensor


class Reference:
    """RLinf's policy with random weights, and its checkpoint on disk.

    Args:
        directory: where ``model.safetensors`` and ``config.json`` are written.
        sizes: module sizes; ``value_after_vlm`` and ``value_hidden`` choose the critic.
        seed: seed of every weight.
        options: further fields of RLinf's ``OpenPi0Config``. ``sizes.noise_head`` sets ``noise_method: flow_noise``.
    """

    def __init__(self, directory: Path, sizes: PI05Sizes = REFERENCE_SIZES, seed: int = 0, **options: Any) -> None:
        from rlinf.models.embodiment.openpi import openpi_action_model

        self._module = openpi_action_model
        self.sizes = sizes
        self.directory = directory
        config = openpi_action_model.OpenPi0Config(
            config_name="pi05_libero" if sizes.pi05 else "pi0_libero",
            pi05=sizes.pi05,
            dtype="float32",
            discrete_state_input=False,
            action_horizon=sizes.horizon,
            action_dim=sizes.action_dim,
            add_value_head=sizes.value_hidden is not None,
            value_after_vlm=sizes.value_after_vlm,
            noise_method="flow_noise" if sizes.noise_head else "flow_sde",
            **options,
        )
        precision = torch.get_float32_matmul_precision()
        random_state = torch.get_rng_state()
        try:
            with patched_sizes(sizes):
                self.model = openpi_action_model.OpenPi0ForRLActionPrediction(config).float().eval()
        finally:
            # openpi's constructor sets a process-wide precision, and initialisation draws from the global generator.
            torch.set_float32_matmul_precision(precision)
            torch.set_rng_state(random_state)
        self.model.requires_grad_(False)
        fill_parameters(dict(self.model.named_parameters()), seed)
        write_checkpoint(directory, self.state_dict(), sizes)

    def state_dict(self) -> dict[str, Tensor]:
        return self.model.state_dict()

    @contextlib.contextmanager
    def options(self, **options: Any) -> Iterator[None]:
        """Sets fields of RLinf's configuration for the time of the block (RLinf's loader sets them the same way)."""
        fields = self.model.config.__dict__
        unknown = options.keys() - fields.keys()
        assert not unknown, f"not fields of OpenPi0Config: {sorted(unknown)}"
        with mock.patch.dict(fields, options):
            yield

    def observation(self, batch: Batch) -> Any:
        from openpi.models import model as openpi_model

        return openpi_model.Observation.from_dict(
            {
                "image": {name: batch.pixels[:, i].clone() for i, name in enumerate(CAMERAS)},
                "image_mask": {name: torch.full((batch.size,), batch.camera_mask[i]) for i, name in enumerate(CAMERAS)},
                "state": batch.state,
                "tokenized_prompt": batch.input_ids,
                "tokenized_prompt_mask": batch.prompt_mask,
            }
        )

    def sample(self, batch: Batch, step: int | None, mode: str = "train", **options: Any) -> ReferenceOutput:
        """RLinf's ``sample_actions`` with this batch's noises; ``step`` is the SDE step that its ``random`` draws."""
        position = iter(range(batch.step_noise.shape[1]))

        def randint(low: int, high: int) -> int:
            assert step is not None, "RLinf draws a step in this mode"
            assert low <= step <= high, f"step {step} is outside RLinf's own range {low}..{high}"
            return step

        def sample_noise(shape: Any, device: Any) -> Tensor:
            noise = batch.step_noise[:, next(position)]
            assert tuple(shape) == tuple(noise.shape)
            return noise.to(device)

        with (
            self.options(num_steps=batch.step_noise.shape[1], **options),
            mock.patch.object(self.model, "sample_noise", sample_noise),
            mock.patch.object(self._module, "random", types.SimpleNamespace(randint=randint)),
        ):
            out = self.model.sample_actions(self.observation(batch), noise=batch.noise, mode=mode)
        assert next(position, None) is None, "RLinf drew fewer step noises than the batch holds"
        return ReferenceOutput(
            out["actions"], out["chains"], out["prev_logprobs"], out["prev_values"], out["denoise_inds"]
        )

    def rescore(
        self, batch: Batch, chains: Tensor, denoise_inds: Tensor, values: bool = True, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Log-probs (B, 1 or N+1, H, D) and values (B, 1 or N) of given chains."""
        return self.rescore_with_entropy(batch, chains, denoise_inds, values, **options)[:2]

    def rescore_with_entropy(
        self, batch: Batch, chains: Tensor, denoise_inds: Tensor, values: bool = True, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """RLinf's ``get_log_prob_value``: what :meth:`rescore` gives and the entropy, shaped like the log-probs."""
        with self.options(num_steps=batch.step_noise.shape[1], **options), torch.no_grad():
            images, masks, tokens, token_masks, state = self.model._preprocess_observation(
                self.observation(batch), train=False
            )
            return self.model.get_log_prob_value(
                images, masks, tokens, token_masks, state, chains, denoise_inds, values
            )
