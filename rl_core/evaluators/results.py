"""Results of tasks of other evaluators: metrics with intervals, and one line per sample.

<folder>/result.json      TaskResult; written last, so a folder with it is complete
<folder>/samples.jsonl    {"id", "metrics", "sample"}: the numbers that pair two models, and the evaluator's record
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from rl_core.analysis.statistics import wilson_interval
from rl_core.errors import DataError
from rl_core.storage.atomic_files import make_folder, write_json_atomic, write_text_atomic
from rl_core.storage.faults import inject_fault
from rl_core.tracking import replace_invalid_characters

RESULT_FILE = "result.json"
SAMPLES_FILE = "samples.jsonl"
NORMAL_QUANTILE = 1.959963984540054  # of 0.975: half the width of a 95% interval in standard errors


@dataclass(frozen=True, slots=True)
class TaskMetric:
    """One metric of a task."""

    value: float | None  # None = not a number
    stderr: float | None = None  # the evaluator's own
    low: float | None = None  # 95% interval; None = unknown
    high: float | None = None
    higher_is_better: bool = True
    samples: int = 0  # values that it was computed from; 0 = unknown

    def format_value(self) -> str:
        """Format the value with its interval."""
        if self.value is None:
            return "not a number"
        if self.low is None or self.high is None:
            return f"{self.value:.4g}"
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


@dataclass(frozen=True, slots=True)
class TaskResult:
    """Result of one task."""

    task: str  # as `SuiteTask.label`
    evaluator: str  # package and version
    version: str  # of the task, as it says itself
    samples: int
    seconds: float
    metrics: dict[str, TaskMetric] = field(default_factory=dict)  # by name, without the task's

    def list_metrics(self) -> dict[str, TaskMetric]:
        """Return the metrics by the names that the promotion gate uses: task/metric."""
        return {f"{self.task}/{name}": metric for name, metric in self.metrics.items()}

    def to_json(self) -> dict[str, Any]:
        """Convert to a JSON-serialisable dict."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        """Build a result from that of `to_json`. Raises: DataError."""
        try:
            metrics = {name: TaskMetric(**value) for name, value in row["metrics"].items()}
            return cls(**{**row, "metrics": metrics})
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"not the result of a task ({type(error).__name__}: {error})"
            ) from error


@dataclass(frozen=True, slots=True)
class SuiteMetrics:
    """Metrics of one model's suites, and the numbers of their samples."""

    metrics: dict[str, TaskMetric]  # by name, task/metric
    read_samples: Callable[[str], dict[str, float]]  # of a metric, by sample; {} = unknown

    def find_metric(self, name: str) -> TaskMetric | None:
        """Return the metric of that name; None = there is none."""
        return self.metrics.get(name)


def list_metric_rows(
    models: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> tuple[list[str], list[list[str]]]:
    """List metrics as text: the names of the models, and for each metric its name and its value in every model.

    Args:
        models: results of `TaskResult.to_json` by task, by model.
    """
    names = dict.fromkeys(
        (task, metric)
        for tasks in models.values()
        for task, result in tasks.items()
        for metric in result["metrics"]
    )
    rows = []
    for task, metric in names:
        values = [tasks.get(task, {}).get("metrics", {}).get(metric) for tasks in models.values()]
        cells = ("" if value is None else TaskMetric(**value).format_value() for value in values)
        rows.append([f"{task}/{metric}", *cells])
    return list(models), rows


def build_metric_name(*parts: str) -> str:
    """Join the parts of a metric's name, without characters that a tracking store refuses, nor slashes."""
    return ".".join(replace_invalid_characters(part, r"\w.-") for part in parts if part)


def read_number(value: Any) -> float | None:
    """Return a finite number as a float; None for anything else."""
    if isinstance(value, bool | int | float) or hasattr(value, "__float__"):
        number = float(value)
        return number if math.isfinite(number) else None
    return None


def build_metric(
    value: Any,
    stderr: Any = None,
    sample_values: Sequence[float | None] = (),
    *,
    higher_is_better: bool = True,
) -> TaskMetric:
    """Build a metric with its 95% interval.

    If the value is the share of samples that are 1, the others being 0, the interval is Wilson's; otherwise it is the
    value -+ 1.96 of the evaluator's standard errors, if it has one.

    Args:
        sample_values: the metric's number of each sample; [] = unknown, as for metrics of a whole corpus.
    """
    number, error = read_number(value), read_number(stderr)
    values = [value for value in sample_values if value is not None]
    low = high = None
    if number is not None:
        successes = sum(values)
        is_share = bool(values) and len(values) == len(sample_values) and set(values) <= {0.0, 1.0}
        if is_share and math.isclose(number, successes / len(values), abs_tol=1e-9):
            low, high = wilson_interval(successes, len(values))
        elif error is not None:
            low, high = number - NORMAL_QUANTILE * error, number + NORMAL_QUANTILE * error
    return TaskMetric(number, error, low, high, higher_is_better, len(values))


def write_task_result(
    folder: Path, result: TaskResult, samples: Iterable[Mapping[str, Any]]
) -> None:
    """Write a task's samples, then its result."""
    make_folder(folder)
    lines = (
        json.dumps(row, ensure_ascii=False, default=_convert_to_text) + "\n" for row in samples
    )
    write_text_atomic(folder / SAMPLES_FILE, "".join(lines))
    inject_fault("suite.samples")
    write_json_atomic(folder / RESULT_FILE, result.to_json())
    inject_fault("suite.result")


def _convert_to_text(value: Any) -> Any:
    """Convert what JSON has no form for: numbers of numpy, else text."""
    number = read_number(value)
    return str(value) if number is None else number


def read_task_result(folder: Path) -> TaskResult | None:
    """Read a task's result; None = there is none yet. Raises: DataError if the file was damaged."""
    path = folder / RESULT_FILE
    if not path.is_file():
        return None
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error})") from error
    return TaskResult.from_json(row)


def read_sample_values(folder: Path, metric: str) -> dict[str, float]:
    """Read a metric's number of each sample, by the sample's id; {} for metrics of a whole corpus.

    Args:
        metric: without the task's name.
    """
    values: dict[str, float] = {}
    with (folder / SAMPLES_FILE).open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if (value := row["metrics"].get(metric)) is not None:
                values[row["id"]] = float(value)
    return values
