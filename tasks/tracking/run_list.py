"""The list of runs: newest first, with their stages, the settings that differ, and filters."""

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
from tasks.tracking.tracking import RunRow, Tracking
from tasks.tracking.values import flatten_settings

_MAX_SHOWN_SETTINGS = 4  # settings that differ, in a line
_MAX_FILTERED_RUNS = 5000  # runs that a filter looks at
_CONDITION = re.compile(r"\s*([^<>=!~]+?)\s*(<=|>=|!=|=|<|>|~)\s*(.*?)\s*")
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "!=": operator.ne,
}
# Settings that say where a run goes or how it is executed: they decide nothing of what it computes.
_LOCATION_SETTINGS = re.compile(r"(output|name|tracking\..*|run\..*|.*\.launch\..*)")


class RunFilter:
    """A condition on runs: KEY OPERATOR VALUE, where KEY is a field, a setting, a metric or a tag."""

    FIELDS = ("run", "status", "started", "result", "seconds", "pipeline")

    def __init__(self, text: str) -> None:
        """Raises: SettingsError."""
        match = _CONDITION.fullmatch(text)
        if match is None or not match[3]:
            raise SettingsError(
                f"--where {text!r}: must be KEY OPERATOR VALUE, as in status=finished, "
                "'stages.policy.learning_rate<1e-3' or 'result~promoted'; operators: = != < <= > >= ~ (contains)"
            )
        self.text, self.key, self.operator, self.value = text, match[1], match[2], match[3]

    def matches_run(self, row: RunRow) -> bool:
        """False also where the run has no such value."""
        found = _find_value(row, self.key)
        if found is None:
            return False
        if self.operator == "~":
            return self.value.lower() in str(found).lower()
        numbers = _parse_number(found), _parse_number(self.value)
        if None not in numbers:
            return _OPERATORS[self.operator](*numbers)
        if self.operator in ("=", "!="):
            return _OPERATORS[self.operator](str(found).lower(), self.value.lower())
        return _OPERATORS[self.operator](str(found), self.value)


def _parse_number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _find_value(row: RunRow, key: str) -> Any:
    """Value of a field, a setting by its whole key or its end, a metric, or a tag; None = the run has none."""
    fields = {
        "run": row.name,
        "status": _describe_status(row),
        "started": _format_start_time(row),
        "result": _describe_result(row),
        "seconds": row.seconds,
        "pipeline": row.tags.get("pipeline"),
    }
    if key in fields:
        return fields[key]
    for place, values in (
        ("settings.", row.params),
        ("metrics.", row.metrics),
        ("tags.", row.tags),
    ):
        known: Mapping[str, Any] = values
        name = key.removeprefix(place)
        if name in known:
            return known[name]
    settings = _collect_settings(row)
    name = key.removeprefix("settings.")
    if name in settings:
        return settings[name]
    ends = [value for name, value in settings.items() if name.endswith(f".{key}")]
    return ends[0] if len(ends) == 1 else None


def _collect_settings(row: RunRow) -> dict[str, str]:
    """Settings of a run, flat: those that were set, and defaults for the rest."""
    stages = {_extract_stage(key) for key in row.params} | {""}
    return {
        key: value for key, stage, value in _list_default_settings() if stage in stages
    } | row.params


@functools.cache
def _list_default_settings() -> list[tuple[str, str, str]]:
    """(key, stage, value) of every default; stage "" = of no stage."""
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
    """Runs as lines of a table, the newest pipeline run first, its stages under it in their order.

    [] where the default store does not exist yet; nothing is created.
    Args:
        limit: pipeline runs (sweeps count as one, with their trials). where: conditions that all hold (`Filter`).
        settings: add a column of the settings in which the listed runs of one pipeline differ.
        gone: is asked where runs go on, as the store says, for the ids of those whose process is gone, with what was
            found: one that was killed is RUNNING there until the next run or `doctor --repair` says so.
    Raises: SettingsError for a condition that no run can be asked about.
    """
    found = _list_rows_in_order(output, uri, limit, where, find_crashed)
    told = (
        find_differing_settings([row for _, row in found if _is_pipeline_run(row)])
        if settings
        else {}
    )
    lines = []
    for depth, row in found:
        line = _format_row(row, "  " * depth)
        if settings:
            line = {
                **{key: line[key] for key in ("run", "status", "started", "took")},
                "settings": "",
                **line,
            }
            line["settings"] = _describe_settings(told.get(row.run_id, {}))
        lines.append(line)
    return lines


def list_run_records(
    output: Path,
    uri: str | None = None,
    limit: int = 50,
    where: Sequence[str] = (),
    *,
    find_crashed: Callable[[], Mapping[str, str]] = dict,
) -> list[dict[str, Any]]:
    """The same runs for programs: ids, times in seconds, settings, newest metrics and tags, in the same order."""
    rows = [row for _, row in _list_rows_in_order(output, uri, limit, where, find_crashed)]
    told = find_differing_settings([row for row in rows if _is_pipeline_run(row)])
    return [
        {
            "run_id": row.run_id,
            "parent_run_id": row.parent_run_id,
            "run": row.name,
            "status": _describe_status(row),
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(row.start_time)),
            "seconds": row.seconds,
            "result": row.tags.get("result", ""),
            "page": row.url,
            "differs": told.get(row.run_id, {}),
            "metrics": row.metrics,
            "tags": row.tags,
            "settings": _collect_settings(row) if _is_pipeline_run(row) else row.params,
        }
        for row in rows
    ]


def find_differing_settings(rows: Iterable[RunRow]) -> dict[str, dict[str, str]]:
    """By run id, the settings that are not the same in all these runs of its pipeline; places do not count."""
    by_pipeline: dict[str, list[RunRow]] = {}
    for row in rows:
        by_pipeline.setdefault(row.tags.get("pipeline", ""), []).append(row)
    found: dict[str, dict[str, str]] = {}
    for group in by_pipeline.values():
        keys = dict.fromkeys(
            key for row in group for key in row.params if not _LOCATION_SETTINGS.fullmatch(key)
        )
        settings = {row.run_id: _collect_settings(row) for row in group}
        differ = [key for key in keys if len({one.get(key) for one in settings.values()}) > 1]
        for row in group:
            found[row.run_id] = {key: settings[row.run_id].get(key, "-") for key in differ}
    return found


def _describe_settings(settings: Mapping[str, str]) -> str:
    """Settings in a few words: the last parts of their keys."""
    parts = [
        f"{key.rpartition('.')[2]}={value[:24]}" for key, value in settings.items() if value != "-"
    ]
    return ", ".join(parts[:_MAX_SHOWN_SETTINGS]) + (
        f" and {len(parts) - _MAX_SHOWN_SETTINGS} more" if len(parts) > _MAX_SHOWN_SETTINGS else ""
    )


def _is_pipeline_run(row: RunRow) -> bool:
    """True = a run of a pipeline with settings of its own, also a trial; not a stage's and not a sweep's."""
    return row.tags.get("kind") in ("pipeline", "trial", "stage") and "stage" not in row.tags


def _list_rows_in_order(
    output: Path,
    uri: str | None,
    limit: int,
    where: Sequence[str],
    find_crashed: Callable[[], Mapping[str, str]],
) -> list[tuple[int, RunRow]]:
    """(depth, run): the newest pipeline run first, each followed by what is nested in it, the oldest first."""
    filters = [RunFilter(text) for text in where]
    tracking = Tracking(uri, output)
    local = build_default_uri(tracking.output)
    if tracking.store.uri == local and not Path(local.removeprefix("sqlite:///")).exists():
        return []
    rows = tracking.list_runs(limit=_MAX_FILTERED_RUNS if filters else min(50_000, 20 * limit))
    dead = find_crashed() if any(row.status == "RUNNING" for row in rows) else {}
    rows = [_mark_killed(row, dead[row.run_id]) if row.run_id in dead else row for row in rows]
    _check_filter_keys(filters, rows)
    known = {row.run_id for row in rows}
    children: dict[str, list[RunRow]] = {}
    for row in reversed(rows):
        if row.parent_run_id in known:
            children.setdefault(str(row.parent_run_id), []).append(row)
    tops = [row for row in rows if not row.parent_run_id]
    if filters:
        tops = [
            row
            for row in rows
            if _is_pipeline_run(row) and all(one.matches_run(row) for one in filters)
        ]
    found: list[tuple[int, RunRow]] = []
    for row in tops[:limit]:
        found += _list_nested(row, children, 0)
    return found


def _mark_killed(row: RunRow, reason: str) -> RunRow:
    return dataclasses.replace(row, status="KILLED", tags={**row.tags, "interrupted": reason})


def _list_nested(
    row: RunRow, children: Mapping[str, list[RunRow]], depth: int
) -> list[tuple[int, RunRow]]:
    return [
        (depth, row),
        *(
            one
            for child in children.get(row.run_id, [])
            for one in _list_nested(child, children, depth + 1)
        ),
    ]


def _check_filter_keys(filters: Sequence[RunFilter], rows: Sequence[RunRow]) -> None:
    """Raises: SettingsError for a key that no run has."""
    wholes = [row for row in rows if _is_pipeline_run(row)]
    for one in filters:
        if (
            wholes
            and one.key not in RunFilter.FIELDS
            and all(_find_value(row, one.key) is None for row in wholes)
        ):
            names = {
                name
                for row in wholes
                for values in (_collect_settings(row), row.metrics, row.tags)
                for name in values
            }
            raise SettingsError(
                f"--where {one.text!r}: no run has '{one.key}'; {suggest_name(one.key, sorted(names))}"
            )


def find_run(rows: Sequence[RunRow], name: str) -> RunRow:
    """The run of that name, id (or its beginning), or the newest whole run of that pipeline. Raises: DataError."""
    wholes = [row for row in rows if _is_pipeline_run(row)]
    same = [row for row in wholes if name in (row.name, row.run_id)]
    same = same or [row for row in wholes if len(name) >= 6 and row.run_id.startswith(name)]
    same = same or [
        row
        for row in wholes
        if row.tags.get("pipeline") == name and row.tags.get("kind") == "pipeline"
    ]
    if not same:
        if part := next((row for row in rows if name in (row.name, row.run_id)), None):
            is_sweep = part.tags.get("kind") == "sweep"
            whole = (
                "a sweep; name its trials" if is_sweep else "a part of a run; name the whole run"
            )
            raise DataError(f"'{name}' is {whole} (posttrain runs)")
        names = sorted({row.name for row in wholes})
        raise DataError(
            f"no run '{name}'; {suggest_name(name, names) if names else 'there are none'} (posttrain runs)"
        )
    return same[0]


def list_stage_runs(rows: Sequence[RunRow], run: RunRow) -> list[RunRow]:
    """Stage runs that are nested in a run, the oldest first."""
    return [row for row in reversed(rows) if row.parent_run_id == run.run_id]


def _format_start_time(row: RunRow) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.start_time))


def _describe_status(row: RunRow) -> str:
    return describe_run_status(row.status, row.tags)


def _format_row(row: RunRow, indent: str) -> dict[str, str]:
    seconds = "" if row.seconds is None else f"{row.seconds:.0f} s"
    return {
        "run": indent + row.name,
        "status": _describe_status(row),
        "started": _format_start_time(row),
        "took": seconds,
        "result": _describe_result(row),
        "page": row.url,
    }


def _describe_result(row: RunRow) -> str:
    """Outcome of a run in a few words: its own `result` tag, the gate's decision, or its main figure."""
    # the first two are gone when a run goes on
    for tag in (
        "error",
        "interrupted",
        "result",
        "gate.decision",
    ):
        if row.tags.get(tag):
            text = " ".join(row.tags[tag].split())
            return text if len(text) <= 60 else text[:57] + "..."
    for name in ("eval/success_rate", "success_rate", "eval/accuracy", "eval/loss", "train/loss"):
        if name in row.metrics:
            return f"{name} {row.metrics[name]:.4g}"
    return ""
