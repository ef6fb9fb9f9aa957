"""Every metric that the code logs: name, unit, meaning, and the values that call for action.

The metric reference of the documentation is generated from this table, and a test compares it with the names that
training really logs. A name may hold fields: `{level}` stands for a level of the environment, `{model}` for a model of
the run, `{component}` for a component of the reward (of an import path with `.` for `:`).

Names under which metrics leave for Prometheus and Datadog: base units, and labels in place of names within a name.

    train/success_rate_by_level/3       train/success_rate_by_level   level="3"
    system/gpu_0_memory_usage_megabytes system/gpu_memory_usage_bytes gpu="0"
    eval/sft/success_rate               eval/success_rate_by_model    model="sft"

Which part of a name is a label follows from the metric reference; metrics that it does not list keep their name.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from rl_core.analysis.run_metrics import (
    ANALYSIS_METRICS,
    DATA_METRICS,
    EVALUATION_METRICS,
    EXPORT_METRICS,
    PERFORMANCE_METRICS,
    PIPELINE_METRICS,
    PROMOTION_METRICS,
    RUN_METRICS,
    SYSTEM_METRICS,
)
from rl_core.analysis.training_metrics import (
    CURRICULUM_METRICS,
    POLICY_METRICS,
    REWARD_METRICS,
    THOUGHT_METRICS,
    TOOL_METRICS,
    TRAINING_METRICS,
    VALUE_METRICS,
    MetricDescription,
    MetricGroup,
)

METRIC_GROUPS: tuple[MetricGroup, ...] = (
    TRAINING_METRICS,
    EVALUATION_METRICS,
    REWARD_METRICS,
    POLICY_METRICS,
    VALUE_METRICS,
    CURRICULUM_METRICS,
    TOOL_METRICS,
    THOUGHT_METRICS,
    PERFORMANCE_METRICS,
    SYSTEM_METRICS,
    RUN_METRICS,
    DATA_METRICS,
    EXPORT_METRICS,
    PROMOTION_METRICS,
    ANALYSIS_METRICS,
    PIPELINE_METRICS,
)


_BASE_UNITS = {"_megabytes": ("_bytes", 2.0**20), "_percentage": ("_ratio", 0.01)}
_NAME_FIELD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class ExportedMetric:
    """A metric outside."""

    name: str  # with slashes
    labels: tuple[tuple[str, str], ...]
    scale: float  # from the metric's unit to the base unit
    help: str  # "" for a metric that is not in the reference


@functools.lru_cache(maxsize=8192)
def resolve_exported_metric(name: str) -> ExportedMetric:
    """Name, labels and scale outside of a metric as it is logged."""
    exact, patterns = _load_reference()
    if (row := exact.get(name)) is not None:
        return _build_exported_metric(name, (), row)
    for pattern, base, row in patterns:
        if (found := pattern.fullmatch(name)) is not None:
            return _build_exported_metric(base, tuple(found.groupdict().items()), row)
    return _build_exported_metric(name, (), None)


def _build_exported_metric(
    base: str, labels: tuple[tuple[str, str], ...], row: MetricDescription | None
) -> ExportedMetric:
    scale = 1.0
    for suffix, (unit, factor) in _BASE_UNITS.items():
        if base.endswith(suffix):
            base, scale = base.removesuffix(suffix) + unit, factor
    return ExportedMetric(base, labels, scale, _format_help(row) if row is not None else "")


def _format_help(row: MetricDescription) -> str:
    """Meaning and unit, as of the base unit."""
    unit = {"MiB": "bytes", "%": "share, 1 = all (of one core for a process)"}.get(
        row.unit, row.unit
    )
    return f"{row.meaning} Unit: {unit}." if unit and unit != "-" else row.meaning


@functools.cache
def _load_reference() -> tuple[
    dict[str, MetricDescription], list[tuple[re.Pattern[str], str, MetricDescription]]
]:
    """Metrics of a fixed name; patterns of the others with the name that is left, the most specific first."""
    rows = [metric for group in METRIC_GROUPS for metric in group.metrics]
    exact = {row.name: row for row in rows if "{" not in row.name}
    taken, patterns = set(exact), []
    open_rows = sorted(
        (row for row in rows if "{" in row.name),
        key=lambda row: -len(_NAME_FIELD.sub("", row.name)),
    )
    for row in sorted(
        open_rows, key=lambda row: len(_NAME_FIELD.findall(row.name))
    ):  # plain names go to those of one field
        base = (
            re.sub(r"/_|_/|//", "/", _NAME_FIELD.sub("", row.name)).replace("__", "_").strip("/_")
        )
        for field in _NAME_FIELD.findall(row.name):
            if base in taken:
                base += f"_by_{field}"
        taken.add(base)
        patterns.append((_compile_name_pattern(row.name), base, row))
    return exact, sorted(patterns, key=lambda found: open_rows.index(found[2]))


def _compile_name_pattern(name: str) -> re.Pattern[str]:
    """Regular expression of a name with fields; the last one may hold slashes."""
    *parts, last = _NAME_FIELD.split(name)
    text, fields = "", parts[1::2]
    for literal, field in zip(parts[::2], fields, strict=True):
        more = ".+" if field == fields[-1] and not last else "[^/]+?"
        text += f"{re.escape(literal)}(?P<{field}>{more})"
    return re.compile(text + re.escape(last))
