# SPDX-License-Identifier: Apache-2.0
"""An override of a key that the config does not have: most often a typo, for which Hydra advises to add the key."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

# Hydra tells these cases apart only in its text.
_SET = re.compile(r"Could not override '(?P<key>.+?)'\.\s+To append to your config use \+(?P<line>.+)", re.DOTALL)
_DELETED = re.compile(r"Could not delete from config\. '(?P<key>.+?)' does not exist\.")


@dataclass(frozen=True)
class UnknownKey:
    """Attributes:
    key: what does not exist.
    overridden: the override's own key; ``key`` lies below it where the override's value is a section.
    line: the override as it was given; empty for one that deletes.
    """

    key: str
    overridden: str
    line: str

    def named_by(self, override: str) -> bool:
        """True for an override of the same key."""
        return override.lstrip("~+").partition("=")[0] == self.overridden


def read(error: BaseException) -> UnknownKey | None:
    """The unknown key that Hydra complains about, None where it complains about something else."""
    text = str(error)
    if match := _DELETED.match(text):
        return UnknownKey(match["key"], match["key"], "")
    match = _SET.match(text)
    if match is None:
        return None
    full = str(getattr(error.__cause__, "full_key", None) or "")
    overridden = match["key"]
    return UnknownKey(full if full.startswith(f"{overridden}.") else overridden, overridden, match["line"])


def explain(unknown: UnknownKey, cfg: DictConfig | None) -> tuple[str, str]:
    """What is wrong with the override, and what to change.

    Args:
        cfg: the config without the override; None where it is not known.
    """
    from rlinf_phyai.validation.placement import PLACEMENT, replacing

    tree: Any = {} if cfg is None else OmegaConf.to_container(cfg, resolve=False)
    keys = list(_keys(tree))
    if not unknown.line and unknown.key in keys:  # Hydra says the same of a key that is null
        return f"{unknown.key} is null, which ~{unknown.key} cannot delete", f"leave ~{unknown.key} out"
    found = f"the config has no key {unknown.key}"
    near = nearest(unknown.key, tree, keys)
    hint = f"did you mean {near}?" if near else ""
    if not unknown.line:
        return found, hint or f"leave ~{unknown.key} out"
    if unknown.overridden == PLACEMENT and (cfg is None or PLACEMENT in keys):
        return found, f"replace the whole section: {replacing(unknown.line.partition('=')[2])}"
    if unknown.overridden.startswith(f"{PLACEMENT}."):
        other = f"{hint} Or " if near and near.startswith(f"{PLACEMENT}.") else ""
        return found, f"{other}replace the whole section: {replacing()}"
    new = f"for a key that is new on purpose write {shlex.quote(f'+{unknown.line}')}"
    return found, f"{hint} ({new})" if hint else f"correct it; {new}"


def nearest(key: str, tree: Any, keys: list[str]) -> str | None:
    """The existing key that ``key`` was probably meant to be: name by name, else as a whole."""
    from rlinf_phyai.validation.problems import closest

    names: list[str] = []
    node = tree
    for name in key.split("."):
        # A key such as "actor,env" cannot be written in an override.
        known = [str(other) for other in node if "," not in str(other)] if isinstance(node, Mapping) else []
        near = name if name in known else closest(name, known)
        if near is None:
            return closest(key, (other for other in keys if "," not in other), cutoff=0.75)
        names.append(near)
        node = node.get(near)
    return ".".join(names)


def _keys(tree: Any, prefix: str = "") -> Iterator[str]:
    """Dotted keys of all sections and values."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield f"{prefix}{name}"
            yield from _keys(value, f"{prefix}{name}.")
