# SPDX-License-Identifier: Apache-2.0
"""What the README says must be so: its links, its commands, its code, its configuration table."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rlinf_phyai.models.pi05.tiny import make_tiny_checkpoint


@pytest.fixture(scope="module")
def readme(root: Path) -> str:
    return (root / "README.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_links_lead_somewhere(root: Path, readme: str) -> None:
    for page in [root / "README.md", *(root / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith(("https://", "http://")):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
    headings = {
        re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in re.findall(r"^#+ (.*)$", readme, re.M)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", readme)) <= headings


def test_scripts_and_configs_exist(root: Path, readme: str) -> None:
    commands = "\n".join(blocks(readme, "bash")) + readme
    scripts = set(re.findall(r"(?:bash|python) ((?:examples|tests|requirements)/[\w./-]+\.(?:sh|py))", commands))
    assert len(scripts) >= 5
    assert [script for script in scripts if not (root / script).is_file()] == []
    configs = set(re.findall(r"\b(libero_\w+_phyai\w*)\b", commands))
    assert configs
    assert [name for name in configs if not (root / "examples/embodiment/config" / f"{name}.yaml").is_file()] == []


def test_configuration_table_matches_the_group(root: Path, readme: str) -> None:
    """Every option of the group is in the table with its true default, and the table names no other."""
    defaults = yaml.safe_load((root / "config" / "hybrid_engines" / "phyai.yaml").read_text())
    rows = dict(re.findall(r"^\| `rollout\.phyai\.(\w+)` \| `([^`]*)` \|", readme, re.MULTILINE))
    assert {name: yaml.safe_load(text) for name, text in rows.items()} == defaults


def test_engine_example_runs(readme: str, tmp_path: Path) -> None:
    (code,) = blocks(readme, "python")
    make_tiny_checkpoint(tmp_path / "checkpoints" / "tiny_pi05")
    code += "\nassert actions.shape == (2, 10, 32), actions.shape\n"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
