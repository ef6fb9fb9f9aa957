"""Names under which metrics leave for Prometheus and Datadog: base units, and labels in place of names within a name.

    train/success_rate_by_level/3       train/success_rate_by_level   level="3"
    system/gpu_0_memory_usage_megabytes system/gpu_memory_usage_bytes gpu="0"
    eval/sft/success_rate               eval/success_rate_by_model    model="sft"

Which part of a name is a label follows from the metric reference; metrics that it does not list keep their name.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from rl_core.analysis.metric_reference import GROUPS, Metric

__all__ = ["ExportedMetric", "exported"]

_UNITS = {"_megabytes": ("_bytes", 2.0**20), "_percentage": ("_ratio", 0.01)}
_FIELD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class ExportedMetric:
    """A metric outside."""

    name: str  # with slashes
    labels: tuple[tuple[str, str], ...]
    scale: float  # from the metric's unit to the base unit
    help: str  # "" for a metric that is not in the reference


@functools.lru_cache(maxsize=8192)
def exported(name: str) -> ExportedMetric:
    """Name, labels and scale outside of a metric as it is logged."""
    exact, patterns = _reference()
    if (row := exact.get(name)) is not None:
        return _row(name, (), row)
    for pattern, base, row in patterns:
        if (found := pattern.fullmatch(name)) is not None:
            return _row(base, tuple(found.groupdict().items()), row)
    return _row(name, (), None)


def _row(base: str, labels: tuple[tuple[str, str], ...], row: Metric | None) -> ExportedMetric:
    scale = 1.0
    for suffix, (unit, factor) in _UNITS.items():
        if base.endswith(suffix):
            base, scale = base.removesuffix(suffix) + unit, factor
    return ExportedMetric(base, labels, scale, _help(row) if row is not None else "")


def _help(row: Metric) -> str:
    """Meaning and unit, as of the base unit."""
    unit = {"MiB": "bytes", "%": "share, 1 = all (of one core for a process)"}.get(row.unit, row.unit)
    return f"{row.meaning} Unit: {unit}." if unit and unit != "-" else row.meaning


@functools.cache
def _reference() -> tuple[dict[str, Metric], list[tuple[re.Pattern[str], str, Metric]]]:
    """Metrics of a fixed name; patterns of the others with the name that is left, the most specific first."""
    rows = [metric for group in GROUPS for metric in group.metrics]
    exact = {row.name: row for row in rows if "{" not in row.name}
    taken, patterns = set(exact), []
    open_rows = sorted((row for row in rows if "{" in row.name), key=lambda row: -len(_FIELD.sub("", row.name)))
    for row in sorted(open_rows, key=lambda row: len(_FIELD.findall(row.name))):  # plain names go to those of one field
        base = re.sub(r"/_|_/|//", "/", _FIELD.sub("", row.name)).replace("__", "_").strip("/_")
        for field in _FIELD.findall(row.name):
            if base in taken:
                base += f"_by_{field}"
        taken.add(base)
        patterns.append((_pattern(row.name), base, row))
    return exact, sorted(patterns, key=lambda found: open_rows.index(found[2]))


def _pattern(name: str) -> re.Pattern[str]:
    """Regular expression of a name with fields; the last one may hold slashes."""
    *parts, last = _FIELD.split(name)
    text, fields = "", parts[1::2]
    for literal, field in zip(parts[::2], fields, strict=True):
        more = ".+" if field == fields[-1] and not last else "[^/]+?"
        text += f"{re.escape(literal)}(?P<{field}>{more})"
    return re.compile(text + re.escape(last))
