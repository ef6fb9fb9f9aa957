"""Exit conditions: a moving average against a threshold, once its window is full."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rl_core.errors import SettingsError, nearest
from rl_core.metrics import MetricHistory
from rl_core.settings import ExitCondition

__all__ = ["ConditionStatus", "check_condition", "metric_name"]

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    ">": operator.gt,
    "<=": operator.le,
    "<": operator.lt,
}


@dataclass(frozen=True, slots=True)
class ConditionStatus:
    """Where one condition stands."""

    condition: ExitCondition
    average: float | None  # of what the window holds so far; None = never observed
    filled: float  # share of the window that is filled; 1.0 = full
    holds: bool  # the window is full and the comparison true

    def __str__(self) -> str:
        condition = self.condition
        value = "not observed" if self.average is None else f"{self.average:.4g}"
        return f"{condition.metric} {value} {condition.comparison} {condition.threshold:g} over {condition.window}"


def metric_name(name: str) -> str:
    """Full name of a metric as settings give it: `success_rate` is short for `train/success_rate`."""
    return name if "/" in name else f"train/{name}"


def check_condition(condition: ExitCondition, history: MetricHistory, known: Iterable[str] = ()) -> ConditionStatus:
    """Where the condition stands.

    Args:
        history: of the current stage alone, so that what was learned on easier levels counts for nothing.
        known: names of metrics that may come later, though they were not observed yet.
    Raises: SettingsError when the metric was never observed and is not known: the condition could never hold.
    """
    name, observed = metric_name(condition.metric), history.names
    candidates = {*observed, *known}
    if observed and name not in candidates:
        raise SettingsError(f"metric: '{condition.metric}' is no metric of this stage; {nearest(name, candidates)}")
    average = history.mean(name, condition.window)
    filled = min(1.0, history.count(name) / condition.window)
    holds = (
        average is not None
        and history.is_full(name, condition.window)
        and _COMPARISONS[condition.comparison](average, condition.threshold)
    )
    return ConditionStatus(condition, average, filled, holds)
