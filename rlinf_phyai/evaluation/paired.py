# SPDX-License-Identifier: Apache-2.0
"""Engine and RLinf's own model on the same episodes with the same noise.

The engine plays an episode. At each of its observations RLinf's model computes its actions from the very noise that the
engine started from: the difference of the two is that of the computations alone. Then RLinf's model plays from the same
initial states with the same sequence of noises: the outcomes pair up. A long episode amplifies any rounding, so outcomes may
differ where actions hardly do.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rlinf_phyai.check.observations import complete, libero_env
from rlinf_phyai.evaluation.config import for_evaluation
from rlinf_phyai.evaluation.outcomes import Episode, Paired, pair

_NOT_REPEATED = "a renderer on a GPU may round pixels differently from frame to frame, everything else repeats where the simulator does"


class Episodes(Protocol):
    """A batch of B environments that play their episodes side by side, all to the end."""

    def reset(self) -> dict[str, Any]:
        """To the same initial states as at every reset; returns RLinf's observation."""

    def step(self, actions: Tensor) -> dict[str, Any]:
        """Executes a chunk of actions ``[B, c, d]``."""

    def outcomes(self) -> list[Episode]:
        """How the episodes since the last reset ended."""


@dataclass(frozen=True)
class PairedResult:
    """What both did.

    Attributes:
        engine, stock: their episodes, in the same order.
        max_difference, mean_difference: of an executed action's component, by chunk step of the engine's episodes.
        action_std: standard deviation of the engine's action components, to judge the differences by.
        start_difference: of every part of the first observations, the largest difference between what the two saw; of
            texts 1 where one differs.
    """

    engine: list[Episode]
    stock: list[Episode]
    max_difference: list[float]
    mean_difference: list[float]
    action_std: float
    start_difference: dict[str, float]

    @property
    def paired(self) -> Paired:
        return pair(self.engine, self.stock)

    @property
    def same_start(self) -> bool:
        """Whether both saw the same bits first."""
        return not any(self.start_difference.values())


class StockPolicy:
    """RLinf's model as its rollout worker holds it, with the noise given."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model: Any = model.eval()

    def act(self, observation: dict[str, Any], noise: Tensor) -> Tensor:
        """Actions float64 ``[B, c, d]`` from the initial noise ``[B, H, D]``; the denoise steps of an evaluation add none."""

        def given(shape: Any, device: Any) -> Tensor:
            if tuple(shape) != tuple(noise.shape):
                raise ValueError(
                    f"RLinf's model asks for noise of shape {tuple(shape)}, given is {tuple(noise.shape)}."
                )
            return noise.to(device)

        drawn, self._model.sample_noise = self._model.sample_noise, given
        try:
            with torch.no_grad():
                actions, _ = self._model.predict_action_batch(observation, mode="eval", compute_values=False)
        finally:
            self._model.sample_noise = drawn
        return torch.as_tensor(actions).double().cpu()


def play_both(policy: Any, stock: StockPolicy, episodes: Episodes, steps: int) -> PairedResult:
    """One batch of episodes by each policy.

    Args:
        policy: from :func:`rlinf_phyai.rollout.build.build_policy`, of the same weights as ``stock``.
        steps: chunk steps of an episode.
    """
    noises, largest, mean, taken = [], [], [], []
    observation = first = episodes.reset()
    for _ in range(steps):
        actions, result = policy.predict_action_batch(observation, mode="eval")
        noise = result["forward_inputs"]["chains"][:, 0]
        difference = (stock.act(observation, noise) - actions).abs()
        largest.append(float(difference.max()))
        mean.append(float(difference.mean()))
        noises.append(noise)
        taken.append(actions)
        observation = episodes.step(actions)
    engine = episodes.outcomes()

    observation = again = episodes.reset()
    for noise in noises:
        observation = episodes.step(stock.act(observation, noise))
    start = {name: _difference(value, again[name]) for name, value in first.items()}
    spread = float(torch.cat(taken).flatten(0, 1).std(dim=0).mean())
    return PairedResult(engine, episodes.outcomes(), largest, mean, spread, start)


def _difference(first: Any, again: Any) -> float:
    if isinstance(first, Tensor):
        return float((first.double() - again.double()).abs().max())
    return float(first != again)


class LiberoEpisodes:
    """RLinf's LIBERO environments in evaluation order: the first B initial states, one environment each."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._states = env.reset_state_ids_all[0][: env.num_envs]
        self._infos: dict[str, Any] = {}

    def reset(self) -> dict[str, Any]:
        self._env.is_start = False  # the states are named here, not drawn
        return complete(self._env.reset(reset_state_ids=self._states)[0])

    def step(self, actions: Tensor) -> dict[str, Any]:
        observations, *_, infos = self._env.chunk_step(actions.numpy())
        self._infos = infos[-1]["episode"]
        return complete(observations[-1])

    def outcomes(self) -> list[Episode]:
        columns = (self._env.task_ids, self._env.trial_ids, self._infos["success_once"], self._infos["episode_len"])
        return [Episode(int(a), int(b), bool(c), int(d)) for a, b, c, d in zip(*columns, strict=True)]


def run_pair(cfg: Any, envs: int) -> PairedResult:
    """Build both policies of an evaluation config in this process and let them play ``envs`` episodes each.

    Raises:
        PhyaiError: the config is refused.
    """
    from rlinf_phyai.driver import launch

    for_evaluation(cfg)
    launch.prepare()
    launch.validate(cfg)
    launch.absolute_paths(cfg)
    from rlinf.models import get_model

    from rlinf_phyai.rollout.build import build_policy, rollout_model_config

    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    model_config = cfg.rollout.model
    # The simulator first: its processes should not inherit two models.
    rules = {"is_eval": True, "auto_reset": False, "ignore_terminations": True}  # play on after a success
    with libero_env(cfg.env.eval, envs, **rules) as env:
        model = get_model(rollout_model_config(cfg, model_config))
        if cfg.runner.get("ckpt_path"):
            model.load_state_dict(torch.load(cfg.runner.ckpt_path, map_location="cpu", weights_only=True))
        stock = StockPolicy(model.to(device))
        policy = build_policy(cfg, model_config, device, rank=0, worker_batch_size=envs)
        try:
            steps = cfg.env.eval.max_episode_steps // model_config.num_action_chunks
            return play_both(policy, stock, LiberoEpisodes(env), steps)
        finally:
            policy.engine.close()


def print_pair(result: PairedResult) -> None:
    """Actions first, then outcomes."""
    paired, largest = result.paired, result.max_difference
    print(f"{paired.episodes} episodes by each policy, the same initial states and noises")
    differing = ", ".join(f"{name} by up to {value:g}" for name, value in result.start_difference.items() if value)
    print("first observations: " + (f"they differ in {differing}; {_NOT_REPEATED}" if differing else "the same bits"))
    print(
        f"|engine - RLinf's model| of an action component on the engine's observations: mean"
        f" {sum(result.mean_difference) / len(largest):.3g}, largest {max(largest):.3g} (first step {largest[0]:.3g});"
        f" the actions' standard deviation is {result.action_std:.3g}"
    )
    print(
        f"solved by both {paired.both}, only the engine {paired.only_first}, only RLinf's model {paired.only_second},"
        f" neither {paired.neither}; exact McNemar test p = {paired.p_value:.3g}"
    )


def write_pair(result: PairedResult, file: Path) -> None:
    """Everything as JSON."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**asdict(result), "paired": asdict(result.paired)}, indent=1) + "\n")
