# SPDX-License-Identifier: Apache-2.0
"""What every file of the project must and must not contain."""

import re
from pathlib import Path

OURS = Path(__file__).resolve()
# Paths of some machine, and hosts of package registries: an installer that names one works only where that one is reached.
MACHINE_PATHS = re.compile(r"(?<![\w.}$])/(?:work|root|opt/wheels|home/(?!runner)\w+|Users/\w+)/")
REGISTRY_HOSTS = re.compile(
    r"\b(?:pypi\.org|pythonhosted\.org|download\.pytorch\.org|anaconda\.org|ghcr\.io|docker\.io|npmjs\.)"
)


def offending(files: list[Path], pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{file.name}:{number}: {line.strip()[:100]}"
        for file in files
        if file != OURS
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]


def test_patterns_find_what_they_must() -> None:
    assert MACHINE_PATHS.search('cache = "/root/.cache"')
    assert MACHINE_PATHS.search("cd /work/main")
    assert not MACHINE_PATHS.search("network/work/x, $OUT/root/x, /workspace")
    assert REGISTRY_HOSTS.search("--index-url https://download.pytorch.org/whl/cpu")


def test_no_machine_paths(project_files: list[Path]) -> None:
    assert offending(project_files, MACHINE_PATHS) == []


def test_no_registry_hosts(project_files: list[Path]) -> None:
    assert offending(project_files, REGISTRY_HOSTS) == []


def test_source_files_name_their_licence(project_files: list[Path]) -> None:
    missing = []
    for file in project_files:
        if file.suffix in (".py", ".sh", ".yaml") and file.stat().st_size > 0:
            head = file.read_text().splitlines()[:2]
            if not any("SPDX-License-Identifier: Apache-2.0" in line for line in head):
                missing.append(str(file))
    assert missing == []


def test_search_path_plugin_is_small_and_light(root: Path) -> None:
    """Hydra imports it in every program: no torch, nothing heavy, nothing else in the namespace package."""
    modules = list((root / "hydra_plugins").rglob("*.py"))
    assert [module.name for module in modules] == ["rlinf_phyai_searchpath.py"]
    text = modules[0].read_text()
    assert len(text.splitlines()) < 20
    assert "torch" not in text


def test_config_folder_holds_only_the_shared_groups(root: Path) -> None:
    """Anything else there would shadow the groups of users' own configs."""
    assert sorted(entry.name for entry in (root / "config").iterdir()) == ["hybrid_engines", "kernel_policy"]
