"""Statistics of the user's for exit conditions: found, checked, and called with the stage's metrics."""

from __future__ import annotations

import inspect

from rl_core.errors import SettingsError
from rl_core.importing import as_finite, import_function
from rl_core.metrics import MetricHistory
from rl_core.settings import ExitCondition

__all__ = ["check_function", "own_statistic"]


def check_function(condition: ExitCondition) -> None:
    """Import a condition's function, if it names one. Raises: SettingsError where it cannot be called."""
    if condition.function is None:
        return
    function = import_function(condition.function, "function")
    try:
        inspect.signature(function).bind({}, **condition.options)
    except TypeError as error:
        raise SettingsError(
            f"function: '{condition.function}' takes {inspect.signature(function)} ({error}); it is called with "
            "(history, ...options)"
        ) from error
    except ValueError:  # written in C: it shows no parameters
        return


def own_statistic(condition: ExitCondition, history: MetricHistory) -> float | None:
    """The function's value for the latest `window` iterations; None = it has none yet.

    It is given the metrics of the curriculum's stage by name, the latest `window` values of each, oldest first.
    Raises: SettingsError for what is no number, or an error of the function's.
    """
    assert condition.function is not None
    values = {name: history.values(name, condition.window) for name in history.names}
    try:
        value = import_function(condition.function, "function")(values, **condition.options)
    except Exception as error:  # a user's function may raise anything
        raise SettingsError(f"function: '{condition.function}' raised {type(error).__name__}: {error}") from error
    if value is None:
        return None
    number = as_finite(value)
    if number is None:
        raise SettingsError(f"function: '{condition.function}' gave {value!r}; a number, or None, is expected")
    return number
