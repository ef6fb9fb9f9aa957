"""The YAML file of online learning as settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from flows.runtime.settings_files import model_place, read_settings_file
from rl_core.settings import OnlineSettings
from tasks.shipped import ONLINE

__all__ = ["load_online_settings"]


def load_online_settings(path: str | Path, overrides: Iterable[str] = ()) -> OnlineSettings:
    """Settings of a file, or of the shipped one of that name; folders are looked up from the current folder, then from
    the file's.

    Raises: ConfigError with every problem; SettingsError for a model folder that is not there.
    """
    settings, folder = read_settings_file(OnlineSettings, path, overrides, shipped_name=ONLINE)
    return _with_places(settings, folder)


def _with_places(settings: OnlineSettings, folder: Path) -> OnlineSettings:
    """Absolute folders; a model that is no folder here is a name of the hub."""
    model, reward_model = settings.model, settings.reward_model
    if model.path is not None:
        model = dataclasses.replace(model, path=model_place("model.path", model.path, folder))
    if reward_model is not None:
        reward_model = model_place("reward_model", reward_model, folder)
    return dataclasses.replace(
        settings, folder=str(Path(settings.folder).resolve()), model=model, reward_model=reward_model
    )
