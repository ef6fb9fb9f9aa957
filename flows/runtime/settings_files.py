"""YAML files that hold the settings of one process, beside those of pipelines."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from rl_core.errors import SettingsError
from rl_core.settings import Settings
from tasks.config.overrides import apply_overrides
from tasks.config.problems import ConfigError, KeyLocations
from tasks.config.schema import read
from tasks.config.yaml_loader import read_yaml
from tasks.shipped import find_config

__all__ = ["model_place", "read_settings_file"]

S = TypeVar("S", bound=Settings)


def read_settings_file(
    kind: type[S], path: str | Path, overrides: Iterable[str] = (), *, shipped_name: str = ""
) -> tuple[S, Path]:
    """Settings of a file, or of the shipped one of that name, and the file's folder.

    Args:
        shipped_name: the shipped file of this kind, for the error of a missing one; "" = there is none.
    Raises: ConfigError with every problem.
    """
    path = find_config(path)
    document = read_yaml(path, (shipped_name,) if shipped_name else ())
    places = KeyLocations(str(path), lines=document.lines)
    problems = document.problems + apply_overrides(document.data, overrides, places)
    settings, found = read(kind, document.data)
    known = {problem.key for problem in problems}
    problems = problems + [problem for problem in found if problem.key not in known]
    if problems or settings is None:
        raise ConfigError(problems, places)
    return settings, path.parent


def model_place(key: str, place: str, folder: Path) -> str:
    """Absolute path of a model folder, looked up from the current folder, then from `folder`; or a name of the hub.

    Raises: SettingsError for a path where there is no folder.
    """
    found = next((path for path in (Path(place), folder / place) if path.is_dir()), None)
    if found is None and (place.startswith((".", "/", "~")) or place.count("/") > 1):
        raise SettingsError(f"{key}: {place} is no folder")
    return place if found is None else str(found.resolve())
