"""User-defined measures: functions of one trajectory, whose means the analysis reports with its built-in metrics."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from rl_core.errors import DataError, SettingsError
from rl_core.types import Trajectory
from rl_core.user_code.checks import USER_CODE_ERRORS, check_signature, parse_finite
from rl_core.user_code.load import import_function


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
        except USER_CODE_ERRORS as error:  # a user's function may raise anything
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
    """Load the measures at import paths or in files.

    Args:
        reserved_names: metric names that are taken.
    Raises: SettingsError for a function that cannot be imported or called, or whose name is taken.
    """
    metrics: list[CustomMetric] = []
    for index, path in enumerate(paths):
        key = f"measures.{index}"
        function = import_function(path, key)
        check_signature(function, f"{key}: '{path}'", "one trajectory", 1)
        name = path.partition(":")[2]
        if name in reserved_names or any(measure.name == name for measure in metrics):
            raise SettingsError(
                f"{key}: there is a measure named '{name}' already; give the function another name"
            )
        label = (inspect.getdoc(function) or "").partition("\n")[0].strip().rstrip(".")
        metrics.append(CustomMetric(name, label or name, function))
    return metrics
