# SPDX-License-Identifier: Apache-2.0
"""Imports point one way, read from the source: plugin, train -> rollout, actor -> engine -> models -> kernels."""

import ast
from collections.abc import Iterator
from pathlib import Path

# Lower may not import higher. Parts that are not named (errors, paths, ...) belong to everyone and import nothing of these.
LAYER = {
    "kernels": 0,
    "models": 1,
    "engine": 2,
    "checkpoint_setup": 2,
    "rollout": 3,
    "actor": 3,
    "env": 3,
    "platforms": 3,
}
SHARED = {"checkpoints", "checksum", "errors", "notices", "paths", "signs", "__init__"}
TOP = 4  # plugin, backends, validation, train, eval, cli, ...
ENGINE_SIDE = {"kernels", "models", "engine"}
NOT_FOR_THE_ENGINE = {"rlinf", "openpi", "openpi_client", "transformers", "ray", "hydra", "omegaconf", "jax", "libero"}


def imports(file: Path, package: str) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of every import in a file, those inside functions included."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base]).rstrip(".")
            if base == "rlinf_phyai":
                for alias in node.names:
                    yield node.lineno, f"{base}.{alias.name}"
            else:
                yield node.lineno, base


def part_of(dotted: str) -> str:
    """The part of the package that ``rlinf_phyai.<part>...`` names."""
    names = dotted.split(".")
    return names[1] if len(names) > 1 else "__init__"


def layer(part: str) -> int:
    return -1 if part in SHARED else LAYER.get(part, TOP)


def violations(package: Path) -> list[str]:
    found = []
    for file in sorted(package.rglob("*.py")):
        relative = file.relative_to(package)
        part = relative.parts[0].removesuffix(".py")
        dotted = ".".join(["rlinf_phyai", *relative.parts[:-1]])
        for line, name in imports(file, dotted):
            where = f"{relative}:{line} imports {name}"
            if name.split(".")[0] == "rlinf_phyai":
                other = part_of(name)
                if other not in ("__version__", "__init__") and layer(other) > layer(part):
                    found.append(f"{where}, which lies above")
            elif part in ENGINE_SIDE and name.split(".")[0] in NOT_FOR_THE_ENGINE:
                found.append(f"{where}; the engine works without it")
    return found


def test_imports_point_one_way(root: Path) -> None:
    assert violations(root / "rlinf_phyai") == []


def test_every_upward_import_is_found(tmp_path: Path) -> None:
    """The check itself: absolute, relative, inside a function, of a foreign package."""
    (tmp_path / "models" / "pi05").mkdir(parents=True)
    (tmp_path / "kernels").mkdir()
    (tmp_path / "models" / "pi05" / "a.py").write_text("from ...engine import Engine\nfrom ...kernels import resolve\n")
    (tmp_path / "models" / "b.py").write_text("def f():\n    from rlinf_phyai import actor\n")
    (tmp_path / "kernels" / "c.py").write_text("import rlinf.config\nimport rlinf_phyai.models.pi05\nimport torch\n")
    assert violations(tmp_path) == [
        "kernels/c.py:1 imports rlinf.config; the engine works without it",
        "kernels/c.py:2 imports rlinf_phyai.models.pi05, which lies above",
        "models/b.py:2 imports rlinf_phyai.actor, which lies above",
        "models/pi05/a.py:1 imports rlinf_phyai.engine, which lies above",
    ]
