# SPDX-License-Identifier: Apache-2.0
"""The extension module: chaining, idempotence, what a worker's report must say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlinf_phyai import __version__, backends, plugin


class Launched:
    """Stands for a worker class."""


NAME = f"{Launched.__module__}:{Launched.__qualname__}"


def report(**changes: object) -> plugin.Report:
    values = {"classes": ("ray:Wrapper", NAME), "registered": True, "failure": "", "version": __version__, **changes}
    return plugin.Report(**values)  # type: ignore[arg-type]


def test_activate_keeps_the_users_module() -> None:
    environment = {"RLINF_EXT_MODULE": "theirs"}
    plugin.activate(environment)
    assert environment == {"RLINF_EXT_MODULE": "rlinf_phyai.plugin", plugin.CHAINED_MODULE: "theirs"}
    plugin.activate(environment)  # a second time it must not chain itself
    assert environment[plugin.CHAINED_MODULE] == "theirs"


def test_activate_without_another_module() -> None:
    environment: dict[str, str] = {}
    plugin.activate(environment)
    assert environment == {"RLINF_EXT_MODULE": "rlinf_phyai.plugin"}


def test_a_good_report_passes() -> None:
    assert plugin._objection(report(), "Worker 0", Launched) == ""
    assert plugin._objection(report(classes=(NAME, "builtins:object")), "Worker 0", Launched) == ""


@pytest.mark.parametrize(
    "answer, message",
    [
        (report(registered=False, failure="Traceback: no licence"), "no licence"),
        (report(registered=False), "Failed to import extension module"),
        (report(version="0.0.1"), "0.0.1"),
        (report(classes=("rlinf:Stock", "rlinf:Worker", NAME)), "runs rlinf:Stock"),
    ],
)
def test_a_bad_report_stops(answer: plugin.Report, message: str) -> None:
    objection = plugin._objection(answer, "Worker 0 of RolloutGroup", Launched)
    assert objection.startswith("Worker 0 of RolloutGroup")
    assert message in objection


def run_python(code: str, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[3]}", **environment},
        timeout=300,
        check=False,
    )


def test_register_is_light_idempotent_and_chains(tmp_path: Path) -> None:
    """One process: the user's module is called once, models are registered, no model code is imported."""
    (tmp_path / "theirs.py").write_text("calls = 0\ndef register():\n    global calls\n    calls += 1\n")
    code = """
import sys
from rlinf_phyai import plugin
heavy = [name for name in ("torch", "rlinf", "ray") if name in sys.modules]
assert not heavy, heavy
plugin.activate()
plugin.register()
plugin.register()
import theirs
assert theirs.calls == 1
from rlinf.models import _MODEL_REGISTRY
assert _MODEL_REGISTRY["openpi"].__module__ == "rlinf_phyai.plugin"
heavy = [name for name in ("openpi", "transformers", "jax") if name in sys.modules]
assert not heavy, heavy
from rlinf.scheduler import Worker
assert Worker.torch_device_type is not None
assert plugin.report(object()).registered
"""
    result = run_python(code, tmp_path, RLINF_EXT_MODULE="theirs")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", ["left_over", "left_over.part"])
def test_an_extension_module_left_over_in_the_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """RLinf would go on without it."""
    monkeypatch.setenv(plugin.EXT_MODULE, name)
    monkeypatch.setenv(plugin.CHAINED_MODULE, "")
    plugin.activate()
    with pytest.raises(plugin.PluginError, match=f"RLINF_EXT_MODULE names the extension module '{name}', .* or unset"):
        plugin._register_chained()


def test_a_failing_register_raises_and_is_remembered(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text("def register():\n    raise ValueError('no licence')\n")
    code = """
from rlinf_phyai import plugin
plugin.activate()
try:
    plugin.register()
except plugin.PluginError as error:
    assert "no licence" in str(error)
else:
    raise SystemExit("register() did not raise")
report = plugin.report(object())
assert not report.registered and "no licence" in report.failure
"""
    result = run_python(code, tmp_path, RLINF_EXT_MODULE="theirs")
    assert result.returncode == 0, result.stderr


def test_backends_by_name() -> None:
    assert {"phyai", "huggingface"} <= set(backends.available())
    assert backends.get("phyai") is backends.PHYAI_BACKEND
    with pytest.raises(backends.BackendError, match="'vllm'; allowed: huggingface, phyai"):
        backends.get("vllm")


def test_a_backend_that_cannot_load_says_so() -> None:
    broken = backends.RolloutBackend("broken", "no_such_module:Worker", "rlinf_phyai.errors:NoSuchClass")
    with pytest.raises(backends.BackendError, match="no_such_module:Worker: ModuleNotFoundError"):
        broken.load_rollout_worker()
    with pytest.raises(backends.BackendError, match="NoSuchClass"):
        broken.load_actor_worker()
