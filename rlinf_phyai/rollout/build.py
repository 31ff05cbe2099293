# SPDX-License-Identifier: Apache-2.0
"""From the run's config to a loaded policy."""

from __future__ import annotations

import copy
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf, open_dict

from rlinf_phyai.actor.values import choose_value_source
from rlinf_phyai.engine import DeviceConfig, Engine, EngineArgs, EngineConfig, RuntimeConfig
from rlinf_phyai.models.pi05 import PI05Args
from rlinf_phyai.models.pi05.configuration import NOISE_METHODS
from rlinf_phyai.models.pi05.stated_sizes import actor_params_dtype
from rlinf_phyai.rollout.observation import make_transforms
from rlinf_phyai.rollout.openpi_setup import load_openpi_setup
from rlinf_phyai.rollout.policy import PhyaiPolicy, PolicyOptions
from rlinf_phyai.rollout.sampling import FlowSampler, NoiseAnnealing, SamplingOptions

_DTYPES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp32": torch.float32, "float32": torch.float32}
_ACTOR_CAMERAS = 3  # openpi's PI0.5 always embeds three images; a data config masks those it lacks


def rollout_model_config(cfg: DictConfig, model_config: DictConfig) -> DictConfig:
    """The model section that the rollout uses: the actor's with the rollout's own path and precision, as in RLinf."""
    merged = copy.deepcopy(model_config)
    with open_dict(merged):
        merged.model_path = cfg.rollout.model.model_path
        merged.precision = cfg.rollout.model.get("precision")
    return merged


def build_policy(
    cfg: DictConfig, model_config: DictConfig, device: torch.device | str, rank: int, worker_batch_size: int
) -> PhyaiPolicy:
    """Loads an engine and everything around it.

    Args:
        cfg: the whole run config; ``rollout.phyai`` holds the backend's own options.
        model_config: ``actor.model``, or ``rollout.model`` where a run only evaluates.
        device: of the engine, for example ``cuda:0`` or ``cpu``.
        rank: of the rollout worker; seeds its random numbers together with ``actor.seed``.
        worker_batch_size: environments of this worker, used where ``rollout.phyai.max_batch_size`` is null.

    Raises:
        ValueError: options that the engine does not implement, or that contradict each other.
        PhyaiError: checkpoint, kernel policy or memory problems of the engine.
    """
    from rlinf.models.embodiment.openpi.openpi_action_model import OpenPi0ForRLActionPrediction

    model_config = rollout_model_config(cfg, model_config)
    options = cfg.rollout.get("phyai") or OmegaConf.create({})
    setup = load_openpi_setup(model_config)
    config = setup.config
    check_supported(vars(config))
    device = torch.device(device)
    transforms = make_transforms(setup, device)
    if transforms.used_cameras not in (None, config.num_images_in_input):
        raise ValueError(
            f"actor.model.openpi.num_images_in_input is {config.num_images_in_input}, but data config"
            f" {config.config_name!r} has {transforms.used_cameras} real cameras; set it to"
            f" {transforms.used_cameras}, or the critic averages over the wrong images"
        )
    critic = critic_of(vars(config))
    value_source = choose_value_source(
        options.get("value_source", "auto"),
        recompute=bool(OmegaConf.select(cfg, "algorithm.recompute_logprobs")),
        comparable=critic == "vlm" and OmegaConf.select(cfg, "algorithm.adv_type") == "gae",
    )
    policy_options = PolicyOptions(
        action_chunk=config.action_chunk,
        action_env_dim=config.action_env_dim,
        joint_logprob=config.joint_logprob,
        critic=critic,
        value_source=value_source,
        logprob_offset=float(options.get("debug_logprob_offset", 0.0)),
    )
    sampling = SamplingOptions(
        config.num_steps,
        config.noise_level,
        config.joint_logprob,
        config.ignore_last,
        trains=not cfg.runner.get("only_eval", False),
        noise_method=config.noise_method,
        annealing=NoiseAnnealing(*config.noise_params) if config.noise_anneal else None,
    )
    seed = int(OmegaConf.select(cfg, "actor.seed", default=0))
    engine = Engine(
        EngineArgs(
            plugin="pi05",
            plugin_args=PI05Args(
                checkpoint_dir=str(model_config.model_path),
                max_batch_size=int(options.get("max_batch_size") or max(worker_batch_size, 1)),
                capture_rollout=True,
                num_steps=config.num_steps,
                action_horizon=config.action_horizon,
                action_chunk=config.action_chunk,
                action_env_dim=config.action_env_dim,
                tokenizer_max_length=config.max_token_len,
                num_cameras=_ACTOR_CAMERAS,
                value_mode={"vlm": config.value_vlm_mode, "expert": "expert", None: None}[critic],
                chunk_critic_input=config.chunk_critic_input,
                noise_method=config.noise_method,
                noise_std_range=tuple(config.noise_logvar_range),
                weights=cfg.runner.get("ckpt_path"),
                prefix_precision=options.get("prefix_precision"),
            ),
            config=EngineConfig(
                device=DeviceConfig(
                    target=str(device), params_dtype=params_dtype(options.get("params_dtype"), model_config.model_path)
                ),
                runtime=RuntimeConfig(
                    use_cuda_graph=bool(options.get("use_cuda_graph", True)),
                    kernel_policy=options.get("kernel_policy"),
                    seed=seed,
                    progress=bool(options.get("progress", True)) and rank == 0,
                ),
            ),
        )
    )
    # RLinf's own renaming of the environment's observation; it reads nothing but the data config's name.
    stand_in: Any = types.SimpleNamespace(config=config)
    return PhyaiPolicy(
        engine,
        transforms,
        FlowSampler(sampling, (config.action_horizon, config.action_dim), seed, rank, device),
        policy_options,
        rename=types.MethodType(OpenPi0ForRLActionPrediction.obs_processor, stand_in),
    )


def critic_of(openpi: Mapping[str, Any]) -> Any:
    """``"vlm"``, ``"expert"`` or None, from the fields of RLinf's ``OpenPi0Config``."""
    if not openpi["add_value_head"]:
        return None
    return "vlm" if openpi["value_after_vlm"] else "expert"


def check_supported(openpi: Mapping[str, Any]) -> None:
    """Refuses options of RLinf's ``OpenPi0Config`` that the engine would not compute as the actor does.

    Raises:
        ValueError: all such options at once, each with the reason.
    """
    problems = []
    if openpi["noise_method"] not in NOISE_METHODS:
        problems.append(f"openpi.noise_method is {openpi['noise_method']!r}; the engine has {', '.join(NOISE_METHODS)}")
    for name in ("safe_get_logprob", "double_layer", "use_dsrl", "is_nft"):
        if openpi[name]:
            problems.append(f"openpi.{name} is on; the engine does not implement it")
    if problems:
        raise ValueError(
            f"not supported by rollout.rollout_backend phyai: {'; '.join(problems)}. Change the option or use"
            " rollout_backend: huggingface"
        )


def params_dtype(name: str | None, checkpoint_dir: str | Path) -> torch.dtype:
    """Type of the engine's large matrices: as named, else the one in which the actor holds them.

    Raises:
        ValueError: an unknown name.
    """
    name = actor_params_dtype(checkpoint_dir) if name is None else name
    if name not in _DTYPES:
        raise ValueError(f"rollout.phyai.params_dtype is {name!r}; allowed: {', '.join(_DTYPES)} or null")
    return _DTYPES[name]
