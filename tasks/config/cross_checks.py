"""Checks across settings: combinations that cannot work are refused before anything runs, wasteful ones are named."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_core.curriculum.watched_metrics import TOOL_SHARE, unknown_tool
from rl_core.errors import PosttrainError, SettingsError, nearest
from rl_core.settings import LoopSettings, PolicySettings, SamplingSettings
from rl_core.settings.sinks import check_installed
from tasks.config.alert_checks import unlogged_alerts
from tasks.config.code_checks import code_problems
from tasks.config.curriculum_checks import POLICY, curriculum_problems, watched_keys
from tasks.config.files import context_of
from tasks.config.memory_checks import memory_problems
from tasks.config.network_checks import STAGE as NETWORK
from tasks.config.network_checks import network_problems
from tasks.config.problems import Key, Problem, overlap
from tasks.config.rollout_checks import rollout_problems
from tasks.config.settings import PipelineSettings
from tasks.config.stage_checks import stage_problems
from tasks.stage_registry import policy_stages

__all__ = ["check_combinations", "find_waste"]


@dataclass(frozen=True, slots=True)
class _Finding:
    """A problem and the other keys that it rests on."""

    problem: Problem
    about: tuple[Key, ...]


def check_combinations(
    settings: PipelineSettings, broken: Collection[Key] = (), *, import_code: bool = True, ask_servers: bool = True
) -> list[Problem]:
    """Problems of combinations of settings.

    Args:
        broken: keys that have a problem already; their defaults stand in, so nothing that rests on them is reported.
        import_code: False: no code that the settings name by import path is imported, nor what rests on it checked.
        ask_servers: False: an inference server or a Ray cluster of rollouts need not be there yet, nor the GPU and the
            package that frozen weights in few bits need.
    """
    findings = [
        *_model(settings),
        *(_few_bits(settings) if ask_servers else ()),
        *(_Finding(problem, about) for problem, about in stage_problems(settings)),
        *_sampling(settings),
        *_loops(settings),
        *_sinks(settings),
        *(_Finding(problem, (("model",),)) for problem in rollout_problems(settings, ask_servers)),
        *(_Finding(problem, ()) for problem in code_problems(settings, import_code)),
        *_environment(settings, import_code),
        *_rewards(settings, import_code),
        *(_Finding(problem, about) for problem, about in curriculum_problems(settings.stages.policy)),
        *(_Finding(problem, (problem.key[:-1],)) for problem in memory_problems(settings)),
        *(_Finding(problem, (NETWORK,)) for problem in network_problems(settings, import_code)),
    ]
    return [
        finding.problem
        for finding in findings
        if not any(overlap(key, other) for key in (finding.problem.key, *finding.about) for other in broken if other)
    ]


def find_waste(settings: PipelineSettings) -> list[Problem]:
    """Settings that work, but spend time on what nothing uses, or wait for what never comes: for warnings."""
    policy, found = settings.stages.policy, [*unlogged_alerts(settings)]
    if settings.stages.reward_model is None or policy is None or _asks_reward_model(policy):
        return found
    text = (
        "is trained, but no reward of the policy uses it: set stages.policy.rewards.learned to a weight, as "
        "`rewards: {task: 1.0, learned: 0.1}`, or leave this stage out"
    )
    return [*found, Problem(("stages", "reward_model"), text)]


def _asks_reward_model(policy: PolicySettings) -> bool:
    """The component `learned` has a weight other than 0 in some stage of the curriculum, or without one."""
    by_stage = [{**policy.rewards, **stage.rewards} for stage in policy.curriculum] or [policy.rewards]
    return any(weights.get("learned") for weights in by_stage)


def _finding(key: Key, text: str, *about: Key) -> _Finding:
    return _Finding(Problem(key, text), about)


def _model(settings: PipelineSettings) -> Iterator[_Finding]:
    model = settings.model
    if model.lora is not None and model.path is None:
        yield _finding(
            ("model", "lora"),
            "adapters on a from-scratch preset leave its random weights as they are; set model.path, or remove lora",
            ("model", "path"),
        )
    if model.trust_remote_code and model.path is None:
        yield _finding(
            ("model", "trust_remote_code"),
            "a preset brings no code; set model.path, or remove this key",
            ("model", "path"),
        )


def _few_bits(settings: PipelineSettings) -> Iterator[_Finding]:
    """The GPU and the package of frozen weights in few bits are here, where a stage trains adapters on them."""
    lora = settings.model.lora
    trains = any(name in policy_stages() for name in settings.stages.active)
    if lora is None or lora.quantize == "none" or not trains:
        return
    from rl_core.models.causal_lm import device_of  # imports torch
    from rl_core.models.lora import check_few_bits

    try:
        check_few_bits(lora, device_of(settings.model))
    except SettingsError as error:
        key = ("model", "lora", "quantize")
        yield _finding(key, str(error).removeprefix("lora.quantize: "), ("model", "device"))


def _samplings(settings: PipelineSettings) -> Iterator[tuple[Key, SamplingSettings]]:
    for name in settings.stages.active:
        sampling = getattr(getattr(settings.stages, name), "sampling", None)
        if isinstance(sampling, SamplingSettings):
            yield ("stages", name, "sampling"), sampling


def _sampling(settings: PipelineSettings) -> Iterator[_Finding]:
    context = context_of(settings.model)
    for key, sampling in _samplings(settings):
        if context is not None and sampling.max_completion_tokens >= context:
            source = "model.context" if settings.model.path is None else f"the context of {settings.model.path}"
            yield _finding(
                (*key, "max_completion_tokens"),
                f"{sampling.max_completion_tokens} leaves no room for a prompt: {source} is {context}; lower this, or "
                "take a longer context",
                ("model",),
            )
    evaluate = settings.stages.evaluate
    if evaluate is not None and evaluate.samples > 1 and evaluate.sampling.temperature == 0:
        yield _finding(
            ("stages", "evaluate", "samples"),
            f"{evaluate.samples} greedy samples of an episode are all alike; use samples 1, or a temperature above 0",
            ("stages", "evaluate", "sampling", "temperature"),
        )


def _loops(settings: PipelineSettings) -> Iterator[_Finding]:
    for name in settings.stages.active:
        loop = getattr(settings.stages, name)
        if isinstance(loop, LoopSettings) and loop.patience is not None and loop.eval_every == 0:
            yield _finding(
                ("stages", name, "patience"),
                f"{loop.patience} evaluations are never made with eval_every 0; set eval_every, or remove patience",
                ("stages", name, "eval_every"),
            )


def _sinks(settings: PipelineSettings) -> Iterator[_Finding]:
    """The package of each place of metrics is installed."""
    for index, sink in enumerate(settings.tracking.sinks):
        try:
            check_installed(sink)
        except PosttrainError as error:
            yield _finding(("tracking", "sinks", index), str(error))


def _environment(settings: PipelineSettings, import_code: bool) -> Iterator[_Finding]:
    """The environment exists, takes its options, and has the levels that are named."""
    from rl_core.environments import make  # imports torch
    from rl_core.environments import named_code as of_environment

    if not import_code and of_environment(settings.environment.name, settings.environment.options):
        return
    options = dict(settings.environment.options)
    path = options.get("path")
    if settings.environment.name == "prompts":
        if isinstance(path, str) and not Path(path).exists() and options.get("revision") is None:
            return  # tasks/config/files says so; the levels are those of the rows
    elif isinstance(path, str) and not Path(path).is_file():
        # tasks/config/files says what is wrong with it; names and levels are checked all the same
        options["path"] = os.devnull
    try:
        environment = make(settings.environment.name, options)
        known = tuple(environment.levels)
    except PosttrainError as error:
        name, colon, text = str(error).partition(": ")
        inside = colon and name.split(".")[0] in ("name", "options")
        key: Key = ("environment", *name.split(".")) if inside else ("environment",)
        yield _finding(key, text if inside else str(error))
        return
    except Exception as error:  # a user's own class: whatever it raises is for the user to see
        yield _finding(("environment",), f"{settings.environment.name!r} raised {type(error).__name__}: {error}")
        return
    yield from _columns(settings, environment.columns, import_code)
    policy = settings.stages.policy
    for key, metric in watched_keys(policy):
        if problem := unknown_tool(metric, environment.tools.tools if metric.startswith(TOOL_SHARE) else ()):
            yield _finding((*key, "metric"), problem, ("environment",))
    if policy is not None and settings.environment.name == "prompts" and not environment.knows_success:
        by_stage = [{**policy.rewards, **stage.rewards} for stage in policy.curriculum] or [policy.rewards]
        if not any(weight for weights in by_stage for name, weight in weights.items() if name != "task"):
            yield _finding(
                (*POLICY, "rewards"),
                "prompts alone reward nothing: set environment.options.verifier (exact, numeric, regex, math, code), "
                'or name a reward, as `rewards: {exact: 1.0}` or {"rewards.py:correct": 1.0}',
                ("environment",),
            )
    for key, levels in _named_levels(settings):
        for level in levels:
            if level not in known:
                text = f"environment '{settings.environment.name}' has no level '{level}'; {nearest(level, known)}"
                yield _finding((*key, *_item(levels, level)), text, ("environment",))
        if key == ("stages", "prepare_data", "levels"):
            continue  # there, twice means twice as often
        for level in (level for level, count in Counter(list(levels)).items() if count > 1):
            yield _finding(key, f"level '{level}' is named twice; name it once")


def _item(levels: Collection[str], level: str) -> Key:
    """The rest of the key of one level: its name in a mapping, its index in a list."""
    return (levels.index(level),) if isinstance(levels, Sequence) else (level,)


def _named_levels(settings: PipelineSettings) -> Iterator[tuple[Key, Collection[str]]]:
    for name in settings.stages.active:
        stage = getattr(settings.stages, name)
        levels = getattr(stage, "levels", None)
        if levels is not None:
            yield ("stages", name, "levels"), levels
        for index, part in enumerate(getattr(stage, "curriculum", ())):
            yield ("stages", name, "curriculum", index, "levels"), part.levels
    if settings.prefer is not None:
        yield ("prefer", "levels"), settings.prefer.levels


def _columns(settings: PipelineSettings, columns: tuple[str, ...] | None, import_code: bool) -> Iterator[_Finding]:
    """Columns that rewards read are columns of the environment's rows."""
    policy = settings.stages.policy
    for key, name, weight in _named_rewards(settings, import_code):
        from rl_core.rewards.orchestrator import RewardOrchestrator  # imports torch

        with contextlib.suppress(PosttrainError):  # `_rewards` says what is wrong with it
            rewards = RewardOrchestrator({name: weight}, options=policy.reward_options if policy else None)
            try:
                rewards.check_columns(columns)
            except PosttrainError as error:
                yield _finding(key, str(error), ("environment",))


def _named_rewards(settings: PipelineSettings, import_code: bool) -> Iterator[tuple[Key, str, float]]:
    """(key, name, weight) of every reward that can be made here, and wrong: `task` is always there."""
    for stage in ("policy", "evaluate"):
        for name, weight in getattr(getattr(settings.stages, stage), "rewards", {}).items():
            if name not in ("task", "learned") and (":" not in name or import_code):
                yield ("stages", stage, "rewards", name), name, weight


def _rewards(settings: PipelineSettings, import_code: bool) -> Iterator[_Finding]:
    policy = settings.stages.policy
    for place, name, weight in _named_rewards(settings, import_code):
        from rl_core.rewards.orchestrator import RewardOrchestrator  # imports torch

        try:
            RewardOrchestrator({name: weight}, options=policy.reward_options if policy else None)
        except PosttrainError as error:
            yield _finding(place, str(error).partition(": ")[2] or str(error))
    if settings.stages.evaluate is not None and "learned" in settings.stages.evaluate.rewards:
        yield _finding(
            ("stages", "evaluate", "rewards", "learned"),
            "the reward model scores while a policy trains; name a verifier or a function here",
        )
    if policy is None:
        return
    key: Key = (*POLICY, "rewards")
    by_stage = [{**policy.rewards, **stage.rewards} for stage in policy.curriculum] or [policy.rewards]
    if not all(any(weights.values()) for weights in by_stage):
        yield _finding(key, "no reward has a weight other than 0, so there is nothing to learn; write {task: 1.0}")
    asked = policy.rewards.get("learned") or any(stage.rewards.get("learned") for stage in policy.curriculum)
    if asked and settings.stages.reward_model is None:
        yield _finding(
            (*key, "learned"),
            "needs a reward model; add `reward_model: {}` to the stages, or remove this reward",
            ("stages", "reward_model"),
        )
