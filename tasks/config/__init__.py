"""The configuration of a pipeline: YAML file -> PipelineSettings, with every problem reported at once.

    settings = load_settings("configs/demo.yaml", overrides=["stages.policy.learning_rate=3e-4"])

`load_settings` reads the file and applies overrides (`yaml_loader`), checks unknown keys, types and ranges (`schema`,
built from the dataclasses of `settings` and rl_core/settings), resolves files (`machine_checks`), fills in defaults
that depend on the model (rl_core/settings/defaults), then checks combinations of settings (`cross_checks`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rl_core.errors import SettingsError
from rl_core.settings import EvaluationSettings, Settings, resolve_defaults
from rl_core.settings.base import replace_unchecked
from rl_core.settings.defaults import is_unresolved
from rl_core.settings.deprecated_keys import restore_former_names
from tasks.config.cross_checks import check_combinations, find_waste
from tasks.config.machine_checks import read_context_length, resolve_files
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
    "check_changed_settings",
    "load_settings",
    "list_code_paths",
    "build_pipeline_model",
    "dump_settings",
    "digest_settings",
]

# Settings that passed all checks, by identity and whether servers were among the checks.
_checked: weakref.WeakValueDictionary[tuple[int, bool], PipelineSettings] = (
    weakref.WeakValueDictionary()
)


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

    A bare name such as `demo` refers to the shipped config, unless the current folder has a file of that name.
    Relative paths in the file are looked up from the current folder, then from the file's folder, and made absolute.

    Args:
        overrides: "key.path=value" each, applied in order; the value is YAML.
        check_files: False skips what depends on this machine (data and model files, output folder, devices).
        import_code: False imports nothing that the settings name by import path, and skips checks that depend on it.
        check_servers: False does not require the inference server or the Ray cluster of rollouts, nor the GPU of
            quantized
            weights: for commands that do not train.
        warn: called with a line (location, key's path, text) for each setting that works but wastes time.
    Raises: ConfigError with every problem: location, key's path, the value, what is allowed.
    """
    path = find_config(path)
    document = read_yaml(path)
    locations = KeyLocations(str(path), lines=document.lines)
    earlier = document.problems + apply_overrides(document.data, overrides, locations)
    folder = Path(path).parent if check_files else None
    settings, problems = _check_settings(
        document.data, folder, earlier, import_code, check_servers and check_files, locations
    )
    if problems or settings is None:
        raise ConfigError(problems, locations)
    if warn is not None:
        for problem in find_waste(settings):
            warn(locations.format_problem(problem))
    return settings


def build_settings(
    values: Mapping[str, Any],
    *,
    check_files: bool = True,
    import_code: bool = True,
    check_servers: bool = True,
) -> PipelineSettings:
    """Build settings from a plain dict, as from `dump_settings` or Prefect, with the same checks as a file.

    Raises: ConfigError.
    """
    settings, problems = _check_settings(
        values, Path() if check_files else None, [], import_code, check_servers and check_files
    )
    if problems or settings is None:
        raise ConfigError(problems, KeyLocations("settings"))
    return settings


def check_changed_settings(
    settings: PipelineSettings, *, check_servers: bool = True
) -> PipelineSettings:
    """Return settings that passed all checks: these as they are, or a checked copy if they were changed since.

    Raises: ConfigError.
    """
    if any(_checked.get((id(settings), level)) is settings for level in {True, check_servers}):
        return settings
    return build_settings(dump_settings(settings), check_servers=check_servers)


def _check_settings(
    values: Any,
    folder: Path | None,
    problems: list[ConfigProblem],
    import_code: bool = True,
    check_servers: bool = True,
    locations: KeyLocations | None = None,
) -> tuple[PipelineSettings | None, list[ConfigProblem]]:
    """Check types and ranges, files (unless folder is None) and combinations.

    Return all problems, with the earlier ones.
    """
    settings, parse_problems = parse_settings(PipelineSettings, values, locations)
    known_keys = {problem.key for problem in problems}
    problems = problems + [problem for problem in parse_problems if problem.key not in known_keys]
    if settings is None:
        return None, problems
    if folder is not None:
        paths, file_problems = resolve_files(settings, folder)
        settings, problems = replace_unchecked(settings, paths), problems + file_problems
        with contextlib.suppress(SettingsError):  # reported above
            settings.mix_environments()
    context = read_context_length(settings.model)
    if import_code and settings.stages.custom:
        stages, stage_problems = load_custom_stages(settings.stages, settings.model, context)
        settings = replace_unchecked(settings, {("stages",): stages})
        problems = problems + stage_problems
    for block in ("stages", "online"):
        values = getattr(settings, block)
        try:
            resolved = values and resolve_defaults(values, settings.model, context)
            settings = replace_unchecked(settings, {(block,): resolved})
        except SettingsError as error:
            name, _, text = str(error).partition(": ")
            key = (block, *name.split("."))
            if not any(keys_overlap(key, known.key) for known in problems):
                problems = [*problems, ConfigProblem(key, text)]
    broken = {problem.key for problem in problems}
    problems = problems + check_combinations(
        settings, broken, import_code=import_code, check_servers=check_servers
    )
    if not problems and folder is not None and import_code:
        _checked[id(settings), check_servers] = settings
    return settings, problems


def resolve_evaluation_settings(settings: PipelineSettings) -> EvaluationSettings:
    """Return the evaluation's settings, or its defaults for the pipeline's model if there is no such stage."""
    model = settings.model
    return settings.stages.evaluate or resolve_defaults(
        EvaluationSettings(), model, read_context_length(model)
    )


def build_pipeline_model() -> Any:
    """Build the pydantic model of PipelineSettings: the type of a Prefect flow's parameter, shown as a form."""
    return resolve_pydantic_model(PipelineSettings)


def dump_settings(settings: Settings) -> dict[str, Any]:
    """Convert settings to plain JSON values, including defaults.

    `build_settings` is the inverse for PipelineSettings.
    """
    values: dict[str, Any] = _convert_to_json_values(settings)
    return values


def digest_settings(value: Any) -> str:
    """Compute 16 hex digits that are equal exactly if the settings, or the plain JSON values, are equal.

    Settings count under their former names, so that runs and sweeps of earlier versions are recognised.
    """
    plain = _convert_to_json_values(value, restore_former_names)
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _convert_to_json_values(
    value: Any, rename: Callable[[type, dict[str, Any]], dict[str, Any]] = lambda _, plain: plain
) -> Any:
    """Convert to plain values; `rename` gets the class and the values of every block of settings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        plain = {name: _convert_to_json_values(getattr(value, name), rename) for name in names}
        return rename(type(value), plain)
    if isinstance(value, Mapping):
        return {str(key): _convert_to_json_values(item, rename) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_convert_to_json_values(item, rename) for item in value]
    if is_unresolved(value):  # numbers of a subclass, which YAML would refuse
        return int(value) if isinstance(value, int) else float(value)
    return str(value) if isinstance(value, Path) else value
