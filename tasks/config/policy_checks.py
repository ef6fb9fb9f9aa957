"""Checks of a curriculum: its metrics exist, thresholds can be met, and every stage can be reached.

Checks of the place of a policy's rollouts: Ray and its cluster, a schedule, an inference server.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from rl_core.curriculum.conditions import expand_metric_name, suggest_window_for_average
from rl_core.curriculum.manager import END_STAGE
from rl_core.curriculum.watched_metrics import (
    find_metric_range,
    find_missing_setting,
    list_watchable_metrics,
)
from rl_core.errors import PosttrainError, SettingsError, suggest_name
from rl_core.settings import ExitCondition, PolicySettings, RollbackSettings
from rl_core.settings.rollouts import check_ray_installed
from tasks.config.machine_checks import (
    compute_adapter_rank,
    estimate_weight_bytes,
    read_model_shape,
)
from tasks.config.problems import ConfigProblem, Key
from tasks.config.settings import PipelineSettings

_UPDATE_KL = "the KL of one update is policy/update_kl, that to the reference policy/ref_kl"
# Names of peers, and ours of before, under any prefix.
_RENAMED_METRICS = {"kl": _UPDATE_KL, "kl_k1": _UPDATE_KL}

POLICY_KEY: Key = ("stages", "policy")

CurriculumFinding = tuple[
    ConfigProblem, tuple[Key, ...]
]  # a problem, and the other keys that it rests on


def _build_curriculum_finding(key: Key, text: str, *about: Key) -> CurriculumFinding:
    return ConfigProblem(key, text), about


def check_curriculum(policy: PolicySettings | None) -> Iterator[CurriculumFinding]:
    """Problems of a curriculum, each with the other keys that it rests on."""
    if policy is None:
        return
    stages, key = policy.curriculum, (*POLICY_KEY, "curriculum")
    for index, stage in enumerate(stages):
        here: Key = (*key, index)
        last = index == len(stages) - 1
        if not last and not stage.exit_conditions and stage.max_iterations is None:
            text = f"stage '{stage.name}' has no way out, so '{stages[index + 1].name}' is never reached"
            yield _build_curriculum_finding(here, f"{text}; add exit_conditions or max_iterations")
        limit = (
            policy.iterations
            if stage.max_iterations is None
            else min(stage.max_iterations, policy.iterations)
        )
        for number, condition in enumerate(stage.exit_conditions):
            yield from _check_exit_condition(
                condition, (*here, "exit_conditions", number), limit, policy
            )
        if stage.rollback is not None:
            yield from _check_rollback(stage.rollback, (*here, "rollback"), limit, policy)
            if stage.rollback.to == "previous" and index == 0:
                text = "previous: there is no stage before the first one; use entry"
                yield _build_curriculum_finding((*here, "rollback", "to"), text)
    for name, count in Counter(stage.name for stage in stages).items():
        if count > 1:
            yield _build_curriculum_finding(
                key, f"{count} stages are named '{name}'; give each its own name"
            )
        if name == END_STAGE or not name.strip():
            yield _build_curriculum_finding(
                key, f"a stage cannot be named '{name}'; give it another name"
            )
    yield from _check_reachable_stages(policy, key)
    if policy.early_stop is not None:
        yield from _check_exit_condition(
            policy.early_stop, (*POLICY_KEY, "early_stop"), policy.iterations, policy
        )
    if policy.rollback is not None:
        yield from _check_rollback(
            policy.rollback, (*POLICY_KEY, "rollback"), policy.iterations, policy
        )
        if policy.rollback.to == "previous" and len(stages) < 2:
            text = "previous: there is but one curriculum stage; use entry, or add stages to curriculum"
            yield _build_curriculum_finding((*POLICY_KEY, "rollback", "to"), text, key)


def list_watched_metrics(policy: PolicySettings | None) -> Iterator[tuple[Key, str]]:
    """Places of exits, early stop and rollbacks in the settings, each with the metric that it names."""
    if policy is None:
        return
    for index, stage in enumerate(policy.curriculum):
        here: Key = (*POLICY_KEY, "curriculum", index)
        for number, condition in enumerate(stage.exit_conditions):
            yield (*here, "exit_conditions", number), condition.metric
        if stage.rollback is not None:
            yield (*here, "rollback"), stage.rollback.metric
    if policy.early_stop is not None:
        yield (*POLICY_KEY, "early_stop"), policy.early_stop.metric
    if policy.rollback is not None:
        yield (*POLICY_KEY, "rollback"), policy.rollback.metric


def _check_rollback(
    rollback: RollbackSettings, key: Key, iterations: int, policy: PolicySettings
) -> Iterator[CurriculumFinding]:
    """The metric exists, can get worse by the margin, and there is time to see it."""
    name, found = expand_metric_name(rollback.metric), find_metric_range(rollback.metric, policy)
    if found is None:
        yield _explain_unknown_metric(rollback.metric, key, policy)
        return
    iterations //= _count_observation_interval(name, policy)
    low, high = found
    moves = "fall" if rollback.better == "higher" else "rise"
    if rollback.margin >= high - low:
        yield _build_curriculum_finding(
            (*key, "margin"),
            f"{rollback.metric} can never {moves} by more than {rollback.margin:g}: it is from {low:g} to {high:g}; "
            "choose a smaller margin",
            (*key, "metric"),
        )
    needed = rollback.window + rollback.patience
    if rollback.level == "before":
        needed -= 1  # the level is there already, the first full window may be below it
    if needed > iterations:
        yield _build_curriculum_finding(
            (*key, "window"),
            f"no rollback can happen within the {iterations} iterations of its stage: a window of {rollback.window} "
            f"and a patience of {rollback.patience} take at least {needed}; shorten those",
            (*key, "patience"),
            (*POLICY_KEY, "iterations"),
            key[:-1],
        )


def _count_observation_interval(name: str, policy: PolicySettings) -> int:
    """Iterations between two observations of a metric."""
    return policy.eval_every if name.startswith("eval/") else 1


def _explain_unknown_metric(metric: str, key: Key, policy: PolicySettings) -> CurriculumFinding:
    """A metric that this configuration never logs: which setting it needs, our words for it, or the nearest name."""
    metrics = list_watchable_metrics(policy)
    if needs := find_missing_setting(expand_metric_name(metric), policy):
        return _build_curriculum_finding(
            (*key, "metric"),
            f"'{metric}' is never logged with these settings; it needs {needs}",
            POLICY_KEY,
        )
    if metric.startswith(("perf/", "system/")):
        text = f"'{metric}' is measured by a clock, which training must not depend on: the same seed would give other"
        return _build_curriculum_finding(
            (*key, "metric"), f"{text} models; watch a metric of the rollouts or of the update"
        )
    if average := suggest_window_for_average(metric):
        return _build_curriculum_finding(
            (*key, "metric"), f"no such metric '{metric}'; {average}", (*key, "window")
        )
    if (other := _RENAMED_METRICS.get(metric.rpartition("/")[2])) is not None:
        return _build_curriculum_finding((*key, "metric"), f"no such metric '{metric}'; {other}")
    known = [
        *metrics,
        *(name.removeprefix("train/") for name in metrics if name.startswith("train/")),
    ]
    return _build_curriculum_finding(
        (*key, "metric"), f"no such metric '{metric}'; {suggest_name(metric, known)}"
    )


def _check_reachable_stages(policy: PolicySettings, key: Key) -> Iterator[CurriculumFinding]:
    """Enough iterations to reach the last stage at the earliest."""
    needed = [
        _compute_min_stage_iterations(
            stage.min_iterations, stage.exit_conditions, stage.require == "any"
        )
        for stage in policy.curriculum
    ]
    before_last = sum(needed[:-1])
    if needed and before_last >= policy.iterations:
        yield _build_curriculum_finding(
            (*POLICY_KEY, "iterations"),
            f"{policy.iterations} never reach the last stage of the curriculum: the ones before it take at least "
            f"{before_last} (min_iterations, full windows and patience); raise iterations or shorten those",
            key,
        )


def _compute_min_stage_iterations(
    min_iterations: int, conditions: Sequence[ExitCondition], any_is_enough: bool
) -> int:
    """Iterations that a stage takes at the least: windows have to fill, conditions to hold for their patience."""
    windows = [_compute_min_condition_iterations(condition) for condition in conditions]
    if not windows:
        return min_iterations
    return max(min_iterations, min(windows) if any_is_enough else max(windows))


def _compute_min_condition_iterations(condition: ExitCondition) -> int:
    """Iterations after which the condition can be met at the earliest."""
    return condition.window + condition.patience - 1


def _check_exit_condition(
    condition: ExitCondition, key: Key, iterations: int, policy: PolicySettings
) -> Iterator[CurriculumFinding]:
    """The metric exists, the threshold can be met, the window can fill and the condition hold for its patience."""
    name = expand_metric_name(condition.metric)
    if condition.function is None:
        yield from _check_threshold(condition, key, policy)
        if find_metric_range(name, policy) is None:
            return
        iterations //= _count_observation_interval(name, policy)
    if _compute_min_condition_iterations(condition) > iterations:
        patience = f" with a patience of {condition.patience}" if condition.patience > 1 else ""
        what = (
            "evaluations"
            if condition.function is None and _count_observation_interval(name, policy) > 1
            else "iterations"
        )
        yield _build_curriculum_finding(
            (*key, "window"),
            f"{condition.window} {what}{patience} never fill within the {iterations} of its stage, so it never holds",
            (*POLICY_KEY, "iterations"),
            (*key, "patience"),
            key[:-2],
        )


def _check_threshold(
    condition: ExitCondition, key: Key, policy: PolicySettings
) -> Iterator[CurriculumFinding]:
    """The metric exists, and the threshold can be met."""
    found = find_metric_range(condition.metric, policy)
    if found is None:
        yield _explain_unknown_metric(condition.metric, key, policy)
        return
    what = condition.metric if condition.statistic == "mean" else f"the slope of {condition.metric}"
    low, high = (
        found if condition.statistic == "mean" else _compute_slope_range(*found, condition.window)
    )
    threshold = condition.threshold
    never = {
        ">=": threshold > high,
        ">": threshold >= high,
        "<=": threshold < low,
        "<": threshold <= low,
    }[condition.comparison]
    if never:
        bounds = f"from {low:.4g} to {high:.4g}"
        text = f"{what} {condition.comparison} {threshold:g} can never hold: {what} is {bounds}"
        about = [(*key, "metric"), (*key, "comparison"), (*key, "statistic"), (*key, "window")]
        yield _build_curriculum_finding(
            (*key, "threshold"), f"{text}; choose a threshold inside", *about
        )


def _compute_slope_range(low: float, high: float, window: int) -> tuple[float, float]:
    """Least and largest least-squares slope of `window` values in [low, high]: the first half low, the second high."""
    centered = [place - (window - 1) / 2 for place in range(window)]
    spread = sum(value**2 for value in centered)
    bound = (
        (high - low) * sum(value for value in centered if value > 0) / spread
        if spread
        else math.inf
    )
    return -bound, bound


ROLLOUTS_KEY: Key = (*POLICY_KEY, "rollouts")


def check_rollouts(settings: PipelineSettings, check_servers: bool) -> Iterator[ConfigProblem]:
    """Problems of the workers or the server; `ask_servers`: a server or cluster has to answer already."""
    policy = settings.stages.policy
    if policy is None:
        return
    rollouts = policy.rollouts
    if rollouts.workers == "in_process" and rollouts.replay_schedule is None:
        return
    try:
        if rollouts.replay_schedule is not None:
            from rl_core.rollout_workers.async_worker_group import read_schedule  # imports torch

            read_schedule(rollouts.replay_schedule)
        elif rollouts.workers == "ray":
            _check_ray_cluster(policy, settings, check_connection=check_servers)
        elif check_servers:
            _check_inference_server(policy, settings)
    except PosttrainError as error:
        name, colon, text = str(error).removeprefix("rollouts.").partition(": ")
        is_named = str(error).startswith("rollouts.") and bool(colon)
        where = ("replay_schedule",) if rollouts.replay_schedule is not None else ()
        yield ConfigProblem(
            (*ROLLOUTS_KEY, *name.split(".")) if is_named else (*ROLLOUTS_KEY, *where),
            text if is_named else str(error),
        )


def _check_ray_cluster(
    policy: PolicySettings, settings: PipelineSettings, *, check_connection: bool
) -> None:
    """Ray is installed; its cluster answers and has our versions (`ask`), or the store here has room for weights."""
    from rl_core.rollout_workers.ray_cluster import (
        RaySession,
        check_object_store,  # imports no Ray
    )

    check_ray_installed()
    if policy.rollouts.address is not None and check_connection:
        session = RaySession(policy.rollouts.address, 0)
        try:
            session.connect_ray()
            session.check_node_versions()
        finally:
            session.close()
    elif policy.rollouts.address is None:
        check_object_store(estimate_weight_bytes(settings.model))


def _check_inference_server(policy: PolicySettings, settings: PipelineSettings) -> None:
    """The server answers, is of the version that was tested, and can sample this model."""
    from rl_core.rollout_workers.inference_server import check_server_at_start  # imports torch

    lora = settings.model.lora
    if lora is not None and lora.quantize != "none":
        raise SettingsError(
            f"rollouts.workers: a server samples from the base model as it is, and the trainer's is in few bits "
            f"(model.lora.quantize: {lora.quantize}); set quantize: none, or workers: in_process"
        )
    check_server_at_start(
        policy.rollouts, read_model_shape(settings.model), compute_adapter_rank(settings.model)
    )
