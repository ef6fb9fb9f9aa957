"""Loaders for the YAML settings files of the training service and of online learning."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rl_core.errors import SettingsError
from rl_core.models.gguf_files import find_gguf_file
from rl_core.settings import OnlineSettings, ServiceSettings, Settings, resolve_defaults
from tasks.config.machine_checks import read_context_length
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
    """Read a settings file, or the shipped file of that name; return the settings and the file's folder.

    Args:
        shipped_name: shipped file of this kind, named in the error for a missing file; "" = there is none.
    Raises: ConfigError listing every problem.
    """
    path = find_config(path)
    document = read_yaml(path, (shipped_name,) if shipped_name else ())
    locations = KeyLocations(str(path), lines=document.lines)
    problems = document.problems + apply_overrides(document.data, overrides, locations)
    settings, schema_problems = parse_settings(settings_type, document.data, locations)
    reported_keys = {problem.key for problem in problems}
    problems = problems + [
        problem for problem in schema_problems if problem.key not in reported_keys
    ]
    if problems or settings is None:
        raise ConfigError(problems, locations)
    return settings, path.parent


def resolve_model_path(key: str, path_or_name: str, folder: Path) -> str:
    """Return the absolute path of a model folder or GGUF file, or the unchanged name of a model.

    The folder is looked up in the current folder, then in `folder`.
    Raises: SettingsError if the text looks like a path but no such folder exists.
    """
    for path in (Path(path_or_name), folder / path_or_name):
        if path.is_dir() or find_gguf_file(path) is not None:
            return str(path.resolve())
    if path_or_name.startswith((".", "/", "~")) or path_or_name.count("/") > 1:
        raise SettingsError(f"{key}: {path_or_name} is no folder and no GGUF file")
    return path_or_name


def load_service_settings(path: str | Path, overrides: Iterable[str] = ()) -> ServiceSettings:
    """Load the service's settings from a file, or from the shipped file of that name.

    Model folders are looked up in the current folder, then in the file's folder.
    Raises: ConfigError listing every problem; SettingsError for a missing model folder.
    """
    settings, folder = read_settings_file(
        ServiceSettings, path, overrides, shipped_name=SERVICE_CONFIG
    )
    return _resolve_service_paths(settings, folder)


def parse_service_settings(values: Mapping[str, Any]) -> ServiceSettings:
    """Parse settings from the plain values written by `tasks.config.dump_settings`. Raises: ConfigError."""
    settings, problems = parse_settings(ServiceSettings, values)
    if problems or settings is None:
        raise ConfigError(problems, KeyLocations("settings"))
    return settings


def _resolve_service_paths(settings: ServiceSettings, folder: Path) -> ServiceSettings:
    """Make folders absolute. A model name without a local folder stays a hub name."""
    engine = dataclasses.replace(
        settings.engine, bases=_resolve_model_paths("engine.bases", settings.engine.bases, folder)
    )
    models: dict[str, Any] = {
        name: _resolve_model_paths(name, getattr(settings, name), folder)
        for name in ("reference_models", "reward_models")
    }
    root = str(Path(settings.folder).resolve())
    return dataclasses.replace(settings, folder=root, engine=engine, **models)


def _resolve_model_paths(key: str, models: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Make model folders absolute. Raises: SettingsError."""
    return {
        name: resolve_model_path(f"{key}.{name}", path, folder) for name, path in models.items()
    }


def load_online_settings(path: str | Path, overrides: Iterable[str] = ()) -> OnlineSettings:
    """Load online-learning settings from a file, or from the shipped file of that name.

    Canary episodes have the length that suits the model, unless it is set.
    Folders are looked up in the current folder, then in the file's folder.
    Raises: ConfigError listing every problem; SettingsError for a missing model folder.
    """
    settings, folder = read_settings_file(
        OnlineSettings, path, overrides, shipped_name=ONLINE_CONFIG
    )
    settings = _resolve_online_paths(settings, folder)
    context = read_context_length(settings.model)
    # The gate alone: a worker refuses checkpoints of other settings, whose defaults therefore stay.
    gate = resolve_defaults(settings.gate, settings.model, context)
    return dataclasses.replace(settings, gate=gate)


def _resolve_online_paths(settings: OnlineSettings, folder: Path) -> OnlineSettings:
    """Make folders absolute. A model name without a local folder stays a hub name."""
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
