"""Exit conditions: moving average or slope of a metric, or a custom function, compared with a threshold."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rl_core.errors import SettingsError, suggest_name
from rl_core.metric_history import MetricHistory
from rl_core.settings import ExitCondition
from rl_core.user_code.checks import USER_CODE_ERRORS, check_signature, parse_finite
from rl_core.user_code.load import import_function

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    ">": operator.gt,
    "<=": operator.le,
    "<": operator.lt,
}
_AVERAGE_NAME = re.compile(r"(.+?)_(?:ma|sma|avg|mean|moving_average|rolling)_?([1-9][0-9]{0,6})")


def check_custom_statistic(condition: ExitCondition) -> None:
    """Import a condition's function, if it has one. Raises: SettingsError if it cannot be called."""
    if condition.function is None:
        return
    check_signature(
        import_function(condition.function, "function"),
        f"function: '{condition.function}'",
        "(history, ...options)",
        1,
        condition.options,
    )


def compute_custom_statistic(condition: ExitCondition, history: MetricHistory) -> float | None:
    """Return the function's value for the latest `window` iterations; None if it has none yet.

    The function receives the metrics of the curriculum stage by name, the latest `window` values of each, oldest first.
    Raises: SettingsError if the function raises, or returns anything but a number or None.
    """
    assert condition.function is not None
    values = {name: history.list_values(name, condition.window) for name in history.names}
    try:
        value = import_function(condition.function, "function")(values, **condition.options)
    except USER_CODE_ERRORS as error:  # a user's function may raise anything
        raise SettingsError(
            f"function: '{condition.function}' raised {type(error).__name__}: {error}"
        ) from error
    if value is None:
        return None
    number = parse_finite(value)
    if number is None:
        raise SettingsError(
            f"function: '{condition.function}' returned {value!r}; expected a number or None"
        )
    return number


@dataclass(frozen=True, slots=True)
class ConditionStatus:
    """Status of one condition."""

    condition: ExitCondition
    value: float | None  # mean or slope over the window so far; None = not enough observations
    filled_share: float  # of the window; 1.0 = full
    holds: bool  # the window is full and the comparison is true
    streak: int = 0  # consecutive iterations, including this one, in which it held

    @property
    def is_met(self) -> bool:
        """True if it has held for its patience."""
        return self.streak >= self.condition.patience

    @property
    def label(self) -> str:
        """Compared quantity: success_rate, slope of success_rate, or the name of a custom function."""
        if self.condition.function is not None:
            return self.condition.function.partition(":")[2]
        return ("slope of " if self.condition.statistic == "slope" else "") + self.condition.metric

    @property
    def metric(self) -> str:
        """Name of the compared quantity as a metric: average/success_rate, slope/success_rate, or own/mastered."""
        if self.condition.function is not None:
            return f"own/{self.label}"
        prefix = "slope" if self.condition.statistic == "slope" else "average"
        return f"{prefix}/{self.condition.metric}"

    def __str__(self) -> str:
        condition = self.condition
        value = "not observed" if self.value is None else f"{self.value:.4g}"
        comparison = f"{condition.comparison} {condition.threshold:g} over {condition.window}"
        streak = f", {self.streak} times in a row" if condition.patience > 1 else ""
        return f"{self.label} {value} {comparison}{streak}"


def expand_metric_name(name: str) -> str:
    """Return the full name of a metric in settings: `success_rate` is short for `train/success_rate`."""
    return name if "/" in name else f"train/{name}"


def suggest_window_for_average(metric: str) -> str:
    """Return our settings for a name that means a moving average, as in success_rate_ma100; "" for other names."""
    match = _AVERAGE_NAME.fullmatch(metric)
    if match is None:
        return ""
    return f"a mean over a window is the default statistic: write metric: {match[1]} and window: {match[2]}"


def check_metric(metric: str, history: MetricHistory, known: Iterable[str] = ()) -> str:
    """Return the metric's full name.

    Args:
        known: names of metrics that may be observed later.
    Raises: SettingsError if the metric was never observed and is unknown.
    """
    hint = suggest_window_for_average(metric)
    if hint:
        raise SettingsError(f"metric: '{metric}' is not a metric; {hint}")
    name, observed = expand_metric_name(metric), history.names
    candidates = {*observed, *known}
    if observed and name not in candidates:
        raise SettingsError(
            f"metric: '{metric}' is not a metric of this stage; {suggest_name(name, candidates)}"
        )
    return name


def evaluate_condition(
    condition: ExitCondition, history: MetricHistory, known: Iterable[str] = (), *, streak: int = 0
) -> ConditionStatus:
    """Return the status of a condition after one more iteration.

    Args:
        history: of the current stage only, so that metrics on easier levels do not count.
        known: see `check_metric`.
        streak: consecutive iterations, up to the previous one, in which the condition held.
    Raises: SettingsError if the condition could never hold.
    """
    if condition.function is not None:
        return _evaluate_custom_condition(condition, history, streak)
    name = check_metric(condition.metric, history, known)
    compute_statistic = (
        history.compute_slope if condition.statistic == "slope" else history.compute_mean
    )
    value = compute_statistic(name, condition.window)
    filled_share = min(1.0, history.count_points(name) / condition.window)
    holds = (
        value is not None
        and history.is_full(name, condition.window)
        and _COMPARISONS[condition.comparison](value, condition.threshold)
    )
    return ConditionStatus(condition, value, filled_share, holds, streak + 1 if holds else 0)


def _evaluate_custom_condition(
    condition: ExitCondition, history: MetricHistory, streak: int
) -> ConditionStatus:
    """Return the status of a condition on a custom function; its window is full after as many iterations."""
    num_observed = max((history.count_points(name) for name in history.names), default=0)
    value = compute_custom_statistic(condition, history) if num_observed else None
    filled_share = min(1.0, num_observed / condition.window)
    holds = (
        value is not None
        and num_observed >= condition.window
        and _COMPARISONS[condition.comparison](value, condition.threshold)
    )
    return ConditionStatus(condition, value, filled_share, holds, streak + 1 if holds else 0)
