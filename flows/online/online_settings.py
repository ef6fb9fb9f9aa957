"""The YAML file of online learning as settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from rl_core.errors import SettingsError
from rl_core.settings import OnlineSettings
from tasks.config.overrides import apply_overrides
from tasks.config.problems import ConfigError, KeyLocations
from tasks.config.schema import read
from tasks.config.yaml_loader import read_yaml
from tasks.shipped import find_config

__all__ = ["load_online_settings"]


def load_online_settings(path: str | Path, overrides: Iterable[str] = ()) -> OnlineSettings:
    """Settings of a file, or of the shipped one of that name; folders are looked up from the current folder, then from
    the file's.

    Raises: ConfigError with every problem; SettingsError for a model folder that is not there.
    """
    path = find_config(path)
    document = read_yaml(path)
    places = KeyLocations(str(path), lines=document.lines)
    problems = document.problems + apply_overrides(document.data, overrides, places)
    settings, found = read(OnlineSettings, document.data)
    known = {problem.key for problem in problems}
    problems = problems + [problem for problem in found if problem.key not in known]
    if problems or settings is None:
        raise ConfigError(problems, places)
    return _with_places(settings, path.parent)


def _with_places(settings: OnlineSettings, folder: Path) -> OnlineSettings:
    """Absolute folders; a model that is no folder here is a name of the hub."""
    model, reward_model = settings.model, settings.reward_model
    if model.path is not None:
        model = dataclasses.replace(model, path=_place("model.path", model.path, folder))
    if reward_model is not None:
        reward_model = _place("reward_model", reward_model, folder)
    return dataclasses.replace(
        settings, folder=str(Path(settings.folder).resolve()), model=model, reward_model=reward_model
    )


def _place(key: str, place: str, folder: Path) -> str:
    found = next((path for path in (Path(place), folder / place) if path.is_dir()), None)
    if found is None and (place.startswith((".", "/", "~")) or place.count("/") > 1):
        raise SettingsError(f"{key}: {place} is no folder; name the model that the service began with")
    return place if found is None else str(found.resolve())
