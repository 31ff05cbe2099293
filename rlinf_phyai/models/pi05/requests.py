# SPDX-License-Identifier: Apache-2.0
"""What a caller hands to the engine and what comes back, with every check that needs no computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from rlinf_phyai.errors import RequestError
from rlinf_phyai.models.pi05.configuration import PI05Config
from rlinf_phyai.models.pi05.finite import non_finite_rows

PREFIX_PRECISIONS = (None, "fp8")


@dataclass(frozen=True)
class PI05Args:
    """Arguments of the ``pi05`` plugin. ``None`` takes the value of the checkpoint (or its documented default).

    Args:
        checkpoint_dir: directory with the weights (layouts: ``checkpoint.py``).
        max_batch_size: largest batch of one call; larger requests are refused.
        capture_rollout: prepare ``rollout_step`` (CUDA graphs of it are captured at start instead of those of ``step``).
        num_steps: denoise steps of ``step``; ``rollout_step`` takes them from ``sigmas``.
        action_horizon, action_chunk, action_env_dim, tokenizer_max_length, num_cameras: see :class:`PI05Config`.
        value_mode: critic input, one of ``mean_token``, ``last_token``, ``first_token``, ``expert``.
        chunk_critic_input: critic after the expert pools the first ``action_chunk`` outputs only.
        noise_method, noise_std_range: noise of ``rollout_step``, see :class:`PI05Config`.
        weights: ``.pt`` state dict loaded on top of the checkpoint, any subset of the parameters.
        prefix_precision: ``"fp8"`` multiplies the prefix's MLPs in FP8 (Hopper GPUs; emulated on a CPU), a model that differs a
            little more from the actor's; None leaves them in the parameters' type.
    """

    checkpoint_dir: str | Path
    max_batch_size: int
    capture_rollout: bool = False
    num_steps: int | None = None
    action_horizon: int | None = None
    action_chunk: int | None = None
    action_env_dim: int | None = None
    tokenizer_max_length: int | None = None
    num_cameras: int | None = None
    value_mode: str | None = None
    chunk_critic_input: bool | None = None
    noise_method: str | None = None
    noise_std_range: tuple[float, float] | None = None
    weights: str | Path | None = None
    prefix_precision: str | None = None

    def __post_init__(self) -> None:
        if self.prefix_precision not in PREFIX_PRECISIONS:
            raise RequestError(
                f"PI05Args.prefix_precision is {self.prefix_precision!r}; allowed: None (as params_dtype) or 'fp8'."
            )
        if type(self.max_batch_size) is not int or self.max_batch_size < 1:
            raise RequestError(
                f"PI05Args.max_batch_size is {self.max_batch_size!r}; it must be an integer of at least 1."
            )

    def usual_cameras(self, num_cameras: int) -> int:
        """Images of a usual observation on a model of ``num_cameras``: a rollout leaves the masked ones out, LIBERO has two."""
        return min(2, num_cameras) if self.capture_rollout else num_cameras

    def overrides(self) -> dict[str, object]:
        """The fields that replace those of the checkpoint's configuration."""
        names = (
            "num_steps", "action_horizon", "action_chunk", "action_env_dim", "tokenizer_max_length", "num_cameras",
            "value_mode", "chunk_critic_input", "noise_method", "noise_std_range",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class PI05Request:
    """Observations of one call.

    Args:
        pixel_values: float [B, C, 3, S, S] in [-1, 1]; C used cameras, or all cameras with ``image_masks``.
        input_ids: int64 [B, L], right-padded with 0, L at most the tokenizer's length.
        lang_lens: int64 or int32 [B], valid tokens, 1..L. A CPU tensor avoids a device synchronisation.
        noise: float32 [B, H, D], start of the denoising; None draws it from the engine's generator.
        image_masks: bool [C] or [B, C] (the same for all samples); False = masked camera, not computed. Its pixels are not
            read: a masked camera counts as a black image.
        state: float32 [B, D], the normalised and padded robot state: required by PI0, None for PI0.5.
    """

    pixel_values: Tensor
    input_ids: Tensor
    lang_lens: Tensor
    noise: Tensor | None = None
    image_masks: Tensor | Sequence[bool] | None = None
    state: Tensor | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class PI05RolloutRequest(PI05Request):
    """A request whose whole denoising trajectory is wanted.

    Exact replay needs ``noise``, ``step_noise`` and the step choice: with all of them given, two calls agree bit for bit.

    Args:
        sigmas: float32 [B, N], noise scale of each step, 0 = deterministic step; required by ``flow_sde`` and ``flow_cps`` (there
            within 0..1), None with ``flow_noise``, whose scale is learned.
        step_noise: float32 [B, N, H, D]; None draws it from the engine's generator.
        compute_value: whether the critic's value is wanted.
        stochastic_steps: bool [B, N], the steps that ``flow_noise`` makes stochastic; None = each of the model's ``num_steps``.
    """

    sigmas: Tensor | None = None
    step_noise: Tensor | None = None
    compute_value: bool = True
    stochastic_steps: Tensor | None = None


@dataclass(frozen=True)
class PI05RolloutOutput:
    """Result of ``rollout_step``; float32 on the engine's device.

    actions [B, H, D]; chains [B, N + 1, H, D] from noise to actions; log_probs [B, N, H, D] per element and transition, exactly 0 on
    deterministic steps; values [B, 1] (critic after the VLM), [B, N] (after the expert) or None.
    """

    actions: Tensor
    chains: Tensor
    log_probs: Tensor
    values: Tensor | None


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(tensor, Tensor):
        raise RequestError(f"{name} is a {type(tensor).__name__}; a torch.Tensor of shape {shape} is needed.")
    if tuple(tensor.shape) != shape:
        raise RequestError(f"{name} has shape {tuple(tensor.shape)}; expected {shape}.")
    if tensor.dtype not in dtypes:
        raise RequestError(f"{name} has dtype {tensor.dtype}; allowed: {', '.join(map(str, dtypes))}.")
    if tensor.is_meta:
        raise RequestError(
            f"{name} is a meta tensor, which holds no data; pass a tensor on the CPU or on the engine's device."
        )


def _expect_dense(request: PI05Request) -> None:
    for name, value in vars(request).items():
        if isinstance(value, Tensor) and (value.is_nested or value.layout is not torch.strided):
            kind = "nested" if value.is_nested else str(value.layout)
            raise RequestError(f"{name} is a {kind} tensor; a dense (torch.strided) one is needed.")


def _used_cameras(request: PI05Request, config: PI05Config) -> list[int]:
    cameras = request.pixel_values.shape[1]
    if request.image_masks is None:
        return list(range(cameras))
    try:
        masks = torch.as_tensor(request.image_masks, dtype=torch.bool).cpu()
    except (TypeError, ValueError, RuntimeError) as error:  # text, None, rows of unequal length, a tensor without data
        raise RequestError(
            f"image_masks cannot be read as booleans ({error}); expected bool ({cameras},) or (batch, {cameras})."
        ) from error
    if masks.shape not in ((cameras,), (request.pixel_values.shape[0], cameras)):
        raise RequestError(f"image_masks has shape {tuple(masks.shape)}; expected ({cameras},) or (batch, {cameras}).")
    rows = masks.view(-1, cameras)
    if not bool((rows == rows[0]).all()):
        raise RequestError(
            "image_masks differs between samples; one call needs the same used cameras for all of its samples."
        )
    used = [i for i, flag in enumerate(rows[0].tolist()) if flag]
    if used != list(range(len(used))):
        raise RequestError(
            f"image_masks uses cameras {used}; the used cameras must come first, before the masked ones."
        )
    return used


@dataclass(frozen=True)
class CheckedRequest:
    """A request after its checks: sizes known on the host, tensors on the engine's device.

    ``sigmas`` [B, N] is 0 on deterministic steps for every noise method, and 1 on the others for ``flow_noise``.
    """

    batch: int
    cameras: int
    max_lang: int
    pixels: Tensor
    input_ids: Tensor
    lang_lens: Tensor
    noise: Tensor | None
    sigmas: Tensor | None
    step_noise: Tensor | None
    state: Tensor | None


def check_request(
    request: PI05Request, config: PI05Config, max_batch_size: int, device: torch.device, check_finite: bool
) -> CheckedRequest:
    """Checks a request and moves it to ``device``.

    Raises:
        RequestError: anything that does not fit, naming the field, what was found and what is allowed.
    """
    if not isinstance(request, PI05Request):
        raise RequestError(f"the request is a {type(request).__name__}; a PI05Request or PI05RolloutRequest is needed.")
    _expect_dense(request)
    pixels = request.pixel_values
    if not isinstance(pixels, Tensor) or pixels.ndim != 5:
        found = tuple(pixels.shape) if isinstance(pixels, Tensor) else type(pixels).__name__
        raise RequestError(
            f"pixel_values is {found}; expected a tensor (batch, cameras, 3, {config.vision.image_size}, same)."
        )
    batch, cameras = pixels.shape[:2]
    if not 1 <= batch <= max_batch_size:
        raise RequestError(
            f"the batch holds {batch} observations; allowed: 1..{max_batch_size} (max_batch_size). Split it or build a larger engine."
        )
    if not 1 <= cameras <= config.num_cameras:
        raise RequestError(f"pixel_values has {cameras} cameras; allowed: 1..{config.num_cameras} (num_cameras).")
    size = config.vision.image_size
    _expect("pixel_values", pixels, (batch, cameras, 3, size, size), (torch.float32, torch.bfloat16, torch.float16))
    used = _used_cameras(request, config)
    if not used:
        raise RequestError("image_masks masks every camera; at least one must be used.")

    ids = request.input_ids
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        raise RequestError(
            f"input_ids must be an int64 tensor (batch, length); found {getattr(ids, 'shape', type(ids).__name__)}."
        )
    length = ids.shape[1]
    _expect("input_ids", ids, (batch, length), (torch.int64,))
    if not 1 <= length <= config.tokenizer_max_length:
        raise RequestError(
            f"input_ids has length {length}; allowed: 1..{config.tokenizer_max_length} (tokenizer_max_length)."
        )
    _expect("lang_lens", request.lang_lens, (batch,), (torch.int64, torch.int32))
    lens = request.lang_lens.cpu()
    if int(lens.min()) < 1 or int(lens.max()) > length:
        raise RequestError(
            f"lang_lens holds {lens.tolist()}; every value must be in 1..{length}, the length of input_ids."
        )
    _check_padding(ids, lens, config.vocab_size)

    noise = request.noise
    if noise is not None:
        _expect("noise", noise, (batch, config.action_horizon, config.action_dim), (torch.float32,))
    state = request.state
    if config.pi05 != (state is None):
        problem = "missing; PI0 needs" if state is None else "given; PI0.5 reads it from the prompt, only PI0 takes"
        raise RequestError(f"state is {problem} a float32 tensor ({batch}, {config.action_dim}).")
    if state is not None:
        _expect("state", state, (batch, config.action_dim), (torch.float32,))
        _check_state(state)
    sigmas, step_noise = _check_rollout(request, batch, config)
    checked = CheckedRequest(
        batch=batch,
        cameras=len(used),
        max_lang=int(lens.max()),
        pixels=pixels[:, : len(used)].to(device, non_blocking=True),
        input_ids=ids.to(device, non_blocking=True),
        lang_lens=request.lang_lens.to(device, non_blocking=True),
        noise=None if noise is None else noise.to(device, non_blocking=True),
        sigmas=None if sigmas is None else sigmas.to(device, non_blocking=True),
        step_noise=None if step_noise is None else step_noise.to(device, non_blocking=True),
        state=None if state is None else state.to(device, non_blocking=True),
    )
    if check_finite:
        _check_values(checked, config)
    return checked


def _check_padding(ids: Tensor, lens: Tensor, vocab_size: int) -> None:
    """Content of the ids, for ids on the CPU; on a device the check would stall every step, so it is left to ``check_finite``."""
    if ids.device.type != "cpu":
        return
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise RequestError(
            f"input_ids holds ids in {int(ids.min())}..{int(ids.max())}; the vocabulary has 0..{vocab_size - 1}."
        )
    padded = torch.arange(ids.shape[1], device=lens.device)[None] >= lens[:, None]
    if bool((ids.masked_fill(~padded, 0) != 0).any()):
        raise RequestError(
            "input_ids must be right-padded with 0: some positions at or behind lang_lens hold other ids."
        )


def _check_state(state: Tensor) -> None:
    """Content of the state, for one on the CPU, where the simulators leave it; see :func:`_check_padding`."""
    if state.device.type != "cpu":
        return
    bad = non_finite_rows(state)
    if bad:
        raise RequestError(
            f"state holds NaN or infinite values in the samples {bad}; every value must be finite. It is the robot's state after "
            "normalisation: look at what the simulator reported, then at norm_stats.json."
        )


def _check_rollout(request: PI05Request, batch: int, config: PI05Config) -> tuple[Tensor | None, Tensor | None]:
    if not isinstance(request, PI05RolloutRequest):
        return None, None
    steps = request.stochastic_steps
    if config.noise_method == "flow_noise":
        sigmas = _check_steps(request, batch, config)
    elif steps is not None:
        raise RequestError(f"stochastic_steps belongs to flow_noise; noise_method {config.noise_method} takes sigmas.")
    else:
        sigmas = _checked_sigmas(request, batch, config)
    if request.step_noise is not None:
        shape = (batch, sigmas.shape[1], config.action_horizon, config.action_dim)
        _expect("step_noise", request.step_noise, shape, (torch.float32,))
    return sigmas, request.step_noise


def _check_steps(request: PI05RolloutRequest, batch: int, config: PI05Config) -> Tensor:
    """The step choice of flow-noise as float32 [B, N]."""
    steps = request.stochastic_steps
    if request.sigmas is not None:
        raise RequestError(
            "sigmas must be None with noise_method flow_noise; stochastic_steps says which steps are noisy."
        )
    if steps is None:
        return torch.ones(batch, config.num_steps)
    if not isinstance(steps, Tensor) or steps.ndim != 2 or steps.shape[1] < 1:
        raise RequestError("stochastic_steps must be a bool tensor (batch, denoise steps), or None for all steps.")
    _expect("stochastic_steps", steps, (batch, steps.shape[1]), (torch.bool,))
    return steps.float()


def _checked_sigmas(request: PI05RolloutRequest, batch: int, config: PI05Config) -> Tensor:
    sigmas = request.sigmas
    if not isinstance(sigmas, Tensor) or sigmas.ndim != 2 or sigmas.shape[1] < 1:
        raise RequestError("sigmas is required: float32 (batch, denoise steps), 0 for a deterministic step.")
    _expect("sigmas", sigmas, (batch, sigmas.shape[1]), (torch.float32,))
    if sigmas.device.type == "cpu":
        _check_sigmas(sigmas, config)
    return sigmas


def _check_values(request: CheckedRequest, config: PI05Config) -> None:
    """What only the content tells, on whatever device it lies: finite numbers, sigmas >= 0, ids and padding."""
    named = {
        "pixel_values": request.pixels,
        "noise": request.noise,
        "step_noise": request.step_noise,
        "state": request.state,
    }
    for name, tensor in named.items():
        if tensor is not None and not bool(torch.isfinite(tensor).all()):
            raise RequestError(f"{name} holds NaN or infinite values.")
    if request.sigmas is not None:
        _check_sigmas(request.sigmas, config)
    _check_padding(request.input_ids.cpu(), request.lang_lens.cpu(), config.vocab_size)


def _check_sigmas(sigmas: Tensor, config: PI05Config) -> None:
    if not bool((torch.isfinite(sigmas) & (sigmas >= 0)).all()):
        raise RequestError("sigmas holds negative or non-finite values; every value must be a finite number >= 0.")
    if config.noise_method == "flow_cps" and bool((sigmas > 1).any()):
        raise RequestError(
            f"sigmas holds {float(sigmas.max())}; flow_cps shares the noise out, so at most 1 is allowed."
        )
