# SPDX-License-Identifier: Apache-2.0
"""Installed from a wheel and as an editable checkout, each into a fresh environment."""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from rlinf_phyai import __version__

PROBE = """
import json, sys
from importlib.metadata import entry_points
import hydra, rlinf_phyai
from hydra.core.global_hydra import GlobalHydra
from rlinf_phyai.paths import config_dir

with hydra.initialize_config_dir(sys.argv[1], version_base="1.3"):
    loader = GlobalHydra.instance().config_loader()
    ours = [s.path for s in loader.get_search_path().get_path() if s.provider == "rlinf-phyai"]
    groups = {g: sorted(loader.get_group_options(g)) for g in ("hybrid_engines", "kernel_policy", "env", "model")}
    composed = hydra.compose("user")
backend = [e.value for e in entry_points(group="rlinf.rollout_backends") if e.name == "phyai"]
print(json.dumps({
    "package": rlinf_phyai.__file__, "config": str(config_dir()), "ours": ours, "groups": groups, "backend": backend,
    "env": composed.env.name, "engine_keys": sorted(composed.rollout.phyai), "torch": "torch" in sys.modules,
}))
"""


def make_environment(folder: Path) -> Path:
    """A fresh virtual environment that sees this one's packages but not its rlinf-phyai; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    # A folder added this way has its own .pth files left alone, so an editable rlinf-phyai in it stays invisible.
    (site / "zz_outer.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder / "bin" / "python"


def install(python: Path, *what: str) -> None:
    command = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "install",
        "--quiet",
        "--offline",
        "--no-deps",
        "--no-build-isolation",
    ]
    subprocess.run([*command, "--python", str(python), *what], check=True)


def run(python: Path, *arguments: str, cwd: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    result = subprocess.run(
        [str(python), *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


@pytest.fixture
def user_config(tmp_path: Path) -> Path:
    """A user's own config folder with its own env/ group, naming ours."""
    folder = tmp_path / "my_config"
    (folder / "env").mkdir(parents=True)
    (folder / "env" / "mine.yaml").write_text("name: mine\n")
    (folder / "user.yaml").write_text("defaults:\n  - env: mine\n  - hybrid_engines/phyai@rollout.phyai\n  - _self_\n")
    return folder


def test_wheel_holds_the_package_the_plugin_and_the_groups(wheel: Path, root: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        "rlinf_phyai",
        "hydra_plugins",
        f"rlinf_phyai-{__version__}.dist-info",
    }
    assert "hydra_plugins/rlinf_phyai_searchpath.py" in names
    assert "hydra_plugins/__init__.py" not in names  # a namespace package, shared with other plugins
    assert "rlinf_phyai/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    shipped = {name.removeprefix("rlinf_phyai/config/") for name in names if name.startswith("rlinf_phyai/config/")}
    assert shipped == {
        str(file.relative_to(root / "config")) for file in (root / "config").rglob("*") if file.is_file()
    }


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_installed(kind: str, wheel: Path, root: Path, user_config: Path, tmp_path: Path) -> None:
    python = make_environment(tmp_path / "venv")
    if kind == "wheel":
        install(python, str(wheel))
        home = next((tmp_path / "venv").glob("lib/python*/site-packages"))
        config = home / "rlinf_phyai" / "config"
    else:
        install(python, "--editable", str(root))
        home, config = root, root / "config"

    seen = json.loads(run(python, "-c", PROBE, str(user_config), cwd=tmp_path))

    assert Path(seen["package"]) == home / "rlinf_phyai" / "__init__.py"
    assert Path(seen["config"]) == config
    assert seen["ours"] == [f"file://{config}"]
    assert sorted(path.name for path in config.iterdir()) == ["hybrid_engines", "kernel_policy"]
    assert "phyai" in seen["groups"]["hybrid_engines"]
    assert seen["groups"]["env"] == ["mine"]
    assert seen["groups"]["model"] == []
    assert seen["env"] == "mine"
    assert "max_batch_size" in seen["engine_keys"]
    assert seen["backend"] == ["rlinf_phyai.backends:PHYAI_BACKEND"]
    assert not seen["torch"], "composing a config must not import torch"
    assert run(tmp_path / "venv" / "bin" / "rlinf-phyai", "version", cwd=tmp_path).strip() == __version__


def test_missing_groups_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlinf_phyai import paths

    monkeypatch.setattr(paths, "_PACKAGE", tmp_path / "rlinf_phyai")
    with pytest.raises(FileNotFoundError, match="hybrid_engines"):
        paths.config_dir()
