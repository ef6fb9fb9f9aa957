"""Metric reference: name, unit and meaning of every metric that the code logs, and the values that call for action.

The documentation's metric reference is generated from this table, and a test compares it with the names that training
logs. A name may hold fields: `{level}` stands for a level of the environment, `{model}` for a model of the run,
`{component}` for a component of the reward (in an import path with `.` instead of `:`).

Metrics exported to Prometheus and Datadog use base units, and labels instead of names within a name:

    train/success_rate_by_level/3       train/success_rate_by_level   level="3"
    system/gpu_0_memory_usage_megabytes system/gpu_memory_usage_bytes gpu="0"
    eval/sft/success_rate               eval/success_rate_by_model    model="sft"

The metric reference determines which part of a name is a label; metrics that it does not list keep their name.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

METRICS_FILE = Path(__file__).with_name("metrics.json")


@dataclass(frozen=True, slots=True)
class MetricDescription:
    """One metric. `worry` is empty if no value by itself is a bad sign."""

    name: str
    unit: str
    meaning: str
    worry: str = ""


@dataclass(frozen=True, slots=True)
class MetricGroup:
    """Metrics under one heading."""

    title: str
    about: str
    metrics: tuple[MetricDescription, ...]


def load_metric_groups(path: Path = METRICS_FILE) -> tuple[MetricGroup, ...]:
    """Read the groups of the metric reference in the order of the documentation."""
    groups = json.loads(path.read_text(encoding="utf-8"))
    return tuple(
        MetricGroup(
            group["title"],
            group["about"],
            tuple(MetricDescription(**row) for row in group["metrics"]),
        )
        for group in groups
    )


METRIC_GROUPS = load_metric_groups()


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
    """Return name, labels and scale under which a logged metric is exported."""
    exact, patterns = _load_reference()
    if (row := exact.get(name)) is not None:
        return _build_exported_metric(name, (), row)
    for pattern, base, row in patterns:
        match = pattern.fullmatch(name)
        if match is not None:
            return _build_exported_metric(base, tuple(match.groupdict().items()), row)
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
    """Return meaning and unit, in the base unit."""
    unit = {"MiB": "bytes", "%": "share, 1 = all (of one core for a process)"}.get(
        row.unit, row.unit
    )
    return f"{row.meaning} Unit: {unit}." if unit and unit != "-" else row.meaning


@functools.cache
def _load_reference() -> tuple[
    dict[str, MetricDescription], list[tuple[re.Pattern[str], str, MetricDescription]]
]:
    """Load metrics with a fixed name, and patterns of the others with their exported name, most specific first."""
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
    return exact, sorted(patterns, key=lambda pattern: open_rows.index(pattern[2]))


def _compile_name_pattern(name: str) -> re.Pattern[str]:
    """Compile a regular expression of a name with fields; the last field may hold slashes."""
    *parts, last = _NAME_FIELD.split(name)
    text, fields = "", parts[1::2]
    for literal, field in zip(parts[::2], fields, strict=True):
        more = ".+" if field == fields[-1] and not last else "[^/]+?"
        text += f"{re.escape(literal)}(?P<{field}>{more})"
    return re.compile(text + re.escape(last))


# What tells how a run goes, most important first; other metrics follow by prefix, then in the order of the reference.
MAIN_METRICS = (
    "reward/mean",
    "train/episode_return",
    "train/success_rate",
    "eval/success_rate",
    "eval/reward_mean",
    "eval/episode_return",
    "policy/ref_kl",
    "policy/update_kl",
    "policy/entropy",
    "train/action_tokens",
    "train/loss",
    "eval/loss",
    "train/accuracy",
    "eval/accuracy",
    "train/grad_norm",
    "train/learning_rate",
)
_PREFIX_ORDER = (
    "reward",
    "eval",
    "train",
    "policy",
    "value",
    "curriculum",
    "tool",
    "",
    "perf",
    "system",
)


@functools.lru_cache(maxsize=8192)
def rank_metric(name: str) -> tuple[int, int, int, str]:
    """Return a sort key that puts the metrics first that tell how a run goes."""
    if name in MAIN_METRICS:
        return 0, MAIN_METRICS.index(name), 0, name
    prefix = name.partition("/")[0]
    place = _PREFIX_ORDER.index(prefix if prefix in _PREFIX_ORDER else "")
    return 1, place, _load_reference_order().get(name, len(_load_reference_order())), name


def sort_by_importance(names: Iterable[str]) -> list[str]:
    """Sort names of metrics: reward, success, KL, entropy, length, loss; then the others by prefix."""
    return sorted(names, key=rank_metric)


@functools.cache
def _load_reference_order() -> dict[str, int]:
    rows = [metric.name for group in METRIC_GROUPS for metric in group.metrics]
    return {name: index for index, name in enumerate(rows)}
