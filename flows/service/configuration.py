"""The service's YAML file as settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flows.runtime.settings_files import model_place, read_settings_file
from rl_core.settings import ServiceSettings
from tasks.config.problems import ConfigError, KeyLocations
from tasks.config.schema import read
from tasks.shipped import SERVICE

__all__ = ["load_service_settings", "service_settings"]


def load_service_settings(path: str | Path, overrides: Iterable[str] = ()) -> ServiceSettings:
    """Settings of a file, or of the shipped one of that name; model folders are looked up from the current folder, then
    from the file's.

    Raises: ConfigError with every problem; SettingsError for a model folder that is not there.
    """
    settings, folder = read_settings_file(ServiceSettings, path, overrides, shipped_name=SERVICE)
    return _with_places(settings, folder)


def service_settings(values: Mapping[str, Any]) -> ServiceSettings:
    """Settings of plain values, as `tasks.config.resolve` gives them. Raises: ConfigError."""
    settings, problems = read(ServiceSettings, values)
    if problems or settings is None:
        raise ConfigError(problems, KeyLocations("settings"))
    return settings


def _with_places(settings: ServiceSettings, folder: Path) -> ServiceSettings:
    """Absolute folders; a model that is no folder here is a name of the hub."""
    engine = dataclasses.replace(settings.engine, bases=_places("engine.bases", settings.engine.bases, folder))
    models = _places("reference_models", settings.reference_models, folder)
    root = str(Path(settings.folder).resolve())
    return dataclasses.replace(settings, folder=root, engine=engine, reference_models=models)


def _places(key: str, named: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Model folders as absolute paths. Raises: SettingsError."""
    return {name: model_place(f"{key}.{name}", place, folder) for name, place in named.items()}
