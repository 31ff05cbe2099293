# SPDX-License-Identifier: Apache-2.0
"""The command line of a program: its config from Hydra, our own errors as one line, and the exit code."""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig

from rlinf_phyai import config_files
from rlinf_phyai.driver.launch import say
from rlinf_phyai.driver.shutdown import Interrupted
from rlinf_phyai.errors import PhyaiError


def run_hydra(program: Callable[[], None]) -> None:
    """A ``hydra.main`` program: relative config paths count from the current folder, a config that cannot be composed is one line."""
    sys.argv[1:] = absolute_config_path(sys.argv[1:])
    traceback_wanted = "HYDRA_FULL_ERROR" in os.environ
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra would print a traceback itself and exit
    file = config_file(sys.argv[1:])
    try:
        config_files.explained(file, str(file or "the config"), program, overrides(sys.argv[1:]))
    except config_files.ConfigFileError as error:
        if traceback_wanted:
            raise
        say(f"stopped: {error}")
        sys.exit(1)


def run_as_program(function: Callable[[DictConfig], object], cfg: DictConfig) -> None:
    """Call ``function(cfg)`` and turn our own errors into a message and an exit code instead of a traceback."""
    if not cfg:
        say("no config: pass --config-path DIR --config-name NAME")
        sys.exit(2)
    try:
        function(cfg)
    except PhyaiError as error:
        say(f"stopped: {error}")
        sys.exit(1)
    except Interrupted as error:
        say(str(error))
        sys.exit(error.exit_code)
    except Exception:  # a fault of ours, or of RLinf: everything about it, and never mistaken for a config's
        traceback.print_exc()
        sys.exit(1)


_CONFIG_PATH, _CONFIG_DIR, _CONFIG_NAME = ("--config-path", "-cp"), ("--config-dir", "-cd"), ("--config-name", "-cn")


def config_file(arguments: list[str]) -> Path | None:
    """The file that ``--config-path`` and ``--config-name`` name, or None: then it is left to Hydra to find."""
    given: dict[str, str] = {}
    for argument, following in zip(arguments, [*arguments, ""][1:], strict=True):
        name, equals, value = argument.partition("=")
        given[name] = value if equals else following
    folder, name = (next((given[k] for k in keys if k in given), "") for keys in (_CONFIG_PATH, _CONFIG_NAME))
    if not folder or not name or "://" in folder or any(key in given for key in _CONFIG_DIR):
        return None
    return Path(folder) / (name if name.endswith(".yaml") else f"{name}.yaml")


def overrides(arguments: list[str]) -> list[str]:
    """The Hydra overrides of a command line."""
    before = ["", *arguments]
    options = (*_CONFIG_PATH, *_CONFIG_DIR, *_CONFIG_NAME)
    return [a for a, option in zip(arguments, before, strict=False) if not a.startswith("-") and option not in options]


def absolute_config_path(arguments: list[str]) -> list[str]:
    """Read a relative ``--config-path`` from the current folder; Hydra would read it from the program's."""
    result = list(arguments)
    for index, argument in enumerate(result):
        name, equals, value = argument.partition("=")
        if name not in (*_CONFIG_PATH, *_CONFIG_DIR):
            continue
        if equals and value and "://" not in value:
            result[index] = f"{name}={os.path.abspath(value)}"
        elif not equals and index + 1 < len(result) and "://" not in result[index + 1]:
            result[index + 1] = os.path.abspath(result[index + 1])
    return result
