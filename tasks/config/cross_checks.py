"""Checks across settings: impossible combinations are refused before anything runs, wasteful ones get a warning.

Among them: inputs that stages need from earlier stages or from model.path, the environment of networks, and alerts on
metrics that nothing logs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.curriculum.watched_metrics import describe_unlogged_metric, find_metric_range
from rl_core.errors import PosttrainError, SettingsError, suggest_name
from rl_core.settings import EnvironmentSettings, LoopSettings, PolicySettings, SamplingSettings
from rl_core.settings.services import check_sink_installed
from rl_core.user_code.checks import USER_CODE_ERRORS
from tasks.config.machine_checks import (
    AGENT_ENVIRONMENTS,
    check_memory,
    find_unwritable_model,
    read_context_length,
)
from tasks.config.mixture_checks import (
    check_mixture_rewards,
    check_trained_levels,
    describe_environment_names,
    include_mixture_rewards,
    list_level_names,
    locate_environment_error,
    replace_missing_files,
)
from tasks.config.policy_checks import (
    POLICY_KEY,
    check_curriculum,
    check_rollouts,
    check_self_play_environment,
    list_watched_metrics,
)
from tasks.config.problems import ConfigProblem, Key, keys_overlap
from tasks.config.result_checks import (
    MODEL_PATH_KEY,
    StageFinding,
    build_stage_finding,
    check_result_stages,
    check_suites,
)
from tasks.config.settings import PipelineSettings
from tasks.config.user_code import check_user_code
from tasks.stage_registry import list_policy_stages, list_stage_names

if TYPE_CHECKING:
    from rl_core.environments import Environment

NETWORK_KEY: Key = ("stages", "network")
_PREPARE_DATA_KEY: Key = ("stages", "prepare_data")


def check_stage_inputs(settings: PipelineSettings) -> Iterator[StageFinding]:
    """Yield the stages that lack an input, each with the keys that the problem depends on."""
    trained = any(getattr(settings.stages, name) is not None for name in list_policy_stages())
    # A custom stage that is not registered was not imported; it may train a policy.
    trained = trained or any(
        block and name not in list_stage_names() for name, block in settings.stages.custom.items()
    )
    yield from _check_training_inputs(settings)
    yield from check_result_stages(settings, trained=trained)


def _check_training_inputs(settings: PipelineSettings) -> Iterator[StageFinding]:
    """Check the data, pairs and teachers of the stages that train."""
    stages, path = settings.stages, settings.model.path
    has_pairs = stages.prepare_data is not None and stages.prepare_data.preferences is not None
    if stages.sft is not None and stages.prepare_data is None and path is not None:
        text = "trains on the data of stages.prepare_data; add `prepare_data: {}`"
        yield build_stage_finding(("stages", "sft"), text, MODEL_PATH_KEY, _PREPARE_DATA_KEY)
    rows_by_loss = {
        "mse": "scored answers; name a file of rows with prompt, completion and score",
        "process": "labels of steps; name a file of rows with prompt, completions and labels",
    }
    loss = stages.reward_model.loss if stages.reward_model is not None else ""
    if loss in rows_by_loss and not has_pairs:
        yield build_stage_finding(
            ("stages", "reward_model", "loss"),
            f"{loss} needs {rows_by_loss[loss]} in stages.prepare_data.preferences, or use bradley_terry",
            _PREPARE_DATA_KEY,
        )
    distill = stages.distill
    if distill is not None and distill.teacher.model is None and distill.self_teacher is None:
        yield build_stage_finding(
            ("stages", "distill", "teacher", "model"),
            "no teacher is named; set a model folder, a hub name or models:/NAME@ALIAS, or together with url the "
            "server's name for it; or set self_teacher",
        )
    for name in ("preference", "reward_model"):
        if getattr(stages, name) is None or has_pairs or stages.sft is not None or path is not None:
            continue
        yield build_stage_finding(
            ("stages", name),
            "has no pairs to learn from; set stages.prepare_data.preferences to a file of pairs, or provide a policy "
            "whose scored rollouts form pairs (stages.sft or model.path)",
            MODEL_PATH_KEY,
            ("stages", "sft"),
            _PREPARE_DATA_KEY,
        )


def check_network_environment(
    settings: PipelineSettings, import_code: bool
) -> Iterator[ConfigProblem]:
    """Check the environment that `stages.network` names; a user's class is created only if code may be imported."""
    network = settings.stages.network
    if network is None or (network.environment_class is not None and not import_code):
        return
    from rl_core.networks.vector_environment import check_environment  # imports torch

    try:
        check_environment(network)
    except PosttrainError as error:
        name, _, text = str(error).partition(": ")
        if name.isidentifier():
            yield ConfigProblem((*NETWORK_KEY, name), text)
        else:
            yield ConfigProblem(NETWORK_KEY, str(error))


def find_unlogged_alerts(settings: PipelineSettings) -> Iterator[ConfigProblem]:
    """Yield alerts on names that are not in the metric reference.

    Those of online learning are errors, others warnings, because custom stages may log any metric.
    """
    if not settings.tracking.alerts:
        return
    from rl_core.analysis.metric_reference import METRIC_GROUPS  # imports pandas

    names = [metric.name for group in METRIC_GROUPS for metric in group.metrics]
    patterns = [
        re.compile("[^/]+".join(map(re.escape, re.split(r"\{\w+\}", name)))) for name in names
    ]
    exact_names = [name for name in names if "{" not in name]
    policy = include_mixture_rewards(settings)
    for alert in settings.tracking.alerts:
        is_known = any(pattern.fullmatch(alert) for pattern in patterns)
        if not is_known and (policy is None or find_metric_range(alert, policy) is None):
            yield ConfigProblem(
                ("tracking", "alerts", alert),
                f"no stage logs a metric of this name; {suggest_name(alert, exact_names)}",
            )


@dataclass(frozen=True, slots=True)
class _Finding:
    """A problem, and the other keys that it depends on."""

    problem: ConfigProblem
    about: tuple[Key, ...]


def check_combinations(
    settings: PipelineSettings,
    broken: Collection[Key] = (),
    *,
    import_code: bool = True,
    check_servers: bool = True,
) -> list[ConfigProblem]:
    """List the problems of combinations of settings.

    Args:
        broken: keys that already have a problem; defaults replace them, so problems that depend on them are left out.
        import_code: False: import no code that the settings name by import path, and skip checks that depend on it.
        check_servers: False: the inference server or the Ray cluster of rollouts need not be reachable, and the GPU and
            the package for quantized weights need not be present.
    """
    findings = [
        *_check_model(settings),
        *(_check_quantization(settings) if check_servers else ()),
        *itertools.starmap(_Finding, check_stage_inputs(settings)),
        *_check_gguf_stage(settings, check_package=check_servers),
        *itertools.starmap(_Finding, check_suites(settings, check_packages=check_servers)),
        *_check_sampling(settings),
        *_check_training_loops(settings),
        *_check_sinks(settings),
        *_check_online_alerts(settings),
        *(_Finding(problem, (("model",),)) for problem in check_rollouts(settings, check_servers)),
        *(_Finding(problem, ()) for problem in check_user_code(settings, import_code)),
        *_check_environment(settings, import_code),
        *_check_agent(settings),
        *_check_rewards(settings, import_code),
        *itertools.starmap(_Finding, check_curriculum(include_mixture_rewards(settings))),
        *(_Finding(problem, (problem.key[:-1],)) for problem in check_memory(settings)),
        *(
            _Finding(problem, (NETWORK_KEY,))
            for problem in check_network_environment(settings, import_code)
        ),
    ]
    return [
        finding.problem
        for finding in findings
        if not any(
            keys_overlap(key, other)
            for key in (finding.problem.key, *finding.about)
            for other in broken
            if other
        )
    ]


def find_waste(settings: PipelineSettings) -> list[ConfigProblem]:
    """List settings that work but waste time, or wait for something that never happens: for warnings."""
    policy, unlogged = settings.stages.policy, find_unlogged_alerts(settings)
    problems = [problem for problem in unlogged if not _is_online_alert(problem)]
    problems += _find_forgotten_environment(settings)
    is_trained = settings.stages.reward_model is not None
    if not is_trained or policy is None or _uses_reward_model(settings, policy):
        return problems
    text = (
        "is trained, but no reward of the policy uses it: set stages.policy.rewards.learned to a weight, as in "
        "`rewards: {task: 1.0, learned: 0.1}`, or leave this stage out"
    )
    return [*problems, ConfigProblem(("stages", "reward_model"), text)]


def _find_forgotten_environment(settings: PipelineSettings) -> Iterator[ConfigProblem]:
    """Find a pretrained model that would play the default environment, which is the demo's."""
    stages, default = settings.stages, EnvironmentSettings()
    if not settings.model.path or settings.environments or settings.environment != default:
        return
    if stages.policy is not None or stages.evaluate is not None:
        yield ConfigProblem(
            ("environment",),
            f"{settings.model.path} plays {default.name}, the demo's environment and the default; for your prompts "
            "write environment: {name: prompts, options: {path: prompts.jsonl}}",
        )


def _uses_reward_model(settings: PipelineSettings, policy: PolicySettings) -> bool:
    """Return whether a component of a reward model has a weight other than 0 in the curriculum or an environment."""
    names = ["learned", *(["process"] if policy.reward_options.process.function is None else [])]
    weights = [*_list_reward_weights(policy), *(entry.rewards for entry in settings.environments)]
    return any(by_name.get(name) for by_name in weights for name in names)


def _list_reward_weights(policy: PolicySettings) -> list[dict[str, float]]:
    """List the reward weights of each curriculum stage, or of the policy if there is no curriculum."""
    by_stage = [{**policy.rewards, **stage.rewards} for stage in policy.curriculum]
    return by_stage or [policy.rewards]


def _build_finding(key: Key, text: str, *about: Key) -> _Finding:
    return _Finding(ConfigProblem(key, text), about)


def _check_model(settings: PipelineSettings) -> Iterator[_Finding]:
    model = settings.model
    if model.lora is not None and model.path is None:
        yield _build_finding(
            ("model", "lora"),
            "adapters on a from-scratch preset leave its random weights untrained; set model.path, or remove lora",
            ("model", "path"),
        )
    if model.trust_remote_code and model.path is None:
        yield _build_finding(
            ("model", "trust_remote_code"),
            "a preset has no remote code; set model.path, or remove this key",
            ("model", "path"),
        )


def _check_quantization(settings: PipelineSettings) -> Iterator[_Finding]:
    """Check that the GPU and the package for quantized weights are present, if a stage trains adapters on them."""
    lora = settings.model.lora
    trains = any(name in list_policy_stages() for name in settings.stages.active)
    if lora is None or lora.quantize == "none" or not trains:
        return
    from rl_core.models.causal_lm import resolve_device  # imports torch
    from rl_core.models.lora import check_quantization

    try:
        check_quantization(lora, resolve_device(settings.model))
    except SettingsError as error:
        key = ("model", "lora", "quantize")
        yield _build_finding(key, str(error).removeprefix("lora.quantize: "), ("model", "device"))


def _check_gguf_stage(settings: PipelineSettings, *, check_package: bool) -> Iterator[_Finding]:
    """Check that the initial model's architecture and tokenizer are written as GGUF, as far as files here say."""
    if settings.stages.gguf is None:
        return
    if check_package and importlib.util.find_spec("gguf") is None:
        text = "the package gguf, which writes the file, is not installed: python -m posttrain.install --extras gguf"
        yield _build_finding(("stages", "gguf"), text)
    problem = find_unwritable_model(settings.model)
    if problem is not None:
        yield _build_finding(("stages", "gguf"), problem, MODEL_PATH_KEY)


def _list_sampling_settings(settings: PipelineSettings) -> Iterator[tuple[Key, SamplingSettings]]:
    """Yield the sampling of stages that sample: pairs of a file replace those of scored rollouts."""
    data = settings.stages.prepare_data
    has_pairs = data is not None and data.preferences is not None
    for name in settings.stages.active:
        if has_pairs and name in ("preference", "reward_model"):
            continue
        sampling = getattr(getattr(settings.stages, name), "sampling", None)
        if isinstance(sampling, SamplingSettings):
            yield ("stages", name, "sampling"), sampling


def _check_sampling(settings: PipelineSettings) -> Iterator[_Finding]:
    context = read_context_length(settings.model)
    for key, sampling in _list_sampling_settings(settings):
        if context is not None and sampling.max_completion_tokens >= context:
            source = "model.context"
            if settings.model.path is not None:
                source = f"the context of {settings.model.path}"
            yield _build_finding(
                (*key, "max_completion_tokens"),
                f"{sampling.max_completion_tokens} leaves no room for a prompt: {source} is {context}; lower this, or "
                "use a longer context",
                ("model",),
            )
    evaluate = settings.stages.evaluate
    if evaluate is not None and evaluate.samples > 1 and evaluate.sampling.temperature == 0:
        yield _build_finding(
            ("stages", "evaluate", "samples"),
            f"{evaluate.samples} greedy samples of an episode are identical; use samples 1, or a temperature above 0",
            ("stages", "evaluate", "sampling", "temperature"),
        )


def _check_training_loops(settings: PipelineSettings) -> Iterator[_Finding]:
    for name in settings.stages.active:
        loop = getattr(settings.stages, name)
        if not isinstance(loop, LoopSettings) or loop.eval_every:
            continue
        for field in ("patience", "plateau_patience"):
            if (count := getattr(loop, field)) is not None:
                yield _build_finding(
                    ("stages", name, field),
                    f"{count} evaluations never happen with eval_every 0; set eval_every, or remove {field}",
                    ("stages", name, "eval_every"),
                )


def _check_sinks(settings: PipelineSettings) -> Iterator[_Finding]:
    """Check that the package of each metrics sink is installed."""
    for index, sink in enumerate(settings.tracking.sinks):
        try:
            check_sink_installed(sink)
        except PosttrainError as error:
            yield _build_finding(("tracking", "sinks", index), str(error))


def _check_online_alerts(settings: PipelineSettings) -> Iterator[_Finding]:
    """Refuse alerts on metrics that online learning does not log: nothing else logs names of that kind."""
    for problem in find_unlogged_alerts(settings):
        if _is_online_alert(problem):
            yield _Finding(problem, ())


def _is_online_alert(problem: ConfigProblem) -> bool:
    return str(problem.key[-1]).startswith("online/")


def _check_environment(settings: PipelineSettings, import_code: bool) -> Iterator[_Finding]:
    """Check that the environment exists, accepts its options, and has the levels that the settings name."""
    from rl_core.environments import list_environment_code, make_environment  # imports torch

    name, options = settings.environment.name, dict(settings.environment.options)
    if name in AGENT_ENVIRONMENTS and not import_code:  # all but its functions can be checked
        if {*list_environment_code(name, options)} - {options.pop("reward", None)}:
            return
    elif not import_code and list_environment_code(name, options):
        return
    path = options.get("path")
    if settings.environments:
        mixed = replace_missing_files(settings)
        if mixed is None:
            return
        options = mixed
    elif name in AGENT_ENVIRONMENTS:
        tasks = options.get("tasks")
        if isinstance(tasks, str) and not Path(tasks).exists():
            return  # machine_checks reports it; the tasks define the levels
    elif name in ("prompts", "nemo_gym"):
        if isinstance(path, str) and not Path(path).exists() and options.get("revision") is None:
            return  # machine_checks reports it; the rows define the levels
    elif isinstance(path, str) and not Path(path).is_file():
        # machine_checks reports what is wrong with the file; names and levels are checked anyway
        options["path"] = os.devnull
    try:
        environment = make_environment(name, options)
    except PosttrainError as error:
        yield _Finding(locate_environment_error(settings, error), ())
        return
    except USER_CODE_ERRORS as error:  # from a user's class: show whatever it raises
        text = f"{name!r} raised {type(error).__name__}: {error}"
        yield _build_finding(_get_environment_key(settings), text)
        return
    if settings.environments:
        for problem in check_mixture_rewards(settings, environment, import_code):
            yield _Finding(problem, ())
        for problem in check_trained_levels(settings):
            yield _Finding(problem, ())
    else:
        yield from _check_reward_columns(settings, environment, import_code)
    yield from itertools.starmap(_Finding, check_self_play_environment(settings, environment))
    policy = settings.stages.policy
    for key, metric in list_watched_metrics(policy):
        if unlogged := describe_unlogged_metric(metric, environment):
            yield _build_finding((*key, "metric"), unlogged, _get_environment_key(settings))
    if policy is not None and name == "prompts" and not environment.knows_success:
        yield from _check_prompt_rewards(policy)
    promote = settings.stages.promote
    if promote is not None and promote.metric == "success" and not environment.knows_success:
        yield _build_finding(
            ("stages", "promote", "metric"),
            "success is unknown without a verifier: set metric: reward, or environment.options.verifier",
            ("environment",),
        )
    if (
        promote is not None
        and promote.max_environment_loss is not None
        and not settings.environments
    ):
        text = "compares several environments; list them under environments, or leave it out"
        yield _build_finding(("stages", "promote", "max_environment_loss"), text)
    yield from _check_levels(settings, environment)


def _get_environment_key(settings: PipelineSettings) -> Key:
    return ("environments",) if settings.environments else ("environment",)


def _check_agent(settings: PipelineSettings) -> Iterator[_Finding]:
    """Refuse what cannot be combined with episodes that the user's agent plays."""
    if settings.environment.name not in AGENT_ENVIRONMENTS:
        return
    stages, about = settings.stages, ("environment", "name")
    label = f"environment '{settings.environment.name}'"
    if stages.thoughts is not None:
        text = (
            f"is not supported with {label}: its thoughts are those of the environment's own turns"
        )
        yield _build_finding(("stages", "thoughts"), text, about)
    for name in stages.active:
        rollouts = getattr(getattr(stages, name), "rollouts", None)
        key = ("stages", name, "rollouts")
        if rollouts is None:
            continue
        if rollouts.workers == "server":
            text = (
                f"'server' is not supported with {label}, whose calls are answered and recorded by the "
                "policy in the trainer's process; set workers: in_process or ray"
            )
            yield _build_finding((*key, "workers"), text, about)
        if rollouts.max_staleness:
            text = (
                f"{rollouts.max_staleness} is not supported with {label}, whose episodes alternate with "
                "updates; set it to 0"
            )
            yield _build_finding((*key, "max_staleness"), text, about)
    for name in stages.active:
        sampling = getattr(getattr(stages, name), "sampling", None)
        if sampling is not None and sampling.repetition_penalty != 1:
            text = f"is not supported with {label}; set it to 1"
            yield _build_finding(("stages", name, "sampling", "repetition_penalty"), text, about)


def _check_prompt_rewards(policy: PolicySettings) -> Iterator[_Finding]:
    """Check that a reward other than `task` has a weight, for prompts without a verifier."""
    for weights in _list_reward_weights(policy):
        if any(weight for name, weight in weights.items() if name != "task"):
            return
    yield _build_finding(
        (*POLICY_KEY, "rewards"),
        "prompts alone give no reward: set environment.options.verifier (exact, numeric, regex, math, code), "
        'or name a reward, as in `rewards: {exact: 1.0}` or {"rewards.py:correct": 1.0}',
        ("environment",),
    )


def _check_levels(settings: PipelineSettings, environment: Environment) -> Iterator[_Finding]:
    known_levels, names = list_level_names(environment), describe_environment_names(environment)
    for key, levels in _list_configured_levels(settings):
        for level in levels:
            if level not in known_levels:
                text = f"{names} no level '{level}'; {suggest_name(level, known_levels)}"
                level_key = (*key, *_build_level_key(levels, level))
                yield _build_finding(level_key, text, _get_environment_key(settings))
        if key == ("stages", "prepare_data", "levels"):
            continue  # naming a level twice here means twice as many rows
        if set(levels) <= set(known_levels):
            try:
                environment.expand_levels(dict.fromkeys(levels, 1.0))
            except SettingsError as error:
                yield _build_finding(key, str(error).removeprefix("levels: "))
        for level, count in Counter(list(levels)).items():
            if count > 1:
                yield _build_finding(key, f"level '{level}' is named twice; name it once")


def _build_level_key(levels: Collection[str], level: str) -> Key:
    """Build the last part of a level's key: its name in a mapping, its index in a list."""
    return (levels.index(level),) if isinstance(levels, Sequence) else (level,)


def _list_configured_levels(settings: PipelineSettings) -> Iterator[tuple[Key, Collection[str]]]:
    for name in settings.stages.active:
        stage = getattr(settings.stages, name)
        levels = getattr(stage, "levels", None)
        if levels is not None:
            yield ("stages", name, "levels"), levels
        for index, part in enumerate(getattr(stage, "curriculum", ())):
            yield ("stages", name, "curriculum", index, "levels"), part.levels
    if settings.prefer is not None:
        yield ("prefer", "levels"), settings.prefer.levels


def _check_reward_columns(
    settings: PipelineSettings, environment: Environment, import_code: bool
) -> Iterator[_Finding]:
    """Check that rewards can use the environment's rows: that they have their columns, and usable values."""
    policy = settings.stages.policy
    for key, name, weight in _list_configured_rewards(settings, import_code):
        from rl_core.rewards.orchestrator import RewardOrchestrator  # imports torch

        with contextlib.suppress(PosttrainError):  # `_check_rewards` reports an invalid reward
            rewards = RewardOrchestrator(
                {name: weight}, options=policy.reward_options if policy else None
            )
            try:
                rewards.check_columns(environment.columns)
                rewards.check_rows(environment.iter_target_rows())
            except PosttrainError as error:
                yield _build_finding(key, str(error), ("environment",))


def _list_configured_rewards(
    settings: PipelineSettings, import_code: bool
) -> Iterator[tuple[Key, str, float]]:
    """Yield (key, name, weight) of every reward that can be created here, which excludes `task` and `learned`."""
    for stage in ("policy", "evaluate"):
        for name, weight in getattr(getattr(settings.stages, stage), "rewards", {}).items():
            if name not in ("task", "learned") and (":" not in name or import_code):
                yield ("stages", stage, "rewards", name), name, weight


def _check_rewards(settings: PipelineSettings, import_code: bool) -> Iterator[_Finding]:
    policy = settings.stages.policy
    for reward_key, name, weight in _list_configured_rewards(settings, import_code):
        from rl_core.rewards.orchestrator import RewardOrchestrator  # imports torch

        try:
            RewardOrchestrator({name: weight}, options=policy.reward_options if policy else None)
        except PosttrainError as error:
            options_key = (*POLICY_KEY, "reward_options", name)
            yield _build_finding(
                reward_key, str(error).partition(": ")[2] or str(error), options_key
            )
    evaluated = settings.stages.evaluate.rewards if settings.stages.evaluate is not None else {}
    for name in ("learned", "process"):
        if name in evaluated:
            yield _build_finding(
                ("stages", "evaluate", "rewards", name),
                "scores only during policy training; name a verifier or a function here",
            )
    if policy is None:
        return
    key: Key = (*POLICY_KEY, "rewards")
    if not all(any(weights.values()) for weights in _list_reward_weights(policy)):
        yield _build_finding(
            key,
            "no reward has a weight other than 0, so there is nothing to learn; write {task: 1.0}",
        )
    reward_model, advice = settings.stages.reward_model, "`reward_model: {}`"
    for name, is_used in (
        ("learned", policy.rewards.get("learned")),
        (
            "process",
            policy.rewards.get("process") and policy.reward_options.process.function is None,
        ),
    ):
        if name == "process":
            advice = "`reward_model: {loss: process}`, or set reward_options.process.function"
        is_used = is_used or any(stage.rewards.get(name) for stage in policy.curriculum)
        scores_steps = reward_model is not None and reward_model.loss == "process"
        if is_used and (reward_model is None or scores_steps != (name == "process")):
            yield _build_finding(
                (*key, name),
                f"needs a reward model; add {advice} to the stages, or remove this reward",
                ("stages", "reward_model"),
            )
