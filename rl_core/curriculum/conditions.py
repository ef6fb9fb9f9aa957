"""Exit conditions: moving average or slope of a metric, or a function of the user's, against a threshold."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rl_core.curriculum.own_statistic import own_statistic
from rl_core.errors import SettingsError, nearest
from rl_core.metrics import MetricHistory
from rl_core.settings import ExitCondition

__all__ = ["ConditionStatus", "average_hint", "check_condition", "check_metric", "metric_name"]

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    ">": operator.gt,
    "<=": operator.le,
    "<": operator.lt,
}


_AVERAGE = re.compile(r"(.+?)_(?:ma|sma|avg|mean|moving_average|rolling)_?([1-9][0-9]{0,6})")


@dataclass(frozen=True, slots=True)
class ConditionStatus:
    """Status of one condition."""

    condition: ExitCondition
    value: float | None  # mean or slope over the window so far; None = not enough observations
    filled: float  # share of the window that is filled; 1.0 = full
    holds: bool  # the window is full and the comparison true
    streak: int = 0  # consecutive iterations, up to this one, in which it held

    @property
    def is_met(self) -> bool:
        """True = it has held for its patience."""
        return self.streak >= self.condition.patience

    @property
    def label(self) -> str:
        """The compared quantity: success_rate, slope of success_rate, or the name of a function of the user's."""
        if self.condition.function is not None:
            return self.condition.function.partition(":")[2]
        return ("slope of " if self.condition.statistic == "slope" else "") + self.condition.metric

    @property
    def metric(self) -> str:
        """Name of the compared quantity as a metric: average/success_rate, slope/success_rate, or own/mastered."""
        if self.condition.function is not None:
            return f"own/{self.label}"
        return ("slope/" if self.condition.statistic == "slope" else "average/") + self.condition.metric

    def __str__(self) -> str:
        condition = self.condition
        value = "not observed" if self.value is None else f"{self.value:.4g}"
        long = f", {self.streak} times in a row" if condition.patience > 1 else ""
        return f"{self.label} {value} {condition.comparison} {condition.threshold:g} over {condition.window}{long}"


def metric_name(name: str) -> str:
    """Full name of a metric in settings: `success_rate` is short for `train/success_rate`."""
    return name if "/" in name else f"train/{name}"


def average_hint(metric: str) -> str:
    """Our words for the name of an average over so many iterations, as in success_rate_ma100; "" for other names."""
    found = _AVERAGE.fullmatch(metric)
    if found is None:
        return ""
    return f"a mean over a window is the default statistic: write metric: {found[1]} and window: {found[2]}"


def check_metric(metric: str, history: MetricHistory, known: Iterable[str] = ()) -> str:
    """The metric's full name.

    Args:
        known: names of metrics that may be observed later.
    Raises: SettingsError when the metric was never observed and is not known.
    """
    if hint := average_hint(metric):
        raise SettingsError(f"metric: '{metric}' is no metric; {hint}")
    name, observed = metric_name(metric), history.names
    candidates = {*observed, *known}
    if observed and name not in candidates:
        raise SettingsError(f"metric: '{metric}' is no metric of this stage; {nearest(name, candidates)}")
    return name


def check_condition(
    condition: ExitCondition, history: MetricHistory, known: Iterable[str] = (), *, streak: int = 0
) -> ConditionStatus:
    """Status of a condition after one more iteration.

    Args:
        history: of the current stage alone, so that metrics on easier levels do not count.
        known: see `check_metric`.
        streak: consecutive iterations, up to the previous one, in which the condition held.
    Raises: SettingsError when the condition could never hold.
    """
    if condition.function is not None:
        return _check_function(condition, history, streak)
    name = check_metric(condition.metric, history, known)
    measure = history.slope if condition.statistic == "slope" else history.mean
    value = measure(name, condition.window)
    filled = min(1.0, history.count(name) / condition.window)
    holds = (
        value is not None
        and history.is_full(name, condition.window)
        and _COMPARISONS[condition.comparison](value, condition.threshold)
    )
    return ConditionStatus(condition, value, filled, holds, streak + 1 if holds else 0)


def _check_function(condition: ExitCondition, history: MetricHistory, streak: int) -> ConditionStatus:
    """Status of a condition on a function of the user's; its window is full after as many iterations."""
    seen = max((history.count(name) for name in history.names), default=0)
    value = own_statistic(condition, history) if seen else None
    compare = _COMPARISONS[condition.comparison]
    holds = value is not None and seen >= condition.window and compare(value, condition.threshold)
    return ConditionStatus(condition, value, min(1.0, seen / condition.window), holds, streak + 1 if holds else 0)
