# SPDX-License-Identifier: Apache-2.0
"""The entry points validate before anything else."""

import pytest
from omegaconf import OmegaConf

from rlinf_phyai.driver import launch
from rlinf_phyai.validation import ConfigError
from tests.unit.validation.conftest import TINY, MakeConfig


def test_warnings_are_printed(
    config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "cluster_gpus", lambda cfg: 0)
    launch.validate(config(TINY, {"rollout.phyai.debug_logprob_offset": 0.01}))
    line = capsys.readouterr().out
    assert line.startswith("[rlinf-phyai] warning: rollout.phyai.debug_logprob_offset is 0.01;")


def test_a_wrong_backend_is_listed_with_everything_else(config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "prepare", lambda: None)
    cfg = config(
        TINY, {"rollout.rollout_backend": "phyia", "env.train.total_num_envs": 0.5, "reward.use_reward_model": True}
    )
    with pytest.raises(ConfigError) as raised, launch.worker_groups(cfg, ("actor", "rollout", "env")):
        pass
    assert [p.key for p in raised.value.problems] == ["rollout.rollout_backend", "reward.use_reward_model"]


def test_a_value_that_cannot_be_resolved_is_no_traceback(config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "prepare", lambda: None)
    cfg = config(TINY, {"actor.model.model_path": "${oc.env:PHYAI_TEST_UNSET}"})
    with pytest.raises(ConfigError, match="PHYAI_TEST_UNSET"), launch.worker_groups(cfg, ("actor", "rollout", "env")):
        pass


def test_gpus_are_counted_on_one_node_only() -> None:
    torch = pytest.importorskip("torch")
    one = launch.cluster_gpus(OmegaConf.create({"cluster": {"num_nodes": 1}}))
    if not torch.cuda.is_available():
        assert one == 0
    assert launch.cluster_gpus(OmegaConf.create({"cluster": {"num_nodes": 2}})) is None
    assert launch.cluster_gpus(OmegaConf.create({})) is None
