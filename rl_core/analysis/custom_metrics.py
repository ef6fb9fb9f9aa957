"""Measures of the user's: functions of one trajectory, whose means the analysis reports beside its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from rl_core.errors import DataError, SettingsError
from rl_core.types import Trajectory
from rl_core.user_code import import_function, parse_finite


@dataclass(frozen=True)
class CustomMetric:
    """One function: its name is the metric's, the first line of its docstring the label in the report."""

    name: str
    label: str
    function: Callable[[Trajectory], float | None]

    def __call__(self, trajectory: Trajectory) -> float | None:
        """Value of one trajectory; None = the measure does not apply. Raises: DataError naming function and episode."""
        place = f"measure '{self.name}' on {trajectory.level}/{trajectory.seed}"
        try:
            value = self.function(trajectory)
        except Exception as error:  # a user's function may raise anything
            raise DataError(f"{place} raised {type(error).__name__}: {error}") from error
        if value is None:
            return None
        number = parse_finite(value)
        if number is None:
            raise DataError(f"{place} gave {value!r}; a finite number, or None, is expected")
        return number


def load_custom_metrics(
    paths: Sequence[str], reserved_names: Collection[str] = ()
) -> list[CustomMetric]:
    """The measures at import paths or in files.

    Args:
        taken: names of metrics that there are already.
    Raises: SettingsError for what cannot be imported or called, or has a name that is taken.
    """
    found: list[CustomMetric] = []
    for index, path in enumerate(paths):
        key = f"measures.{index}"
        function = import_function(path, key)
        try:
            inspect.signature(function).bind(None)
        except TypeError as error:
            raise SettingsError(
                f"{key}: '{path}' takes {inspect.signature(function)}; it is called with one trajectory"
            ) from error
        except ValueError:  # written in C: it shows no parameters
            pass
        name = path.partition(":")[2]
        if name in reserved_names or any(measure.name == name for measure in found):
            raise SettingsError(
                f"{key}: there is a measure named '{name}' already; give the function another name"
            )
        label = (inspect.getdoc(function) or "").partition("\n")[0].strip().rstrip(".")
        found.append(CustomMetric(name, label or name, function))
    return found
