# SPDX-License-Identifier: Apache-2.0
"""From a config's name to a composed config, and one line for whatever is wrong with the file or the overrides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rlinf_phyai import unknown_keys
from rlinf_phyai.errors import PhyaiError
from rlinf_phyai.unknown_keys import UnknownKey

_ALLOWED = "a training config is a mapping of sections, as in examples/embodiment/config"


class ConfigFileError(PhyaiError, ValueError):
    """A config cannot be composed: its file, one that it includes, or an override cannot be used.

    Attributes:
        found: what is wrong.
        fix: what to change; empty where ``found`` says it.
    """

    def __init__(self, found: str, fix: str = "") -> None:
        self.found, self.fix = found, fix
        super().__init__(f"{found}; {fix}" if fix else found)


def load_config(config: str, overrides: list[str], config_path: str | None = None) -> DictConfig:
    """Compose a training config as the training program does.

    Args:
        config: a name inside ``config_path``, or the path of a ``.yaml`` file.
        overrides: Hydra overrides.

    Raises:
        ConfigFileError: the file does not exist or holds no config, or an override names what is not there.
    """
    path = Path(config)
    if path.suffix == ".yaml":
        folder, name = path.resolve().parent, path.stem
    else:
        folder, name = Path(config_path or "examples/embodiment/config").resolve(), config
    file = folder / f"{name}.yaml"
    return explained(file, f"{file} with the overrides {overrides}", lambda: _composed(file, overrides), overrides)


def _composed(file: Path, overrides: Sequence[str]) -> DictConfig:
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(file.parent.resolve()), version_base="1.3"):
        return compose(file.stem, list(overrides))


def explained(file: Path | None, where: str, compose: Callable[[], Any], overrides: Sequence[str] = ()) -> Any:
    """``compose()``, its errors told in one line.

    Args:
        file: the config's own file, looked at first; None where only Hydra knows it.
        where: what is being composed, for messages.
        overrides: those that ``compose`` applies to ``file``.

    Raises:
        ConfigFileError: see :func:`load_config`.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if file is not None:
        _check(file)
    try:
        return compose()
    except PhyaiError:
        raise
    except (HydraException, OmegaConfBaseException) as error:
        unknown = unknown_keys.read(error)
        if unknown is not None:
            found, fix = unknown_keys.explain(unknown, _without(unknown, file, overrides))
            raise ConfigFileError(f"{where}: {found}", fix) from error
        raise ConfigFileError(f"{where}: {_text(error)}") from error
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        own = file is not None and mark is not None and Path(mark.name).resolve() == file.resolve()
        subject = "it" if own else "a file that it includes"
        raise ConfigFileError(f"{where}: {subject} is no valid YAML: {_place(error)}") from error
    except UnicodeDecodeError as error:
        raise ConfigFileError(f"{where}: a file that it includes is no UTF-8 text ({error.reason})") from error
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        # Hydra's own check of a defaults list, and what YAML's and Hydra's parsers let through.
        raise ConfigFileError(f"{where}: {_text(error)} ({type(error).__name__})") from error


def _without(unknown: UnknownKey, file: Path | None, overrides: Sequence[str]) -> DictConfig | None:
    """The config without the override that names an unknown key, nor others like it; None where it does not compose."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    left, wrong = list(overrides), unknown
    while file is not None and any(wrong.named_by(override) for override in left):
        left = [override for override in left if not wrong.named_by(override)]
        try:
            return _composed(file, left)
        except (HydraException, OmegaConfBaseException) as error:
            following = unknown_keys.read(error)
            if following is None:
                return None
            wrong = following
    return None


def _text(error: BaseException) -> str:
    """What an error says on one line; Hydra's may be empty and say it in its cause."""
    text = ""
    cause: BaseException | None = error
    while not text and cause is not None:
        # The rest of Hydra's message lists the folders that it searched.
        text = " ".join(str(cause).partition("Config search path:")[0].split())
        cause = cause.__cause__
    return text


def _check(file: Path) -> None:
    import yaml

    if file.is_dir():
        raise ConfigFileError(f"{file} is a directory; name a .yaml file.")
    if not file.is_file():
        raise ConfigFileError(f"there is no config {file}; give its path, or --config-path.")
    try:
        content = yaml.compose(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigFileError(f"{file} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigFileError(f"{file} is no UTF-8 text ({error.reason}); {_ALLOWED}.") from error
    except yaml.YAMLError as error:
        raise ConfigFileError(f"{file} is no valid YAML: {_place(error)}.") from error
    if content is None:
        raise ConfigFileError(f"{file} is empty; {_ALLOWED}.")
    if not isinstance(content, yaml.MappingNode):
        found = "a list" if isinstance(content, yaml.SequenceNode) else "a single value"
        raise ConfigFileError(f"{file} holds {found}; {_ALLOWED}.")


def _place(error: Any) -> str:
    """What a YAML parser found, and where, on one line."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    where = f"line {mark.line + 1}, column {mark.column + 1}"
    return f"{where if mark.name.startswith('<') else f'{mark.name}, {where}'}: {error.problem}"
