"""YAML files that hold the settings of one process, beside those of pipelines.

The service's YAML file as settings.

The YAML file of online learning as settings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rl_core.errors import SettingsError
from rl_core.settings import OnlineSettings, ServiceSettings, Settings
from tasks.config.problems import ConfigError, KeyLocations
from tasks.config.schema import parse_settings
from tasks.config.yaml_loader import apply_overrides, read_yaml
from tasks.shipped import ONLINE_CONFIG, SERVICE_CONFIG, find_config

SettingsT = TypeVar("SettingsT", bound=Settings)


def read_settings_file(
    settings_type: type[SettingsT],
    path: str | Path,
    overrides: Iterable[str] = (),
    *,
    shipped_name: str = "",
) -> tuple[SettingsT, Path]:
    """Settings of a file, or of the shipped one of that name, and the file's folder.

    Args:
        shipped_name: the shipped file of this kind, for the error of a missing one; "" = there is none.
    Raises: ConfigError with every problem.
    """
    path = find_config(path)
    document = read_yaml(path, (shipped_name,) if shipped_name else ())
    places = KeyLocations(str(path), lines=document.lines)
    problems = document.problems + apply_overrides(document.data, overrides, places)
    settings, found = parse_settings(settings_type, document.data)
    known = {problem.key for problem in problems}
    problems = problems + [problem for problem in found if problem.key not in known]
    if problems or settings is None:
        raise ConfigError(problems, places)
    return settings, path.parent


def resolve_model_path(key: str, path_or_name: str, folder: Path) -> str:
    """Absolute path of a model folder, looked up from the current folder, then from `folder`; or a name of the hub.

    Raises: SettingsError for a path where there is no folder.
    """
    found = next(
        (path for path in (Path(path_or_name), folder / path_or_name) if path.is_dir()), None
    )
    if found is None and (path_or_name.startswith((".", "/", "~")) or path_or_name.count("/") > 1):
        raise SettingsError(f"{key}: {path_or_name} is no folder")
    return path_or_name if found is None else str(found.resolve())


def load_service_settings(path: str | Path, overrides: Iterable[str] = ()) -> ServiceSettings:
    """Settings of a file, or of the shipped one of that name; model folders are looked up from the current folder, then
    from the file's.

    Raises: ConfigError with every problem; SettingsError for a model folder that is not there.
    """
    settings, folder = read_settings_file(
        ServiceSettings, path, overrides, shipped_name=SERVICE_CONFIG
    )
    return _resolve_service_paths(settings, folder)


def parse_service_settings(values: Mapping[str, Any]) -> ServiceSettings:
    """Settings of plain values, as `tasks.config.dump_settings` gives them. Raises: ConfigError."""
    settings, problems = parse_settings(ServiceSettings, values)
    if problems or settings is None:
        raise ConfigError(problems, KeyLocations("settings"))
    return settings


def _resolve_service_paths(settings: ServiceSettings, folder: Path) -> ServiceSettings:
    """Absolute folders; a model that is no folder here is a name of the hub."""
    engine = dataclasses.replace(
        settings.engine, bases=_resolve_model_paths("engine.bases", settings.engine.bases, folder)
    )
    models = _resolve_model_paths("reference_models", settings.reference_models, folder)
    root = str(Path(settings.folder).resolve())
    return dataclasses.replace(settings, folder=root, engine=engine, reference_models=models)


def _resolve_model_paths(key: str, models: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Model folders as absolute paths. Raises: SettingsError."""
    return {
        name: resolve_model_path(f"{key}.{name}", place, folder) for name, place in models.items()
    }


def load_online_settings(path: str | Path, overrides: Iterable[str] = ()) -> OnlineSettings:
    """Settings of a file, or of the shipped one of that name; folders are looked up from the current folder, then from
    the file's.

    Raises: ConfigError with every problem; SettingsError for a model folder that is not there.
    """
    settings, folder = read_settings_file(
        OnlineSettings, path, overrides, shipped_name=ONLINE_CONFIG
    )
    return _resolve_online_paths(settings, folder)


def _resolve_online_paths(settings: OnlineSettings, folder: Path) -> OnlineSettings:
    """Absolute folders; a model that is no folder here is a name of the hub."""
    model, reward_model = settings.model, settings.reward_model
    if model.path is not None:
        model = dataclasses.replace(
            model, path=resolve_model_path("model.path", model.path, folder)
        )
    if reward_model is not None:
        reward_model = resolve_model_path("reward_model", reward_model, folder)
    return dataclasses.replace(
        settings,
        folder=str(Path(settings.folder).resolve()),
        model=model,
        reward_model=reward_model,
    )
