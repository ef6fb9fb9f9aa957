"""Checks of the stages that judge models: what they need from other stages, suites, and conditions on their metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rl_core.errors import SettingsError, suggest_name
from rl_core.settings import SuitesSettings
from tasks.config.problems import ConfigProblem, Key
from tasks.config.settings import PipelineSettings, StagesSettings
from tasks.stage_registry import list_policy_stages

# a problem, and the other keys that it depends on
StageFinding = tuple[ConfigProblem, tuple[Key, ...]]

MODEL_PATH_KEY: Key = ("model", "path")
_SUITES_KEY: Key = ("stages", "suites")
_METRICS_KEY: Key = ("stages", "promote", "metrics")


def build_stage_finding(key: Key, text: str, *about: Key) -> StageFinding:
    """Build a problem of a stage.

    Args:
        about: other keys that it depends on.
    """
    return ConfigProblem(key, text), about


def check_result_stages(settings: PipelineSettings, *, trained: bool) -> Iterator[StageFinding]:
    """Yield the stages that judge and lack episodes or a model.

    Args:
        trained: a stage trains a policy.
    """
    stages = settings.stages
    policies = [("stages", name) for name in list_policy_stages()]
    any_policy = f"{', '.join(list_policy_stages()[:-1])} or {list_policy_stages()[-1]}"
    if stages.evaluate is not None and not trained and settings.model.path is None:
        text = f"has no policy to evaluate; add stages.{any_policy}, or set model.path"
        yield build_stage_finding(("stages", "evaluate"), text, MODEL_PATH_KEY, *policies)
    if stages.suites is not None and not trained and settings.model.path is None:
        text = f"has no policy to evaluate; add stages.{any_policy}, or set model.path"
        yield build_stage_finding(("stages", "suites"), text, MODEL_PATH_KEY, *policies)
    if stages.gguf is not None and not trained:
        text = f"has no new model to write; add stages.{any_policy}, or use `posttrain export`"
        yield build_stage_finding(("stages", "gguf"), text, *policies)
    for name, needed, purpose in _list_evaluation_consumers(stages):
        if stages.evaluate is None:
            text = f"needs {needed} of stages.evaluate; add `evaluate: {{}}`"
            yield build_stage_finding(("stages", name), text, ("stages", "evaluate"))
        if purpose and not trained:
            yield build_stage_finding(
                ("stages", name),
                f"has no new model to {purpose}; add stages.{any_policy}",
                *policies,
            )


def _list_evaluation_consumers(stages: StagesSettings) -> Iterator[tuple[str, str, str]]:
    """Yield (stage, its need from the evaluation, its purpose for a new model) of the stages after the evaluation."""
    if stages.analyze is not None:
        yield "analyze", "the episodes", ""
    if stages.export is not None and stages.promote is None:  # promote reports it otherwise
        yield "export", "the log-probs", "prove"
    if stages.promote is not None:
        yield "promote", "the result", "promote"


def resolve_suite_paths(
    suites: SuitesSettings | None,
    find_path: Callable[[str], Path | None],
    report: Callable[[Key, str], object],
) -> dict[Key, Any]:
    """Return the suites' files and folders as absolute paths, by the keys that name them.

    Args:
        find_path: finds a path of the config; None = it does not exist.
        report: receives the key of a path that does not exist, and a message.
    """
    if suites is None:
        return {}
    paths: dict[Key, Any] = {}
    for field in ("include_path", "inspect_python"):
        name = getattr(suites, field)
        path = find_path(name) if name is not None else None
        if path is not None:
            paths[*_SUITES_KEY, field] = str(path)
        elif name is not None:
            report((*_SUITES_KEY, field), f"{name} does not exist")
    resolved = []
    for suite in suites.tasks:
        prefix, _, rest = suite.partition(":")
        name, at, tasks = rest.rpartition("@")
        file = find_path(name) if prefix == "inspect" and at else None
        if prefix == "inspect" and at and file is None:
            report((*_SUITES_KEY, "tasks"), f"the file {name} does not exist")
        resolved.append(suite if file is None else f"inspect:{file}@{tasks}")
    if tuple(resolved) != suites.tasks:
        paths[*_SUITES_KEY, "tasks"] = tuple(resolved)
    return paths


def check_suites(settings: PipelineSettings, *, check_packages: bool) -> Iterator[StageFinding]:
    """Yield problems of the suites: their packages, and conditions of the gate on metrics that they cannot give.

    Args:
        check_packages: False: the evaluators need not be installed.
    """
    suites, promote = settings.stages.suites, settings.stages.promote
    conditions = promote.metrics if promote is not None else {}
    if suites is None:
        for name in conditions:
            text = "is a metric of no suite: add stages.suites with the task, or leave this condition out"
            yield build_stage_finding((*_METRICS_KEY, name), text, _SUITES_KEY)
        return
    if not suites.tasks:
        text = "names no suite; write lm-eval:TASK,TASK or inspect:FILE.py@TASK"
        yield build_stage_finding((*_SUITES_KEY, "tasks"), text)
        return
    try:
        labels = [task.label for task in suites.list_tasks()]
    except SettingsError:  # a malformed suite, which is reported already
        return
    for name in conditions:
        task, _, metric = name.rpartition("/")
        if task not in labels or not metric:
            text = (
                f"names no task of stages.suites; write TASK/METRIC: {suggest_name(task, labels)}"
            )
            yield build_stage_finding((*_METRICS_KEY, name), text, _SUITES_KEY)
    if check_packages:
        from rl_core.evaluators.run_suites import describe_evaluators

        try:
            describe_evaluators(suites)
        except SettingsError as error:
            field, _, text = str(error).removeprefix("stages.suites.").partition(": ")
            yield build_stage_finding((*_SUITES_KEY, field), text)
