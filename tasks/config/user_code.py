"""Checks of the user's code that settings name: import paths are well formed and, where asked, imported and tried.

Stages of the user's that a config names: found, registered, and their settings read with the usual checks.
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
from rl_core.user_code import import_object
from tasks import stage_registry
from tasks.config.policy_checks import POLICY_KEY
from tasks.config.problems import ConfigProblem, Key, describe_value
from tasks.config.schema import parse_settings
from tasks.config.settings import CustomStageSettings, PipelineSettings, StagesSettings
from tasks.stage_registry import CustomStage

_PYTHON_NAME = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
_IMPORT_PATH = re.compile(rf"({_PYTHON_NAME}|[^:\s]+\.py):{_PYTHON_NAME}")


def list_code_paths(settings: PipelineSettings) -> tuple[str, ...]:
    """Import paths of the code outside this project that the settings name, the environment's first."""
    from rl_core.environments import list_environment_code as of_environment  # imports torch

    stages = [path for _, path in iter_code_paths(settings.stages)]
    return tuple(
        dict.fromkeys(
            [*of_environment(settings.environment.name, settings.environment.options), *stages]
        )
    )


def check_user_code(settings: PipelineSettings, import_code: bool) -> Iterator[ConfigProblem]:
    """Problems of import paths, looked at before anything is searched for or imported; then of what they lead to.

    Environments and rewards are imported where their options are checked (`cross_checks`).
    """
    named: list[tuple[Key, str]] = [*iter_code_paths(settings.stages, ("stages",))]
    if ":" in settings.environment.name:
        named.append((("environment", "name"), settings.environment.name))
    broken = [(key, name) for key, name in named if not _IMPORT_PATH.fullmatch(name)]
    for key, name in broken:
        yield ConfigProblem(
            key,
            f"{describe_value(name)} is no import path; write package.module:name, with Python's names",
        )
    if not import_code:
        return
    wrong = {key for key, _ in broken}
    if settings.stages.policy is not None:
        yield from _check_policy_functions(settings.stages.policy, wrong)
    if settings.stages.analyze is not None and settings.stages.analyze.measures and not wrong:
        yield from _check_custom_metrics(settings.stages.analyze)


def _check_policy_functions(
    policy: PolicySettings, broken_keys: set[Key]
) -> Iterator[ConfigProblem]:
    """Loss, advantage estimator and exit conditions."""
    if policy.loss is None and policy.advantages is None and not _list_function_conditions(policy):
        return
    from rl_core.curriculum.conditions import check_custom_statistic
    from rl_core.trainers.policy_gradient.custom_functions import (  # imports torch
        CustomAdvantages,
        CustomLoss,
    )

    parts: list[tuple[Key, Callable[[], Any]]] = []
    if (loss := policy.loss) is not None:
        parts.append(((*POLICY_KEY, "loss"), lambda: CustomLoss(loss, policy.loss_options)))
    if (advantages := policy.advantages) is not None:
        parts.append(
            (
                (*POLICY_KEY, "advantages"),
                lambda: CustomAdvantages(advantages, policy.advantage_options),
            )
        )
    for key, condition in _list_function_conditions(policy):
        parts.append(((*key, "function"), functools.partial(check_custom_statistic, condition)))
    for key, look_up in parts:
        if key in broken_keys:
            continue
        try:
            look_up()
        except PosttrainError as error:
            yield ConfigProblem(key, _strip_error_key(error))


def _list_function_conditions(policy: PolicySettings) -> list[tuple[Key, Any]]:
    """Exit conditions on a function of the user's, with their keys."""
    found: list[tuple[Key, Any]] = [
        ((*POLICY_KEY, "curriculum", index, "exit_conditions", number), condition)
        for index, stage in enumerate(policy.curriculum)
        for number, condition in enumerate(stage.exit_conditions)
    ]
    found += (
        [((*POLICY_KEY, "early_stop"), policy.early_stop)] if policy.early_stop is not None else []
    )
    return [(key, condition) for key, condition in found if condition.function is not None]


def _check_custom_metrics(analysis: AnalysisSettings) -> Iterator[ConfigProblem]:
    from rl_core.analysis.custom_metrics import load_custom_metrics
    from rl_core.analysis.runner import list_reserved_metric_names

    try:
        load_custom_metrics(analysis.measures, list_reserved_metric_names())
    except PosttrainError as error:
        index = str(error).partition(": ")[0].partition(".")[2]
        place: Key = ("stages", "analyze", "measures")
        yield ConfigProblem(
            (*place, int(index)) if index.isdecimal() else place, _strip_error_key(error)
        )


def _strip_error_key(error: Exception) -> str:
    return str(error).partition(": ")[2] or str(error)


ENTRY_POINT_GROUP = (
    "posttrain.stages"  # entry points of installed packages: name = "package.module:STAGE"
)
_CUSTOM_STAGE_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


def load_custom_stages(
    stages: StagesSettings, model: ModelSettings, context: int | None
) -> tuple[StagesSettings, list[ConfigProblem]]:
    """Import and register the stages under `own`; their settings are given with all defaults.

    Args:
        model, context: for defaults that depend on the model.
    """
    own, problems = dict(stages.own), []
    for name, block in stages.own.items():
        if block is None:
            continue
        key: Key = ("stages", "own", name)
        try:
            found = _import_and_register_stage(name, block)
        except (SettingsError, ValueError) as error:
            problems.append(ConfigProblem((*key, "use"), str(error).removeprefix("use: ")))
            continue
        typed, wrong = parse_settings(found.settings, block.settings)
        problems += [
            ConfigProblem((*key, "settings", *problem.key), problem.text) for problem in wrong
        ]
        if typed is None or wrong:
            continue
        try:
            typed = resolve_defaults(typed, model, context)
        except SettingsError as error:
            place, _, text = str(error).partition(": ")
            problems.append(ConfigProblem((*key, "settings", *place.split(".")), text))
            continue
        own[name] = dataclasses.replace(
            block, settings=json.loads(json.dumps(dataclasses.asdict(typed)))
        )
    return dataclasses.replace(stages, own=own) if own != stages.own else stages, problems


def _import_and_register_stage(name: str, block: CustomStageSettings) -> CustomStage:
    """The stage at its import path, else the installed one, in the registry from now on. Raises: SettingsError."""
    if not _CUSTOM_STAGE_NAME.fullmatch(name):
        raise SettingsError(
            f"a stage cannot be named '{name}': its name is a folder's; use 1 to 40 small letters, digits and _"
        )
    path = block.use
    if path is None:
        installed = next(iter(entry_points(group=ENTRY_POINT_GROUP, name=name)), None)
        if installed is None:
            known = (
                ", ".join(sorted(point.name for point in entry_points(group=ENTRY_POINT_GROUP)))
                or "none"
            )
            raise SettingsError(
                f"there is no installed stage '{name}' (entry points {ENTRY_POINT_GROUP}: {known}); set use to its import path or "
                "file, as polish.py:STAGE"
            )
        path = installed.value
    found: Any = import_object(path, "use")
    if not isinstance(found, CustomStage):
        raise SettingsError(
            f"'{path}' is a {type(found).__name__}, expected a tasks.stage_registry.CustomStage"
        )
    if not (isinstance(found.settings, type) and issubclass(found.settings, Settings)):
        raise SettingsError(f"'{path}': its settings are no subclass of rl_core.settings.Settings")
    stage_registry.register_custom_stage(name, found, path)
    return found
