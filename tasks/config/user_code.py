"""User code that settings name: import paths are checked for form and, if permitted, imported and tried.

Custom stages that a config names are imported and registered, and their settings read with the usual checks.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Any

from rl_core.errors import PosttrainError, SettingsError
from rl_core.settings import (
    AnalysisSettings,
    ModelSettings,
    PolicySettings,
    Settings,
    iter_code_paths,
    resolve_defaults,
)
from rl_core.user_code.load import IMPORT_PATH_FORMS, import_object, is_import_path
from tasks import stage_registry
from tasks.config.policy_checks import POLICY_KEY
from tasks.config.problems import ConfigProblem, Key, describe_value
from tasks.config.schema import parse_settings
from tasks.config.settings import CustomStageSettings, PipelineSettings, StagesSettings
from tasks.stage_registry import CustomStage

ENTRY_POINT_GROUP = "posttrain.stages"  # of installed packages: name = "package.module:STAGE"

_CUSTOM_STAGE_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


def list_code_paths(settings: PipelineSettings) -> tuple[str, ...]:
    """List the import paths of code outside this project that the settings name, the environment's first."""
    from rl_core.environments import list_environment_code  # imports torch

    environment = settings.environment
    paths = [
        *list_environment_code(environment.name, environment.options),
        *(path for entry in settings.environments for _, path in iter_code_paths(entry)),
        *(path for _, path in iter_code_paths(settings.stages)),
    ]
    return tuple(dict.fromkeys(paths))


def check_user_code(settings: PipelineSettings, import_code: bool) -> Iterator[ConfigProblem]:
    """Check the form of all import paths before anything is imported, then the code that they refer to.

    Environments and rewards are imported where their options are checked (`cross_checks`).
    """
    named: list[tuple[Key, str]] = [*iter_code_paths(settings.stages, ("stages",))]
    for block, environment in settings.list_environment_blocks():
        if ":" in environment.name:
            named.append(((*block, "name"), environment.name))
    for index, entry in enumerate(settings.environments):
        named += iter_code_paths(entry, ("environments", index))
    broken_keys = set()
    for key, name in named:
        if not is_import_path(name):
            broken_keys.add(key)
            text = f"{describe_value(name)} is not an import path; {IMPORT_PATH_FORMS}"
            yield ConfigProblem(key, text)
    if not import_code:
        return
    stages = settings.stages
    if stages.policy is not None:
        yield from _check_policy_functions(stages.policy, broken_keys)
    if stages.analyze is not None and stages.analyze.measures and not broken_keys:
        yield from _check_custom_metrics(stages.analyze)


def _check_policy_functions(
    policy: PolicySettings, broken_keys: set[Key]
) -> Iterator[ConfigProblem]:
    """Check the loss, the advantage estimator and the exit conditions."""
    if policy.loss is None and policy.advantages is None and not _list_function_conditions(policy):
        return
    from rl_core.curriculum.conditions import check_custom_statistic
    from rl_core.trainers.policy_gradient.custom_functions import (  # imports torch
        CustomAdvantages,
        CustomLoss,
    )

    checks: dict[Key, Callable[[], Any]] = {}
    if policy.loss is not None:
        checks[*POLICY_KEY, "loss"] = functools.partial(
            CustomLoss, policy.loss, policy.loss_options
        )
    if policy.advantages is not None:
        checks[*POLICY_KEY, "advantages"] = functools.partial(
            CustomAdvantages, policy.advantages, policy.advantage_options
        )
    for key, condition in _list_function_conditions(policy):
        checks[*key, "function"] = functools.partial(check_custom_statistic, condition)
    for key, check in checks.items():
        if key in broken_keys:
            continue
        try:
            check()
        except PosttrainError as error:
            yield ConfigProblem(key, _strip_error_key(error))


def _list_function_conditions(policy: PolicySettings) -> list[tuple[Key, Any]]:
    """List the conditions on a user's function, with their keys."""
    conditions: list[tuple[Key, Any]] = [
        ((*POLICY_KEY, "curriculum", index, "exit_conditions", number), condition)
        for index, stage in enumerate(policy.curriculum)
        for number, condition in enumerate(stage.exit_conditions)
    ]
    if policy.early_stop is not None:
        conditions.append(((*POLICY_KEY, "early_stop"), policy.early_stop))
    return [(key, condition) for key, condition in conditions if condition.function is not None]


def _check_custom_metrics(analysis: AnalysisSettings) -> Iterator[ConfigProblem]:
    from rl_core.analysis.custom_metrics import load_custom_metrics
    from rl_core.analysis.runner import list_reserved_metric_names

    try:
        load_custom_metrics(analysis.measures, list_reserved_metric_names())
    except PosttrainError as error:
        index = str(error).partition(": ")[0].partition(".")[2]
        key: Key = ("stages", "analyze", "measures")
        if index.isdecimal():
            key = (*key, int(index))
        yield ConfigProblem(key, _strip_error_key(error))


def _strip_error_key(error: Exception) -> str:
    return str(error).partition(": ")[2] or str(error)


def load_custom_stages(
    stages: StagesSettings, model: ModelSettings, context: int | None
) -> tuple[StagesSettings, list[ConfigProblem]]:
    """Import and register custom stages; return the stages with all defaults of their settings, and problems.

    Args:
        model, context: for defaults that depend on the model.
    """
    custom_stages, problems = dict(stages.custom), []
    for name, block in stages.custom.items():
        if block is None:
            continue
        key: Key = ("stages", "custom", name)
        try:
            custom = _import_and_register_stage(name, block)
        except (SettingsError, ValueError) as error:
            problems.append(ConfigProblem((*key, "use"), str(error).removeprefix("use: ")))
            continue
        typed, setting_problems = parse_settings(custom.settings, block.settings)
        problems += [
            ConfigProblem((*key, "settings", *problem.key), problem.text)
            for problem in setting_problems
        ]
        if typed is None or setting_problems:
            continue
        try:
            typed = resolve_defaults(typed, model, context)
        except SettingsError as error:
            setting, _, text = str(error).partition(": ")
            problems.append(ConfigProblem((*key, "settings", *setting.split(".")), text))
            continue
        values = json.loads(json.dumps(dataclasses.asdict(typed)))
        custom_stages[name] = dataclasses.replace(block, settings=values)
    if custom_stages != stages.custom:
        stages = dataclasses.replace(stages, custom=custom_stages)
    return stages, problems


def _import_and_register_stage(name: str, block: CustomStageSettings) -> CustomStage:
    """Import the stage from its import path, else the installed one, and register it. Raises: SettingsError."""
    if not _CUSTOM_STAGE_NAME.fullmatch(name):
        raise SettingsError(
            f"a stage cannot be named '{name}': it names a folder; use 1 to 40 lower-case letters, digits and _"
        )
    if name == "custom":
        raise SettingsError("a stage cannot be named 'custom', as the block of your stages is")
    path = block.use
    if path is None:
        installed = next(iter(entry_points(group=ENTRY_POINT_GROUP, name=name)), None)
        if installed is None:
            names = sorted(point.name for point in entry_points(group=ENTRY_POINT_GROUP))
            raise SettingsError(
                f"there is no installed stage '{name}' (entry points {ENTRY_POINT_GROUP}: "
                f"{', '.join(names) or 'none'}); set use to its import path or file, such as polish.py:STAGE"
            )
        path = installed.value
    custom: Any = import_object(path, "use", "stage")
    if not isinstance(custom, CustomStage):
        raise SettingsError(
            f"'{path}' is a {type(custom).__name__}, expected a tasks.stage_registry.CustomStage"
        )
    if not (isinstance(custom.settings, type) and issubclass(custom.settings, Settings)):
        raise SettingsError(
            f"'{path}': its settings are not a subclass of rl_core.settings.Settings"
        )
    stage_registry.register_custom_stage(name, custom, path)
    return custom
