# SPDX-License-Identifier: Apache-2.0
"""Observations for a check: the real simulator, or noise where there is none."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from omegaconf import DictConfig, open_dict

SENTENCES = ("pick up the black bowl and place it on the plate", "turn on the stove", "open the drawer")


class RandomObservations:
    """Blocky random pictures and short sentences of different lengths; the actions change nothing."""

    def __init__(self, envs: int, seed: int = 0) -> None:
        self._envs = envs
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, actions: torch.Tensor | None) -> dict[str, Any]:
        def picture() -> torch.Tensor:
            small = torch.randint(0, 256, (self._envs, 16, 16, 3), generator=self._generator, dtype=torch.uint8)
            return small.repeat_interleave(16, 1).repeat_interleave(16, 2)

        return {
            "main_images": picture(),
            "wrist_images": picture(),
            "extra_view_images": None,
            "states": torch.randn(self._envs, 8, generator=self._generator),
            "task_descriptions": [SENTENCES[i % len(SENTENCES)] for i in range(self._envs)],
        }


@contextmanager
def libero_env(env_cfg: DictConfig, envs: int, **changes: Any) -> Iterator[Any]:
    """RLinf's ``LiberoEnv`` without videos, closed at the end.

    Args:
        env_cfg: ``env.train`` or ``env.eval``.
        envs: environments, each a process.
        changes: keys of a copy of ``env_cfg`` to set.
    """
    from rlinf.envs.libero.libero_env import LiberoEnv

    env_cfg = copy.deepcopy(env_cfg)
    with open_dict(env_cfg):
        env_cfg.update(total_num_envs=envs, group_size=1, **changes)
        env_cfg.video_cfg = {**dict(env_cfg.get("video_cfg") or {}), "save_video": False}
    env = LiberoEnv(env_cfg, envs, seed_offset=0, total_num_processes=1, worker_info=None)
    try:
        yield env
    finally:
        env.env.close()


def complete(observation: dict[str, Any]) -> dict[str, Any]:
    """RLinf's environment worker fills in what a simulator lacks; so does this."""
    return {"extra_view_images": None, **observation}


@contextmanager
def libero(cfg: DictConfig, envs: int) -> Iterator[Any]:
    """RLinf's LIBERO environments, driven by the policy's own actions.

    Args:
        cfg: the run's config; ``env.train`` names suite and options.
        envs: environments, each a process.
    """
    with libero_env(cfg.env.train, envs) as env:

        def observe(actions: torch.Tensor | None) -> dict[str, Any]:
            return complete(env.reset()[0] if actions is None else env.chunk_step(actions.numpy())[0][-1])

        yield observe
