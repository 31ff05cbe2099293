# SPDX-License-Identifier: Apache-2.0
"""Where the shipped configuration groups lie, installed from a wheel or run from a checkout."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_GROUP = "hybrid_engines"  # the group whose presence tells the right folder


def config_dir() -> Path:
    """The folder that holds the groups ``hybrid_engines`` and ``kernel_policy``.

    A wheel carries it as ``rlinf_phyai/config``; a checkout has it beside the package as ``config``.

    Raises:
        FileNotFoundError: neither place has the groups (a broken installation).
    """
    candidates = (_PACKAGE / "config", _PACKAGE.parent / "config")
    for folder in candidates:
        if (folder / _GROUP).is_dir():
            return folder
    looked = " and ".join(str(folder / _GROUP) for folder in candidates)
    raise FileNotFoundError(f"rlinf-phyai finds no configuration groups: looked for {looked}. Reinstall the package.")
