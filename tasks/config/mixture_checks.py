"""Checks of several environments in one run: their files, rewards, and the levels that stages name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.curriculum.watched_metrics import include_rewards
from rl_core.errors import PosttrainError, SettingsError
from rl_core.settings import PolicySettings, RewardSettings
from tasks.config.policy_checks import POLICY_KEY
from tasks.config.problems import ConfigProblem, Key
from tasks.config.settings import PipelineSettings

if TYPE_CHECKING:
    from rl_core.environments import Environment


def replace_missing_files(settings: PipelineSettings) -> dict[str, Any] | None:
    """Return the mixture's options without data files that do not exist, which machine_checks reports.

    None = the levels are in such a file, so they are unknown; or a label or weight is wrong, which is reported.
    """
    if "environments" not in settings.environment.options:
        return None
    entries = [dict(entry) for entry in settings.environment.options["environments"]]
    for entry in entries:
        path = entry["options"].get("path")
        if not isinstance(path, str):
            continue
        if entry["name"] != "prompts":
            if not Path(path).is_file():
                entry["options"] = {**entry["options"], "path": os.devnull}
        elif not Path(path).exists() and entry["options"].get("revision") is None:
            return None
    return {"environments": entries}


def locate_environment_error(settings: PipelineSettings, error: PosttrainError) -> ConfigProblem:
    """Return the problem of an environment that cannot be created, at its key."""
    key_text, colon, text = str(error).partition(": ")
    parts: list[str | int] = [int(part) if part.isdigit() else part for part in key_text.split(".")]
    if colon and settings.environments and parts[:2] == ["options", "environments"]:
        return ConfigProblem(("environments", *parts[2:]), text)
    if settings.environments:
        return ConfigProblem(("environments",), str(error))
    if colon and parts[0] in ("name", "options"):
        return ConfigProblem(("environment", *key_text.split(".")), text)
    return ConfigProblem(("environment",), str(error))


def list_level_names(environment: Environment) -> tuple[str, ...]:
    """List the names that settings may use as levels: of a mixture also its environments, which stand for theirs."""
    if environment.parts == (environment,):
        return tuple(environment.levels)
    return (*environment.levels, *(part.name for part in environment.parts))


def describe_environment_names(environment: Environment) -> str:
    """Describe the environment, or those of a mixture, for messages."""
    names = [f"'{part.name}'" for part in environment.parts]
    return (
        f"environment {names[0]} has"
        if len(names) == 1
        else f"environments {', '.join(names)} have"
    )


def include_mixture_rewards(settings: PipelineSettings) -> PolicySettings | None:
    """Return the policy stage with the reward components of all environments, for the names of their metrics."""
    policy = settings.stages.policy
    if policy is None:
        return None
    return include_rewards(policy, [name for e in settings.environments for name in e.rewards])


def check_trained_levels(settings: PipelineSettings) -> Iterator[ConfigProblem]:
    """Refuse curriculum stages that train on environments of weight 0."""
    unused = {entry.resolved_label for entry in settings.environments if not entry.weight}
    policy = settings.stages.policy
    for index, stage in enumerate(policy.curriculum if policy is not None else ()):
        for level in stage.levels:
            label = level.partition("/")[0]
            if label in unused:
                text = f"environment '{label}' has weight 0, so it is only evaluated; leave it out, or give it a weight"
                yield ConfigProblem((*POLICY_KEY, "curriculum", index, "levels", level), text)


def check_mixture_rewards(
    settings: PipelineSettings, environment: Environment, import_code: bool
) -> Iterator[ConfigProblem]:
    """Check that the rewards of every environment exist and can use its rows."""
    from rl_core.environments.mixture import LabelledEnvironment  # imports torch
    from rl_core.environments.prompts import Prompts
    from rl_core.rewards.mixture_rewards import check_part_credit, merge_reward_options

    policy, evaluate = settings.stages.policy, settings.stages.evaluate
    are_options_valid = True
    for index, part in enumerate(environment.parts):
        assert isinstance(part, LabelledEnvironment)
        entry, block = settings.environments[index], ("environments", index)
        if evaluate is not None:
            key: Key = ("stages", "evaluate", "rewards")
            yield from _check_components(key, evaluate.rewards, None, part, import_code)
        if policy is None:
            continue
        try:
            options = merge_reward_options(policy.reward_options, entry.reward_options)
        except SettingsError as error:
            name, _, text = str(error).partition(": ")
            yield ConfigProblem((*block, *name.split(".")), text)
            are_options_valid = False
            continue
        weights = entry.rewards or policy.rewards
        key = (*block, "rewards") if entry.rewards else (*POLICY_KEY, "rewards")
        yield from _check_components(key, weights, options, part, import_code)
        if entry.rewards.get("learned") and settings.stages.reward_model is None:
            text = (
                "needs a reward model; add `reward_model: {}` to the stages, or remove this reward"
            )
            yield ConfigProblem((*key, "learned"), text)
        has_reward = any(weight for name, weight in weights.items() if name != "task")
        if isinstance(part.inner, Prompts) and not part.knows_success and not has_reward:
            text = (
                "prompts alone give no reward: set options.verifier (exact, numeric, regex, math, code), or name a "
                "reward, as in `rewards: {exact: 1.0}`"
            )
            yield ConfigProblem((*block, "rewards"), text)
    if policy is not None and are_options_valid:
        try:
            check_part_credit(policy, environment)
        except SettingsError as error:
            yield ConfigProblem(("environments",), str(error))


def _check_components(
    key: Key,
    weights: Mapping[str, float],
    options: RewardSettings | None,
    part: Any,
    import_code: bool,
) -> Iterator[ConfigProblem]:
    """Check each component of one environment that can be created here, which excludes `task` and `learned`."""
    from rl_core.rewards.orchestrator import RewardOrchestrator  # imports torch

    for name, weight in weights.items():
        if name in ("task", "learned") or (":" in name and not import_code):
            continue
        try:
            RewardOrchestrator({name: weight}, options=options).check_environment(part.inner)
        except PosttrainError as error:
            text = str(error).removeprefix(f"rewards.{name}: ")
            yield ConfigProblem((*key, name), f"environment '{part.name}': {text}")
