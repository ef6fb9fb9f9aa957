"""Checks of policy optimisation: its curriculum, and where its rollouts come from.

Of a curriculum: metrics exist, thresholds can be met, every stage can be reached. Of rollouts: Ray and its cluster, a
recorded schedule, an inference server.
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
from rl_core.environments.environment import Environment
from rl_core.environments.two_player import check_two_player_environment
from rl_core.errors import PosttrainError, SettingsError, suggest_name
from rl_core.rollout_workers.managed_server import check_start_settings
from rl_core.settings import ExitCondition, PolicySettings, RollbackSettings
from rl_core.settings.rollouts import check_ray_installed
from tasks.config.machine_checks import (
    compute_adapter_rank,
    estimate_weight_bytes,
    read_model_shape,
)
from tasks.config.problems import ConfigProblem, Key
from tasks.config.settings import PipelineSettings

POLICY_KEY: Key = ("stages", "policy")
ROLLOUTS_KEY: Key = (*POLICY_KEY, "rollouts")

# a problem, and the other keys that it depends on
CurriculumFinding = tuple[ConfigProblem, tuple[Key, ...]]

_UPDATE_KL = "the KL of one update is policy/update_kl, that to the reference policy/ref_kl"
# Names in other frameworks, and former ones of ours, under any prefix.
_RENAMED_METRICS = {"kl": _UPDATE_KL, "kl_k1": _UPDATE_KL}


def _build_curriculum_finding(key: Key, text: str, *about: Key) -> CurriculumFinding:
    return ConfigProblem(key, text), about


def check_curriculum(policy: PolicySettings | None) -> Iterator[CurriculumFinding]:
    """Yield the problems of a curriculum, each with the other keys that it depends on."""
    if policy is None:
        return
    stages, key = policy.curriculum, (*POLICY_KEY, "curriculum")
    for index, stage in enumerate(stages):
        stage_key: Key = (*key, index)
        is_last = index == len(stages) - 1
        if not is_last and not stage.exit_conditions and stage.max_iterations is None:
            text = (
                f"stage '{stage.name}' never ends, so '{stages[index + 1].name}' is never reached"
            )
            yield _build_curriculum_finding(
                stage_key, f"{text}; add exit_conditions or max_iterations"
            )
        limit = policy.iterations
        if stage.max_iterations is not None:
            limit = min(stage.max_iterations, limit)
        for number, condition in enumerate(stage.exit_conditions):
            condition_key = (*stage_key, "exit_conditions", number)
            yield from _check_exit_condition(condition, condition_key, limit, policy)
        if stage.rollback is not None:
            yield from _check_rollback(stage.rollback, (*stage_key, "rollback"), limit, policy)
            if stage.rollback.to == "previous" and index == 0:
                text = "previous: there is no stage before the first one; use entry"
                yield _build_curriculum_finding((*stage_key, "rollback", "to"), text)
    for name, count in Counter(stage.name for stage in stages).items():
        if count > 1:
            yield _build_curriculum_finding(
                key, f"{count} stages are named '{name}'; give each a different name"
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
            text = "previous: there is only one curriculum stage; use entry, or add stages to curriculum"
            yield _build_curriculum_finding((*POLICY_KEY, "rollback", "to"), text, key)


def list_watched_metrics(policy: PolicySettings | None) -> Iterator[tuple[Key, str]]:
    """Yield the key of each exit condition, early stop and rollback, with the metric that it names."""
    if policy is None:
        return
    for index, stage in enumerate(policy.curriculum):
        stage_key: Key = (*POLICY_KEY, "curriculum", index)
        for number, condition in enumerate(stage.exit_conditions):
            yield (*stage_key, "exit_conditions", number), condition.metric
        if stage.rollback is not None:
            yield (*stage_key, "rollback"), stage.rollback.metric
    if policy.early_stop is not None:
        yield (*POLICY_KEY, "early_stop"), policy.early_stop.metric
    if policy.rollback is not None:
        yield (*POLICY_KEY, "rollback"), policy.rollback.metric


def _check_rollback(
    rollback: RollbackSettings, key: Key, iterations: int, policy: PolicySettings
) -> Iterator[CurriculumFinding]:
    """Check that the metric exists, can get worse by the margin, and that there is time to see it."""
    metric_range = find_metric_range(rollback.metric, policy)
    if metric_range is None:
        yield _explain_unknown_metric(rollback.metric, key, policy)
        return
    low, high = metric_range
    num_observations = iterations // _count_observation_interval(
        expand_metric_name(rollback.metric), policy
    )
    moves = "fall" if rollback.better == "higher" else "rise"
    if rollback.margin >= high - low:
        yield _build_curriculum_finding(
            (*key, "margin"),
            f"{rollback.metric} can never {moves} by more than {rollback.margin:g}: it ranges from {low:g} to "
            f"{high:g}; choose a smaller margin",
            (*key, "metric"),
        )
    needed = rollback.window + rollback.patience
    if rollback.level == "before":
        needed -= 1  # the level is known already, so the first full window may be below it
    if needed > num_observations:
        yield _build_curriculum_finding(
            (*key, "window"),
            f"no rollback can happen within the {num_observations} iterations of its stage: a window of "
            f"{rollback.window} and a patience of {rollback.patience} take at least {needed}; shorten those",
            (*key, "patience"),
            (*POLICY_KEY, "iterations"),
            key[:-1],
        )


def _count_observation_interval(name: str, policy: PolicySettings) -> int:
    """Return the number of iterations between two observations of a metric."""
    return policy.eval_every if name.startswith("eval/") else 1


def _explain_unknown_metric(metric: str, key: Key, policy: PolicySettings) -> CurriculumFinding:
    """Explain a metric that this configuration never logs: the setting it needs, its name here, or the nearest name."""
    metrics = list_watchable_metrics(policy)
    if needs := find_missing_setting(expand_metric_name(metric), policy):
        return _build_curriculum_finding(
            (*key, "metric"),
            f"'{metric}' is never logged with these settings; it needs {needs}",
            POLICY_KEY,
        )
    if metric.startswith(("perf/", "system/")):
        text = f"'{metric}' is measured by a clock, and training must not depend on time: the same seed would give"
        return _build_curriculum_finding(
            (*key, "metric"),
            f"{text} different models; watch a metric of the rollouts or of the update",
        )
    if average := suggest_window_for_average(metric):
        return _build_curriculum_finding(
            (*key, "metric"), f"no such metric '{metric}'; {average}", (*key, "window")
        )
    if (hint := _RENAMED_METRICS.get(metric.rpartition("/")[2])) is not None:
        return _build_curriculum_finding((*key, "metric"), f"no such metric '{metric}'; {hint}")
    short_names = [name.removeprefix("train/") for name in metrics if name.startswith("train/")]
    known = [*metrics, *short_names]
    return _build_curriculum_finding(
        (*key, "metric"), f"no such metric '{metric}'; {suggest_name(metric, known)}"
    )


def _check_reachable_stages(policy: PolicySettings, key: Key) -> Iterator[CurriculumFinding]:
    """Check that there are enough iterations to reach the last stage at all."""
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
            f"{policy.iterations} never reach the last stage of the curriculum: the stages before it take at least "
            f"{before_last} (min_iterations, full windows and patience); raise iterations or shorten those",
            key,
        )


def _compute_min_stage_iterations(
    min_iterations: int, conditions: Sequence[ExitCondition], any_is_enough: bool
) -> int:
    """Compute the minimum iterations of a stage: windows have to fill, conditions to hold for their patience."""
    windows = [_compute_min_condition_iterations(condition) for condition in conditions]
    if not windows:
        return min_iterations
    return max(min_iterations, min(windows) if any_is_enough else max(windows))


def _compute_min_condition_iterations(condition: ExitCondition) -> int:
    """Compute the number of iterations after which the condition can be met at the earliest."""
    return condition.window + condition.patience - 1


def _check_exit_condition(
    condition: ExitCondition, key: Key, iterations: int, policy: PolicySettings
) -> Iterator[CurriculumFinding]:
    """Check that the metric exists, the threshold can be met, and the window and patience fit into the stage."""
    name = expand_metric_name(condition.metric)
    unit = "iterations"
    if condition.function is None:
        yield from _check_threshold(condition, key, policy)
        if find_metric_range(name, policy) is None:
            return
        interval = _count_observation_interval(name, policy)
        iterations //= interval
        if interval > 1:
            unit = "evaluations"
    if _compute_min_condition_iterations(condition) > iterations:
        patience = f" with a patience of {condition.patience}" if condition.patience > 1 else ""
        yield _build_curriculum_finding(
            (*key, "window"),
            f"{condition.window} {unit}{patience} never fit into the {iterations} of its stage, so it never holds",
            (*POLICY_KEY, "iterations"),
            (*key, "patience"),
            key[:-2],
        )


def _check_threshold(
    condition: ExitCondition, key: Key, policy: PolicySettings
) -> Iterator[CurriculumFinding]:
    """Check that the metric exists and that the threshold can be met."""
    metric_range = find_metric_range(condition.metric, policy)
    if metric_range is None:
        yield _explain_unknown_metric(condition.metric, key, policy)
        return
    quantity, (low, high) = condition.metric, metric_range
    if condition.statistic != "mean":
        quantity = f"the slope of {condition.metric}"
        low, high = _compute_slope_range(low, high, condition.window)
    threshold = condition.threshold
    never = {
        ">=": threshold > high,
        ">": threshold >= high,
        "<=": threshold < low,
        "<": threshold <= low,
    }[condition.comparison]
    if never:
        bounds = f"from {low:.4g} to {high:.4g}"
        text = f"{quantity} {condition.comparison} {threshold:g} can never hold: {quantity} ranges {bounds}"
        about = [(*key, "metric"), (*key, "comparison"), (*key, "statistic"), (*key, "window")]
        yield _build_curriculum_finding(
            (*key, "threshold"), f"{text}; choose a threshold inside", *about
        )


def _compute_slope_range(low: float, high: float, window: int) -> tuple[float, float]:
    """Compute the bounds of the least-squares slope of `window` values in [low, high].

    The extreme slope has one half of the values at one bound, the other half at the other.
    """
    centered = [index - (window - 1) / 2 for index in range(window)]
    spread = sum(value**2 for value in centered)
    if not spread:
        return -math.inf, math.inf
    bound = (high - low) * sum(value for value in centered if value > 0) / spread
    return -bound, bound


def check_self_play_environment(
    settings: PipelineSettings, environment: Environment
) -> Iterator[CurriculumFinding]:
    """Yield the problem of an environment without two players, if the policy stage plays against itself."""
    policy = settings.stages.policy
    if policy is None or policy.self_play is None:
        return
    try:
        check_two_player_environment(environment)
    except SettingsError as error:
        about = ("environments",) if settings.environments else ("environment",)
        text = str(error).removeprefix("self_play: ")
        yield _build_curriculum_finding((*POLICY_KEY, "self_play"), text, about)


def check_rollouts(settings: PipelineSettings, check_servers: bool) -> Iterator[ConfigProblem]:
    """Yield the problems of rollout workers or of the inference server.

    Args:
        check_servers: a server or cluster has to answer already.
    """
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
        elif check_servers or rollouts.server.start:
            _check_inference_server(policy, settings)
    except PosttrainError as error:
        name, colon, text = str(error).removeprefix("rollouts.").partition(": ")
        if str(error).startswith("rollouts.") and colon:
            yield ConfigProblem((*ROLLOUTS_KEY, *name.split(".")), text)
        elif rollouts.replay_schedule is not None:
            yield ConfigProblem((*ROLLOUTS_KEY, "replay_schedule"), str(error))
        else:
            yield ConfigProblem(ROLLOUTS_KEY, str(error))


def _check_ray_cluster(
    policy: PolicySettings, settings: PipelineSettings, *, check_connection: bool
) -> None:
    """Check that Ray is installed and its cluster has our versions, or that a local object store has room for weights.

    Args:
        check_connection: connect to the cluster.
    """
    # Does not import Ray.
    from rl_core.rollout_workers.ray_cluster import RaySession, check_object_store

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
    """Check that the server answers, has the version that was tested, and can sample this model, or can be started."""
    lora = settings.model.lora
    if lora is not None and lora.quantize != "none":
        raise SettingsError(
            f"rollouts.workers: a server samples from the unquantized base model, but the trainer's is quantized "
            f"(model.lora.quantize: {lora.quantize}); set quantize: none, or workers: in_process"
        )
    rank = compute_adapter_rank(settings.model)
    if policy.rollouts.server.start:
        check_start_settings(policy.rollouts.server, rank)
        return
    from rl_core.rollout_workers.inference_server import check_server_at_start  # imports torch

    check_server_at_start(policy.rollouts, read_model_shape(settings.model), rank)
