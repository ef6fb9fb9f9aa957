"""Checks of the user's code that settings name: import paths are well formed and, where asked, imported and tried."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from rl_core.errors import PosttrainError
from rl_core.settings import AnalysisSettings, PolicySettings, code_paths
from tasks.config.curriculum_checks import POLICY
from tasks.config.problems import Key, Problem, shown
from tasks.config.settings import PipelineSettings

__all__ = ["code_problems", "named_code"]

_NAME = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
_IMPORT_PATH = re.compile(rf"({_NAME}|[^:\s]+\.py):{_NAME}")


def named_code(settings: PipelineSettings) -> tuple[str, ...]:
    """Import paths of the code outside this project that the settings name, the environment's first."""
    from rl_core.environments import named_code as of_environment  # imports torch

    stages = [path for _, path in code_paths(settings.stages)]
    return tuple(dict.fromkeys([*of_environment(settings.environment.name, settings.environment.options), *stages]))


def code_problems(settings: PipelineSettings, import_code: bool) -> Iterator[Problem]:
    """Problems of import paths, looked at before anything is searched for or imported; then of what they lead to.

    Environments and rewards are imported where their options are checked (`cross_checks`).
    """
    named: list[tuple[Key, str]] = [*code_paths(settings.stages, ("stages",))]
    if ":" in settings.environment.name:
        named.append((("environment", "name"), settings.environment.name))
    broken = [(key, name) for key, name in named if not _IMPORT_PATH.fullmatch(name)]
    for key, name in broken:
        yield Problem(key, f"{shown(name)} is no import path; write package.module:name, with Python's names")
    if not import_code:
        return
    wrong = {key for key, _ in broken}
    if settings.stages.policy is not None:
        yield from _policy(settings.stages.policy, wrong)
    if settings.stages.analyze is not None and settings.stages.analyze.measures and not wrong:
        yield from _measures(settings.stages.analyze)


def _policy(policy: PolicySettings, wrong: set[Key]) -> Iterator[Problem]:
    """Loss, advantage estimator and exit conditions."""
    if policy.loss is None and policy.advantages is None and not _conditions(policy):
        return
    from rl_core.curriculum.own_statistic import check_function
    from rl_core.trainers.policy_gradient.own_parts import OwnAdvantages, OwnLoss  # imports torch

    parts: list[tuple[Key, Callable[[], Any]]] = []
    if (loss := policy.loss) is not None:
        parts.append(((*POLICY, "loss"), lambda: OwnLoss(loss, policy.loss_options)))
    if (advantages := policy.advantages) is not None:
        parts.append(((*POLICY, "advantages"), lambda: OwnAdvantages(advantages, policy.advantage_options)))
    for key, condition in _conditions(policy):
        parts.append(((*key, "function"), lambda condition=condition: check_function(condition)))  # type: ignore[misc]
    for key, look_up in parts:
        if key in wrong:
            continue
        try:
            look_up()
        except PosttrainError as error:
            yield Problem(key, _after_key(error))


def _conditions(policy: PolicySettings) -> list[tuple[Key, Any]]:
    """Exit conditions on a function of the user's, with their keys."""
    found: list[tuple[Key, Any]] = [
        ((*POLICY, "curriculum", index, "exit_conditions", number), condition)
        for index, stage in enumerate(policy.curriculum)
        for number, condition in enumerate(stage.exit_conditions)
    ]
    found += [((*POLICY, "early_stop"), policy.early_stop)] if policy.early_stop is not None else []
    return [(key, condition) for key, condition in found if condition.function is not None]


def _measures(analysis: AnalysisSettings) -> Iterator[Problem]:
    from rl_core.analysis.own_measures import own_measures
    from rl_core.analysis.runner import measure_names

    try:
        own_measures(analysis.measures, measure_names())
    except PosttrainError as error:
        index = str(error).partition(": ")[0].partition(".")[2]
        place: Key = ("stages", "analyze", "measures")
        yield Problem((*place, int(index)) if index.isdecimal() else place, _after_key(error))


def _after_key(error: Exception) -> str:
    return str(error).partition(": ")[2] or str(error)
