"""List of runs: newest first, with their stages, the settings that differ, and filters."""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_core.errors import DataError, SettingsError, suggest_name
from tasks.config.displayed_settings import collect_default_values
from tasks.mlflow_environment import build_default_uri
from tasks.run_status import describe_run_status
from tasks.tracking.run_ids import AmbiguousRun, NamedRun, find_named_run
from tasks.tracking.tracking import RunRow, Tracking
from tasks.tracking.values import flatten_settings

_MAX_SHOWN_SETTINGS = 4  # differing settings in a line
_MAX_FILTERED_RUNS = 5000  # runs that a filter examines
_CONDITION = re.compile(r"\s*([^<>=!~]+?)\s*(<=|>=|!=|=|<|>|~)\s*(.*?)\s*")
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "!=": operator.ne,
}
# Settings for the location or execution of a run, which do not affect its results.
_LOCATION_SETTINGS = re.compile(r"(output|name|tracking\..*|run\..*|.*\.launch\..*)")


class RunFilter:
    """Condition on runs: KEY OPERATOR VALUE, where KEY is a field, a setting, a metric or a tag."""

    FIELDS = ("id", "run", "status", "started", "result", "seconds", "pipeline")

    def __init__(self, text: str) -> None:
        """Parse the condition. Raises: SettingsError."""
        match = _CONDITION.fullmatch(text)
        if match is None or not match[3]:
            raise SettingsError(
                f"--where {text!r}: must be KEY OPERATOR VALUE, as in status=finished, "
                "'stages.policy.learning_rate<1e-3' or 'result~promoted'; operators: = != < <= > >= ~ (contains)"
            )
        self.text, self.key, self.operator, self.value = text, match[1], match[2], match[3]

    def matches_run(self, row: RunRow) -> bool:
        """Return whether the condition holds. A run without such a value does not match."""
        actual = _find_value(row, self.key)
        if actual is None:
            return False
        if self.operator == "~":
            return self.value.lower() in str(actual).lower()
        numbers = _parse_number(actual), _parse_number(self.value)
        if None not in numbers:
            return _OPERATORS[self.operator](*numbers)
        if self.operator in ("=", "!="):
            return _OPERATORS[self.operator](str(actual).lower(), self.value.lower())
        return _OPERATORS[self.operator](str(actual), self.value)


def _parse_number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _find_value(row: RunRow, key: str) -> Any:
    """Return a field, a setting by its full key or its end, a metric, or a tag; None if the run has none."""
    fields = {
        "id": row.short_id,
        "run": row.name,
        "status": _describe_status(row),
        "started": _format_start_time(row),
        "result": _describe_result(row),
        "seconds": row.seconds,
        "pipeline": row.tags.get("pipeline"),
    }
    if key in fields:
        return fields[key]
    sources: tuple[tuple[str, Mapping[str, Any]], ...] = (
        ("settings.", row.params),
        ("metrics.", row.metrics),
        ("tags.", row.tags),
    )
    for prefix, values in sources:
        name = key.removeprefix(prefix)
        if name in values:
            return values[name]
    settings = _collect_settings(row)
    name = key.removeprefix("settings.")
    if name in settings:
        return settings[name]
    matches = [value for name, value in settings.items() if name.endswith(f".{key}")]
    return matches[0] if len(matches) == 1 else None


def _collect_settings(row: RunRow) -> dict[str, str]:
    """Collect the flat settings of a run: explicit values, and defaults for the rest."""
    stages = {_extract_stage(key) for key in row.params} | {""}
    return {
        key: value for key, stage, value in _list_default_settings() if stage in stages
    } | row.params


@functools.cache
def _list_default_settings() -> list[tuple[str, str, str]]:
    """List (key, stage, value) of every default; stage "" = no stage."""
    return [
        (key, _extract_stage(key), value)
        for key, value in flatten_settings(collect_default_values()).items()
    ]


def _extract_stage(key: str) -> str:
    parts = key.split(".", 2)
    return parts[1] if parts[0] == "stages" and len(parts) > 1 else ""


def list_runs(
    output: Path,
    uri: str | None = None,
    limit: int = 50,
    where: Sequence[str] = (),
    *,
    settings: bool = False,
    find_crashed: Callable[[], Mapping[str, str]] = dict,
) -> list[dict[str, str]]:
    """List runs as table rows: the newest pipeline run first, followed by its stages in order.

    Return [] if the default store does not exist yet; nothing is created.
    Args:
        limit: pipeline runs (a sweep counts as one, with its trials).
        where: conditions that must all hold (`RunFilter`).
        settings: add a column of the settings in which the listed runs of a pipeline differ.
        find_crashed: called if the store lists running runs; returns run id -> reason for crashed runs. The store
            lists a crashed run as RUNNING until the next run or `check machine --repair` corrects it.
    Raises: SettingsError for a condition on a key that no run has.
    """
    rows = _list_rows_in_order(output, uri, limit, where, find_crashed)
    if not settings:
        return [_format_row(row, "  " * depth) for depth, row in rows]
    differing = find_differing_settings([row for _, row in rows if _is_pipeline_run(row)])
    lines = []
    for depth, row in rows:
        line = _format_row(row, "  " * depth)
        first_columns = {key: line[key] for key in ("run", "status", "started", "took")}
        description = _describe_settings(differing.get(row.run_id, {}))
        lines.append({**first_columns, "settings": description, **line})
    return lines


def list_run_records(
    output: Path,
    uri: str | None = None,
    limit: int = 50,
    where: Sequence[str] = (),
    *,
    find_crashed: Callable[[], Mapping[str, str]] = dict,
) -> list[dict[str, Any]]:
    """List the same runs for programs: ids, times in seconds, settings, newest metrics and tags, in the same order."""
    rows = [row for _, row in _list_rows_in_order(output, uri, limit, where, find_crashed)]
    differing = find_differing_settings([row for row in rows if _is_pipeline_run(row)])
    return [
        {
            "id": row.short_id,
            "run_id": row.run_id,
            "parent_run_id": row.parent_run_id,
            "run": row.name,
            "status": _describe_status(row),
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(row.start_time)),
            "seconds": row.seconds,
            "result": row.tags.get("result", ""),
            "page": row.url,
            "differs": differing.get(row.run_id, {}),
            "metrics": row.metrics,
            "tags": row.tags,
            "settings": _collect_settings(row) if _is_pipeline_run(row) else row.params,
        }
        for row in rows
    ]


def find_differing_settings(rows: Iterable[RunRow]) -> dict[str, dict[str, str]]:
    """Find, by run id, the settings that differ between runs of the same pipeline. Locations are ignored."""
    by_pipeline: dict[str, list[RunRow]] = {}
    for row in rows:
        by_pipeline.setdefault(row.tags.get("pipeline", ""), []).append(row)
    by_run: dict[str, dict[str, str]] = {}
    for group in by_pipeline.values():
        keys = dict.fromkeys(
            key for row in group for key in row.params if not _LOCATION_SETTINGS.fullmatch(key)
        )
        settings = {row.run_id: _collect_settings(row) for row in group}
        differing = [
            key for key in keys if len({values.get(key) for values in settings.values()}) > 1
        ]
        for row in group:
            by_run[row.run_id] = {key: settings[row.run_id].get(key, "-") for key in differing}
    return by_run


def _describe_settings(settings: Mapping[str, str]) -> str:
    """Describe settings briefly by the last parts of their keys."""
    parts = [
        f"{key.rpartition('.')[2]}={value[:24]}"
        for key, value in settings.items()
        if value not in ("-", "{}")
    ]
    return ", ".join(parts[:_MAX_SHOWN_SETTINGS]) + (
        f" and {len(parts) - _MAX_SHOWN_SETTINGS} more" if len(parts) > _MAX_SHOWN_SETTINGS else ""
    )


def _is_pipeline_run(row: RunRow) -> bool:
    """Return whether this is a pipeline run with its settings, such as a trial, and not a run of a stage or a sweep."""
    return row.tags.get("kind") in ("pipeline", "trial", "stage") and "stage" not in row.tags


def _list_rows_in_order(
    output: Path,
    uri: str | None,
    limit: int,
    where: Sequence[str],
    find_crashed: Callable[[], Mapping[str, str]],
) -> list[tuple[int, RunRow]]:
    """List (depth, run): the newest pipeline run first, each followed by its nested runs, oldest first."""
    filters = [RunFilter(text) for text in where]
    tracking = Tracking(uri, output)
    default_uri = build_default_uri(tracking.output)
    if (
        tracking.store.uri == default_uri
        and not Path(default_uri.removeprefix("sqlite:///")).exists()
    ):
        return []
    rows = tracking.list_runs(limit=_MAX_FILTERED_RUNS if filters else min(50_000, 20 * limit))
    crashed = find_crashed() if any(row.status == "RUNNING" for row in rows) else {}
    rows = [
        _mark_killed(row, crashed[row.run_id]) if row.run_id in crashed else row for row in rows
    ]
    _check_filter_keys(filters, rows)
    run_ids = {row.run_id for row in rows}
    children: dict[str, list[RunRow]] = {}
    for row in reversed(rows):
        if row.parent_run_id in run_ids:
            children.setdefault(str(row.parent_run_id), []).append(row)
    roots = [row for row in rows if not row.parent_run_id]
    if filters:
        roots = [
            row
            for row in rows
            if _is_pipeline_run(row) and all(run_filter.matches_run(row) for run_filter in filters)
        ]
    ordered: list[tuple[int, RunRow]] = []
    for row in roots[:limit]:
        ordered += _list_nested(row, children, 0)
    return ordered


def _mark_killed(row: RunRow, reason: str) -> RunRow:
    return dataclasses.replace(row, status="KILLED", tags={**row.tags, "interrupted": reason})


def _list_nested(
    row: RunRow, children: Mapping[str, list[RunRow]], depth: int
) -> list[tuple[int, RunRow]]:
    rows = [(depth, row)]
    for child in children.get(row.run_id, []):
        rows += _list_nested(child, children, depth + 1)
    return rows


def _check_filter_keys(filters: Sequence[RunFilter], rows: Sequence[RunRow]) -> None:
    """Refuse a key that no run has. Raises: SettingsError."""
    runs = [row for row in rows if _is_pipeline_run(row)]
    if not runs:
        return
    for run_filter in filters:
        key = run_filter.key
        if key in RunFilter.FIELDS or any(_find_value(run, key) is not None for run in runs):
            continue
        names: set[str] = set()
        for run in runs:
            names.update(_collect_settings(run), run.metrics, run.tags)
        raise SettingsError(
            f"--where {run_filter.text!r}: no run has '{key}'; {suggest_name(key, sorted(names))}"
        )


def find_run(rows: Sequence[RunRow], name: str) -> RunRow:
    """Find a run by short id, name, or digits of its id; else the newest run of that pipeline. Raises: DataError."""
    runs = [row for row in rows if _is_pipeline_run(row)]
    named = [
        NamedRun(
            row.short_id,
            row.pipeline,
            row.name,
            row.key,
            run_id=row.run_id,
            is_pipeline=row.tags.get("kind") == "pipeline",
        )
        for row in reversed(runs)
    ]
    try:
        match = find_named_run(named, name, "the tracking store")
    except AmbiguousRun:
        raise
    except DataError as error:
        unknown = error
    else:
        return next(row for row in runs if row.run_id == match.run_id)
    other = next((row for row in rows if name in (row.name, row.run_id)), None)
    if other is not None:
        if other.tags.get("kind") == "sweep":
            raise DataError(f"'{name}' is a sweep; name its trials (posttrain runs)")
        raise DataError(f"'{name}' is a part of a run; name the whole run (posttrain runs)")
    raise unknown


def list_stage_runs(rows: Sequence[RunRow], run: RunRow) -> list[RunRow]:
    """List the stage runs nested in a run, oldest first."""
    return [row for row in reversed(rows) if row.parent_run_id == run.run_id]


def _format_start_time(row: RunRow) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.start_time))


def _describe_status(row: RunRow) -> str:
    return describe_run_status(row.status, row.tags)


def _format_row(row: RunRow, indent: str) -> dict[str, str]:
    seconds = "" if row.seconds is None else f"{row.seconds:.0f} s"
    return {
        "run": indent + _format_run_label(row),
        "status": _describe_status(row),
        "started": _format_start_time(row).rpartition(":")[0],
        "took": seconds,
        "result": _describe_result(row),
        "page": row.url,
    }


def _format_run_label(row: RunRow) -> str:
    """Return the short id of a run; with the name of a sweep or trial, which says what varies; or a stage's name."""
    if not row.short_id:
        return row.name
    is_plain = row.tags.get("kind") in ("pipeline", "stage")
    return row.short_id if is_plain else f"{row.short_id}  {row.name}"


def _describe_result(row: RunRow) -> str:
    """Describe a run's outcome briefly: its `result` tag, the gate's decision, or its main figure."""
    # The tags `error` and `interrupted` are removed when a run is resumed.
    for tag in ("error", "interrupted", "result", "gate.decision"):
        if row.tags.get(tag):
            text = " ".join(row.tags[tag].split())
            return text if len(text) <= 60 else text[:57] + "..."
    for name in ("eval/success_rate", "success_rate", "eval/accuracy", "eval/loss", "train/loss"):
        if name in row.metrics:
            return f"{name} {row.metrics[name]:.4g}"
    return ""
