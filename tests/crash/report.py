"""Figures of a crash test: a table for the terminal, JSON for programs, Markdown for the documents."""

from __future__ import annotations

import collections
import json
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from crash.content import MAY_DIFFER
from rl_core.storage.faults import FAULT_POINT_GROUPS, FAULT_POINTS

__all__ = ["figures", "markdown", "read", "table"]

Row = Mapping[str, Any]


def read(path: Path) -> list[dict[str, Any]]:
    """Read the trials recorded so far; a torn last line is skipped."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def points_of(row: Row) -> list[str]:
    """List the points at which a trial was killed; [] if it was killed at random times."""
    return [
        kill["fault"].partition(":")[0] for kill in row["kills"][: row["killed"]] if kill["fault"]
    ]


def figures(rows: Iterable[Row], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Compute numbers of trials, kills and failures, and times.

    Args:
        facts: of the undisturbed runs: hits by kind and point, seconds by kind.
    """
    rows = list(rows)
    at_points = [row for row in rows if row["kills"] and row["kills"][0]["fault"]]
    randomly = [row for row in rows if row["kills"] and row["kills"][0]["after"] is not None]
    kills = sum(row["killed"] for row in rows)
    lost_seconds = [
        row["seconds"] - facts["seconds"][row["kind"]]
        for row in rows
        if row["killed"] == 1 and not row["fresh"]
    ]
    resumed = [row["back"] for row in rows if row["back"] is not None]
    return {
        "trials": len(rows),
        "kills": kills,
        "failures": sum(bool(row["failures"]) for row in rows),
        "points": {
            "points": len({point for row in at_points for point in points_of(row)}),
            "kinds": len({row["kind"] for row in at_points}),
            "kills": sum(row["killed"] for row in at_points),
            "failures": sum(bool(row["failures"]) for row in at_points),
        },
        "random": {
            "trials": len(randomly),
            "kills": sum(row["killed"] for row in randomly),
            "failures": sum(bool(row["failures"]) for row in randomly),
        },
        "fresh processes": sum(row["fresh"] for row in rows),
        "seconds": {
            "undisturbed": facts["seconds"],
            "median lost by one kill": _compute_median(lost_seconds),
            "median until the open stage continues": _compute_median(
                [seconds for seconds, row in _select_resumed(rows) if not row["fresh"]]
            ),
            "the same in a fresh process": _compute_median(
                [seconds for seconds, row in _select_resumed(rows) if row["fresh"]]
            ),
            "restarts timed": len(resumed),
        },
        "hits": facts["hits"],
    }


def _select_resumed(rows: Iterable[Row]) -> list[tuple[float, Row]]:
    return [(row["back"], row) for row in rows if row["back"] is not None]


def _compute_median(values: list[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None


def by_group(rows: Iterable[Row]) -> list[tuple[str, int, int]]:
    """List (group of points, points, kills)."""
    kills = collections.Counter(point for row in rows for point in points_of(row))
    groups = []
    for heading, points in FAULT_POINT_GROUPS.items():
        names = [point.name for point in points if kills[point.name]]
        groups.append((heading, len(names), sum(kills[name] for name in names)))
    return groups


def table(rows: Iterable[Row], facts: Mapping[str, Any]) -> str:
    """Format the summary for the terminal."""
    rows = list(rows)
    totals = figures(rows, facts)
    lines = [f"{'':42}{'points':>8}{'kills':>8}"]
    lines += [f"{heading:42}{points:8}{kills:8}" for heading, points, kills in by_group(rows)]
    lines.append(f"{'at random times':42}{'':8}{totals['random']['kills']:8}")
    lines.append(f"{'all':42}{totals['points']['points']:8}{totals['kills']:8}")
    lines.append(f"{totals['trials']} runs, {totals['failures']} failures")
    failed = [row for row in rows if row["failures"]]
    lines += [
        f"FAILED {row['name']}\n    " + "\n    ".join(row["failures"][:6]) for row in failed[:40]
    ]
    return "\n".join(lines)


def markdown(rows: Iterable[Row], facts: Mapping[str, Any]) -> str:
    """Format the sections for docs/reliability.md."""
    rows = list(rows)
    totals = figures(rows, facts)
    times = totals["seconds"]
    undisturbed_seconds = times["undisturbed"].get("prepared") or next(
        iter(times["undisturbed"].values())
    )
    lines = [
        f"{totals['kills']} kills in {totals['trials']} runs, {totals['failures']} failures. "
        f"At fault points: {totals['points']['kills']} kills at {totals['points']['points']} points "
        f"in {totals['points']['kinds']} kinds of runs, one after the other in the same run. "
        f"At random times: {totals['random']['kills']} kills in {totals['random']['trials']} runs. "
        f"{totals['fresh processes']} of the runs in fresh processes, the others "
        "forked from a warm one.",
        "",
        "| at | points | kills |",
        "|---|---|---|",
    ]
    lines += [
        f"| {heading} | {points} | {kills} |" for heading, points, kills in by_group(rows) if kills
    ]
    lines += [
        f"| random times | | {totals['random']['kills']} |",
        "",
        "What may differ from the undisturbed run, and nothing else:",
        "",
        *(f"- {name}: {description}" for name, description in MAY_DIFFER.items()),
        "",
        "| recovery | seconds |",
        "|---|---|",
        f"| the undisturbed run | {undisturbed_seconds:.2f} |",
        f"| until the open stage continues, median of {times['restarts timed']} restarts | "
        f"{_format_seconds(times['median until the open stage continues'])} |",
        f"| the same in a fresh process, imports included | {_format_seconds(times['the same in a fresh process'])} |",
        f"| lost by one kill in all, median | {_format_seconds(times['median lost by one kill'])} |",
    ]
    return "\n".join(lines) + "\n"


def _format_seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.2f}"


def unreached(hits: Mapping[str, Mapping[str, int]], kinds: Iterable[str]) -> list[str]:
    """List points that these kinds of runs should reach according to the table, but did not."""
    reached = {point for counts in hits.values() for point in counts}
    return [
        point.name
        for point in FAULT_POINTS.values()
        if point.run in kinds and point.name not in reached
    ]
