# SPDX-License-Identifier: Apache-2.0
"""``rlinf-phyai doctor``: reports every part, whatever breaks in one."""

import pytest
from typer.testing import CliRunner

from rlinf_phyai import doctor
from rlinf_phyai.cli import app


def test_installation_is_sound() -> None:
    needed = [finding for finding in doctor.run_checks() if finding.needed]
    assert len(needed) == 8
    assert [finding for finding in needed if not finding.ok] == []


def test_a_broken_part_is_named_with_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise ImportError("libEGL.so.1: cannot open shared object file")

    def absent() -> str:
        raise doctor.Failed("no CUDA device")

    monkeypatch.setattr(
        doctor,
        "CHECKS",
        (("rendering", broken, "install libegl1", True), ("GPU", absent, "", False), ("fine", lambda: "yes", "", True)),
    )
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    lines = [line.split() for line in result.output.splitlines()]
    assert lines[0][:3] == ["FAIL", "rendering", "ImportError:"]
    assert lines[1][1:] == ["install", "libegl1"]
    assert lines[2][:2] == ["none", "GPU"]
    assert lines[3] == ["ok", "fine", "yes"]


def test_something_optional_missing_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> str:
        raise doctor.Failed("no CUDA device")

    monkeypatch.setattr(doctor, "CHECKS", (("GPU", absent, "", False),))
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 0
