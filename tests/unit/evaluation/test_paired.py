# SPDX-License-Identifier: Apache-2.0
"""Engine and RLinf's model of the same weights, side by side, on the tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_phyai.check.observations import RandomObservations
from rlinf_phyai.config_files import load_config
from rlinf_phyai.evaluation.config import for_evaluation
from rlinf_phyai.evaluation.outcomes import Episode
from rlinf_phyai.evaluation.paired import PairedResult, StockPolicy, play_both, print_pair, write_pair

TINY = "libero_spatial_ppo_openpi_pi05_phyai_tiny"
ENVS, STEPS = 3, 2


class Toy:
    """Pictures that do not depend on the actions; solved where the actions sum up to more than their median."""

    def reset(self) -> dict[str, Any]:
        self._observe = RandomObservations(ENVS, seed=3)
        self._sums = torch.zeros(ENVS, dtype=torch.float64)
        return self._observe(None)

    def step(self, actions: torch.Tensor) -> dict[str, Any]:
        self._sums += actions.sum(dim=(1, 2))
        return self._observe(actions)

    def outcomes(self) -> list[Episode]:
        middle = float(self._sums.median())
        return [Episode(env, 0, bool(total > middle + 0.01), 10) for env, total in enumerate(self._sums)]


@pytest.fixture(scope="module")
def cfg(tiny_checkpoint: Path, repository: Path) -> Any:
    from rlinf_phyai import plugin

    plugin.register()
    folder = str(repository / "examples" / "embodiment" / "config")
    cfg = load_config(TINY, [f"actor.model.model_path={tiny_checkpoint}"], folder)
    for_evaluation(cfg)
    return cfg


@pytest.fixture(scope="module")
def play(cfg: Any) -> Iterator[Callable[..., PairedResult]]:
    """``play(shift)``: both policies play; ``shift`` is added to a bias of RLinf's model."""
    from rlinf.models import get_model

    from rlinf_phyai.rollout.build import build_policy

    policy = build_policy(cfg, cfg.rollout.model, "cpu", rank=0, worker_batch_size=ENVS)
    model: Any = get_model(cfg.rollout.model)

    def both(shift: float = 0.0) -> PairedResult:
        with torch.no_grad():
            model.action_out_proj.bias += shift
            try:
                return play_both(policy, StockPolicy(model), Toy(), STEPS)
            finally:
                model.action_out_proj.bias -= shift

    yield both
    policy.engine.close()


def test_two_correct_policies_act_alike(play: Callable[..., PairedResult], tmp_path: Path, capsys: Any) -> None:
    result = play()
    assert len(result.max_difference) == STEPS
    assert max(result.max_difference) < 1e-5 < 1e-3 < result.action_std
    assert result.same_start
    assert set(result.start_difference) == set(Toy().reset())
    assert result.engine == result.stock
    assert (result.paired.both, result.paired.neither) == (1, 2)
    print_pair(result)
    assert "solved by both 1, only the engine 0, only RLinf's model 0, neither 2" in capsys.readouterr().out
    write_pair(result, tmp_path / "logs" / "compare.json")
    assert json.loads((tmp_path / "logs" / "compare.json").read_text())["paired"]["both"] == 1


def test_another_start_shows(play: Callable[..., PairedResult], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    reset, seen = Toy.reset, []

    def other(self: Toy) -> dict[str, Any]:
        observation = reset(self)
        seen.append(observation)
        return observation if len(seen) == 1 else observation | {"main_images": observation["main_images"] ^ 2}

    monkeypatch.setattr(Toy, "reset", other)
    result = play()
    assert not result.same_start
    assert {name: value for name, value in result.start_difference.items() if value} == {"main_images": 2.0}
    print_pair(result)
    assert "they differ in main_images by up to 2;" in capsys.readouterr().out


def test_another_weight_shows(play: Callable[..., PairedResult]) -> None:
    assert max(play(shift=0.05).max_difference) > 1e-3


def test_noise_of_another_shape_is_refused(cfg: Any) -> None:
    from rlinf.models import get_model

    stock = StockPolicy(get_model(cfg.rollout.model))
    with pytest.raises(ValueError, match="shape"):
        stock.act(RandomObservations(ENVS)(None), torch.zeros(ENVS, 3, 32))
