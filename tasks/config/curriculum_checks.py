"""Checks of a curriculum: its metrics exist, thresholds can be met, and every stage can be reached."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from rl_core.curriculum.conditions import average_hint, metric_name
from rl_core.curriculum.manager import END
from rl_core.curriculum.watched_metrics import missing_because, watched_metrics, watched_range
from rl_core.errors import nearest
from rl_core.settings import ExitCondition, PolicySettings, RollbackSettings
from tasks.config.problems import Key, Problem

__all__ = ["POLICY", "curriculum_problems", "watched_keys"]

_UPDATE_KL = "the KL of one update is policy/update_kl, that to the reference policy/ref_kl"
# Names of peers, and ours of before, under any prefix.
_OTHER_NAMES = {"kl": _UPDATE_KL, "kl_k1": _UPDATE_KL}

POLICY: Key = ("stages", "policy")

Found = tuple[Problem, tuple[Key, ...]]  # a problem, and the other keys that it rests on


def _found(key: Key, text: str, *about: Key) -> Found:
    return Problem(key, text), about


def curriculum_problems(policy: PolicySettings | None) -> Iterator[Found]:
    """Problems of a curriculum, each with the other keys that it rests on."""
    if policy is None:
        return
    stages, key = policy.curriculum, (*POLICY, "curriculum")
    for index, stage in enumerate(stages):
        here: Key = (*key, index)
        last = index == len(stages) - 1
        if not last and not stage.exit_conditions and stage.max_iterations is None:
            text = f"stage '{stage.name}' has no way out, so '{stages[index + 1].name}' is never reached"
            yield _found(here, f"{text}; add exit_conditions or max_iterations")
        limit = policy.iterations if stage.max_iterations is None else min(stage.max_iterations, policy.iterations)
        for number, condition in enumerate(stage.exit_conditions):
            yield from _condition(condition, (*here, "exit_conditions", number), limit, policy)
        if stage.rollback is not None:
            yield from _rollback(stage.rollback, (*here, "rollback"), limit, policy)
            if stage.rollback.to == "previous" and index == 0:
                text = "previous: there is no stage before the first one; use entry"
                yield _found((*here, "rollback", "to"), text)
    for name, count in Counter(stage.name for stage in stages).items():
        if count > 1:
            yield _found(key, f"{count} stages are named '{name}'; give each its own name")
        if name == END or not name.strip():
            yield _found(key, f"a stage cannot be named '{name}'; give it another name")
    yield from _reachable(policy, key)
    if policy.early_stop is not None:
        yield from _condition(policy.early_stop, (*POLICY, "early_stop"), policy.iterations, policy)
    if policy.rollback is not None:
        yield from _rollback(policy.rollback, (*POLICY, "rollback"), policy.iterations, policy)
        if policy.rollback.to == "previous" and len(stages) < 2:
            text = "previous: there is but one curriculum stage; use entry, or add stages to curriculum"
            yield _found((*POLICY, "rollback", "to"), text, key)


def watched_keys(policy: PolicySettings | None) -> Iterator[tuple[Key, str]]:
    """Places of exits, early stop and rollbacks in the settings, each with the metric that it names."""
    if policy is None:
        return
    for index, stage in enumerate(policy.curriculum):
        here: Key = (*POLICY, "curriculum", index)
        for number, condition in enumerate(stage.exit_conditions):
            yield (*here, "exit_conditions", number), condition.metric
        if stage.rollback is not None:
            yield (*here, "rollback"), stage.rollback.metric
    if policy.early_stop is not None:
        yield (*POLICY, "early_stop"), policy.early_stop.metric
    if policy.rollback is not None:
        yield (*POLICY, "rollback"), policy.rollback.metric


def _rollback(rollback: RollbackSettings, key: Key, iterations: int, policy: PolicySettings) -> Iterator[Found]:
    """The metric exists, can get worse by the margin, and there is time to see it."""
    name, found = metric_name(rollback.metric), watched_range(rollback.metric, policy)
    if found is None:
        yield _unknown(rollback.metric, key, policy)
        return
    iterations //= _every(name, policy)
    low, high = found
    moves = "fall" if rollback.better == "higher" else "rise"
    if rollback.margin >= high - low:
        yield _found(
            (*key, "margin"),
            f"{rollback.metric} can never {moves} by more than {rollback.margin:g}: it is from {low:g} to {high:g}; "
            "choose a smaller margin",
            (*key, "metric"),
        )
    needed = rollback.window + rollback.patience
    if rollback.level == "before":
        needed -= 1  # the level is there already, the first full window may be below it
    if needed > iterations:
        yield _found(
            (*key, "window"),
            f"no rollback can happen within the {iterations} iterations of its stage: a window of {rollback.window} "
            f"and a patience of {rollback.patience} take at least {needed}; shorten those",
            (*key, "patience"),
            (*POLICY, "iterations"),
            key[:-1],
        )


def _every(name: str, policy: PolicySettings) -> int:
    """Iterations between two observations of a metric."""
    return policy.eval_every if name.startswith("eval/") else 1


def _unknown(metric: str, key: Key, policy: PolicySettings) -> Found:
    """A metric that this configuration never logs: which setting it needs, our words for it, or the nearest name."""
    metrics = watched_metrics(policy)
    if needs := missing_because(metric_name(metric), policy):
        return _found((*key, "metric"), f"'{metric}' is never logged with these settings; it needs {needs}", POLICY)
    if metric.startswith(("perf/", "system/")):
        text = f"'{metric}' is measured by a clock, which training must not depend on: the same seed would give other"
        return _found((*key, "metric"), f"{text} models; watch a metric of the rollouts or of the update")
    if average := average_hint(metric):
        return _found((*key, "metric"), f"no such metric '{metric}'; {average}", (*key, "window"))
    if (other := _OTHER_NAMES.get(metric.rpartition("/")[2])) is not None:
        return _found((*key, "metric"), f"no such metric '{metric}'; {other}")
    known = [*metrics, *(name.removeprefix("train/") for name in metrics if name.startswith("train/"))]
    return _found((*key, "metric"), f"no such metric '{metric}'; {nearest(metric, known)}")


def _reachable(policy: PolicySettings, key: Key) -> Iterator[Found]:
    """Enough iterations to reach the last stage at the earliest."""
    needed = [
        _least(stage.min_iterations, stage.exit_conditions, stage.require == "any") for stage in policy.curriculum
    ]
    before_last = sum(needed[:-1])
    if needed and before_last >= policy.iterations:
        yield _found(
            (*POLICY, "iterations"),
            f"{policy.iterations} never reach the last stage of the curriculum: the ones before it take at least "
            f"{before_last} (min_iterations, full windows and patience); raise iterations or shorten those",
            key,
        )


def _least(min_iterations: int, conditions: Sequence[ExitCondition], any_is_enough: bool) -> int:
    """Iterations that a stage takes at the least: windows have to fill, conditions to hold for their patience."""
    windows = [_shortest(condition) for condition in conditions]
    if not windows:
        return min_iterations
    return max(min_iterations, min(windows) if any_is_enough else max(windows))


def _shortest(condition: ExitCondition) -> int:
    """Iterations after which the condition can be met at the earliest."""
    return condition.window + condition.patience - 1


def _condition(condition: ExitCondition, key: Key, iterations: int, policy: PolicySettings) -> Iterator[Found]:
    """The metric exists, the threshold can be met, the window can fill and the condition hold for its patience."""
    name = metric_name(condition.metric)
    if condition.function is None:
        yield from _threshold(condition, key, policy)
        if watched_range(name, policy) is None:
            return
        iterations //= _every(name, policy)
    if _shortest(condition) > iterations:
        patience = f" with a patience of {condition.patience}" if condition.patience > 1 else ""
        what = "evaluations" if condition.function is None and _every(name, policy) > 1 else "iterations"
        yield _found(
            (*key, "window"),
            f"{condition.window} {what}{patience} never fill within the {iterations} of its stage, so it never holds",
            (*POLICY, "iterations"),
            (*key, "patience"),
            key[:-2],
        )


def _threshold(condition: ExitCondition, key: Key, policy: PolicySettings) -> Iterator[Found]:
    """The metric exists, and the threshold can be met."""
    found = watched_range(condition.metric, policy)
    if found is None:
        yield _unknown(condition.metric, key, policy)
        return
    what = condition.metric if condition.statistic == "mean" else f"the slope of {condition.metric}"
    low, high = found if condition.statistic == "mean" else _slopes(*found, condition.window)
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
        yield _found((*key, "threshold"), f"{text}; choose a threshold inside", *about)


def _slopes(low: float, high: float, window: int) -> tuple[float, float]:
    """Least and largest least-squares slope of `window` values in [low, high]: the first half low, the second high."""
    centered = [place - (window - 1) / 2 for place in range(window)]
    spread = sum(value**2 for value in centered)
    bound = (high - low) * sum(value for value in centered if value > 0) / spread if spread else math.inf
    return -bound, bound
