"""The configuration of a pipeline: YAML file -> PipelineSettings, with every problem reported at once.

    settings = load("configs/demo.yaml", overrides=["stages.policy.learning_rate=3e-4"])

`load` reads the file (`yaml_loader`), applies overrides (`overrides`), checks unknown keys, types and ranges (`schema`,
built from the dataclasses of `settings` and rl_core/settings), finds the files (`files`), fills in defaults that depend
on the model (rl_core/settings/defaults), then checks combinations of settings (`cross_checks`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rl_core.errors import SettingsError
from rl_core.settings import EvaluationSettings, Settings, resolve_defaults
from tasks.config.cross_checks import check_combinations, find_waste
from tasks.config.machine_checks import read_context_length, replace_unchecked, resolve_files
from tasks.config.problems import ConfigError, ConfigProblem, KeyLocations, keys_overlap
from tasks.config.schema import parse_settings, resolve_pydantic_model
from tasks.config.settings import (
    STAGES,
    PipelineSettings,
    PromotionSettings,
    RetrainSettings,
    RunSettings,
    StageName,
    StagesSettings,
    TrackingSettings,
)
from tasks.config.user_code import list_code_paths, load_custom_stages
from tasks.config.yaml_loader import apply_overrides, read_yaml
from tasks.shipped import find_config

__all__ = [
    "STAGES",
    "ConfigError",
    "PipelineSettings",
    "PromotionSettings",
    "RetrainSettings",
    "RunSettings",
    "StageName",
    "StagesSettings",
    "TrackingSettings",
    "resolve_evaluation_settings",
    "build_settings",
    "load_settings",
    "list_code_paths",
    "build_pipeline_model",
    "dump_settings",
    "digest_settings",
]


def load_settings(
    path: str | Path,
    overrides: Iterable[str] = (),
    *,
    check_files: bool = True,
    import_code: bool = True,
    check_servers: bool = True,
    warn: Callable[[str], object] | None = None,
) -> PipelineSettings:
    """Read a pipeline's YAML file and check all of it.

    A bare name such as `demo` stands for the shipped config, unless the current folder has a file of that name.
    Relative paths in it are looked up from the current folder, then from the file's own folder, and made absolute.
    Args:
        overrides: "key.path=value" each, applied in order; the value is YAML.
        check_files: False leaves out what depends on this machine (data and model files, output folder, devices).
        import_code: False imports nothing that the settings name by import path, nor checks what rests on it.
        ask_servers: False lets the inference server or the Ray cluster of rollouts be away, and the GPU of weights in
            few bits: for commands that train nothing here.
        warn: is given a line (place, key's path, text) for each setting that works but wastes time.
    Raises: ConfigError with every problem: place, key's path, what was found, what is allowed.
    """
    path = find_config(path)
    document = read_yaml(path)
    places = KeyLocations(str(path), lines=document.lines)
    problems = document.problems + apply_overrides(document.data, overrides, places)
    folder = Path(path).parent if check_files else None
    settings, found = _check_settings(
        document.data, folder, problems, import_code, check_servers and check_files
    )
    if found or settings is None:
        raise ConfigError(found, places)
    if warn is not None:
        for problem in find_waste(settings):
            warn(places.format_problem(problem))
    return settings


def build_settings(
    values: Mapping[str, Any],
    *,
    check_files: bool = True,
    import_code: bool = True,
    check_servers: bool = True,
) -> PipelineSettings:
    """The settings of a plain dict, as `resolve` gives it or Prefect passes it, with the same checks as a file.

    Raises: ConfigError.
    """
    settings, problems = _check_settings(
        values, Path() if check_files else None, [], import_code, check_servers and check_files
    )
    if problems or settings is None:
        raise ConfigError(problems, KeyLocations("settings"))
    return settings


def _check_settings(
    values: Any,
    folder: Path | None,
    problems: list[ConfigProblem],
    import_code: bool = True,
    check_servers: bool = True,
) -> tuple[PipelineSettings | None, list[ConfigProblem]]:
    """Types and ranges, files (unless folder is None), combinations; all problems, with those known before."""
    settings, found = parse_settings(PipelineSettings, values)
    problems = problems + [
        problem for problem in found if problem.key not in {known.key for known in problems}
    ]
    if settings is None:
        return None, problems
    if folder is not None:
        settings, found = resolve_files(settings, folder)
        problems = problems + found
    context = read_context_length(settings.model)
    if import_code:
        stages, found = load_custom_stages(settings.stages, settings.model, context)
        settings, problems = replace_unchecked(settings, stages=stages), problems + found
    try:
        stages = resolve_defaults(settings.stages, settings.model, context)
        settings = replace_unchecked(settings, stages=stages)
    except SettingsError as error:
        name, _, text = str(error).partition(": ")
        key = ("stages", *name.split("."))
        problems = problems + (
            []
            if any(keys_overlap(key, known.key) for known in problems)
            else [ConfigProblem(key, text)]
        )
    broken = {problem.key for problem in problems}
    return settings, problems + check_combinations(
        settings, broken, import_code=import_code, check_servers=check_servers
    )


def resolve_evaluation_settings(settings: PipelineSettings) -> EvaluationSettings:
    """The evaluation's settings; its defaults for the pipeline's model where it has no such stage."""
    model = settings.model
    return settings.stages.evaluate or resolve_defaults(
        EvaluationSettings(), model, read_context_length(model)
    )


def build_pipeline_model() -> Any:
    """The pydantic model of PipelineSettings: the type of a Prefect flow's parameter, shown as a form."""
    return resolve_pydantic_model(PipelineSettings)


def dump_settings(settings: Settings) -> dict[str, Any]:
    """The settings as plain JSON values, defaults included; `build_settings` is the inverse for PipelineSettings."""
    plain: dict[str, Any] = _convert_to_json_values(settings)
    return plain


def digest_settings(value: Any) -> str:
    """16 hex digits that are equal exactly when the settings (or plain JSON values) are equal."""
    text = json.dumps(
        _convert_to_json_values(value), sort_keys=True, separators=(",", ":"), allow_nan=False
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _convert_to_json_values(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _convert_to_json_values(getattr(value, field.name))
            for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {str(key): _convert_to_json_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_convert_to_json_values(item) for item in value]
    return str(value) if isinstance(value, Path) else value
