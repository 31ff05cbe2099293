# SPDX-License-Identifier: Apache-2.0
"""The shipped example configs on a real (tiny) checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from rlinf_phyai.models.pi05.tiny import make_tiny_checkpoint

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "embodiment" / "config"
FULL = "libero_spatial_ppo_openpi_pi05_phyai"
TINY = f"{FULL}_tiny"

MakeConfig = Callable[..., DictConfig]


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def compose_examples() -> dict[str, DictConfig]:
    """Both examples as Hydra composes them."""
    with initialize_config_dir(str(EXAMPLES), version_base=None):
        return {name: compose(name) for name in (FULL, TINY)}


@pytest.fixture(scope="session")
def composed() -> dict[str, DictConfig]:
    """Both examples. Copy before changing one."""
    return compose_examples()


@pytest.fixture(autouse=True)
def no_openpi_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The tokenizer of the checkpoint is the only one, wherever the tests run."""
    monkeypatch.setenv("OPENPI_DATA_HOME", str(tmp_path / "no_cache"))
    monkeypatch.delenv("PHYAI_KERNEL_CONFIG", raising=False)


def config_maker(composed: dict[str, DictConfig], checkpoint: Path, folder: Path) -> MakeConfig:
    """``make(name, {key: value})``: an example on the checkpoint and reference kernels (a policy in ``folder``), changed."""
    policy = folder / "reference.yaml"
    policy.write_text("name: reference\noperations: {}\n")

    def make(name: str = FULL, changes: dict[str, Any] | None = None) -> DictConfig:
        cfg = OmegaConf.create(OmegaConf.to_container(composed[name], resolve=False))
        assert isinstance(cfg, DictConfig)
        change(cfg, {"actor.model.model_path": str(checkpoint), "rollout.phyai.kernel_policy": str(policy)})
        change(cfg, changes or {})
        return cfg

    return make


@pytest.fixture(scope="session")
def config(
    composed: dict[str, DictConfig], tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> MakeConfig:
    """See :func:`config_maker`."""
    return config_maker(composed, tiny_checkpoint, tmp_path_factory.mktemp("policy"))


REMOVED = object()


def change(cfg: DictConfig, changes: dict[str, Any]) -> None:
    """Set dotted keys; ``REMOVED`` deletes one."""
    for key, value in changes.items():
        if value is REMOVED:
            parent, _, name = key.rpartition(".")
            section = OmegaConf.select(cfg, parent) if parent else cfg
            del section[name]
        else:
            OmegaConf.update(cfg, key, value, merge=False, force_add=True)
