"""Comparison of two runs of one pipeline, file by file, in the order of the stages.

Ignored are timings, run names, logs, and files for live viewers (recent rollouts), of which a resumed run has fewer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rl_core.storage.append_log import read_records
from tasks import stage_registry
from tasks.pipeline.stage_result import (
    FAILED_EPISODES,
    METRICS_HISTORY,
    METRICS_HISTORY_LINES,
    RECENT_ROLLOUTS,
    REVIEW_FILE,
    STAGE_LOG,
)

# Digests of all files; the newest values of metrics.jsonl; a report with the seconds of the stages.
_IGNORED_FILES = (
    "manifest.json",
    METRICS_HISTORY,
    METRICS_HISTORY_LINES,
    RECENT_ROLLOUTS,
    REVIEW_FILE,
    STAGE_LOG,
)
_IGNORED_FIELDS = ("run_id", "seconds", "tokens_per_second")  # of a summary; differ from run to run
_TIMING_PREFIXES = ("perf/", "system/")  # of metrics


@dataclass(frozen=True)
class StageFolderPair:
    """Folders of one stage in both runs; None = missing in that run."""

    stage: str
    one: Path | None
    other: Path | None

    @property
    def folders(self) -> tuple[Path, Path]:
        """Both folders of a complete pair."""
        assert self.one is not None and self.other is not None
        return self.one, self.other


@dataclass(frozen=True)
class FileDifference:
    """File that differs, or is missing in one of the runs."""

    pair: StageFolderPair
    file: str  # within the stage's folder; "" = the whole folder
    problem: str


@dataclass(frozen=True)
class RunComparison:
    """Result of the comparison."""

    stages: list[str]  # compared, in order
    files: int
    bytes: int
    points: int  # values in the metric journals
    differences: list[FileDifference]  # in the order of stages


def is_timing_metric(metric: str) -> bool:
    """Return whether a metric differs from run to run."""
    return metric.startswith(_TIMING_PREFIXES) or metric.rpartition("/")[2] in _IGNORED_FIELDS


def read_metric_rows(journal: Path) -> list[tuple[int, dict[str, Any]]]:
    """Read (step, metrics) of each line of a metrics.jsonl, without timings."""
    rows = []
    for record in read_records(journal):
        metrics = {
            name: value
            for name, value in record.get("metrics", {}).items()
            if not is_timing_metric(name)
        }
        if metrics:
            rows.append((int(record["step"]), metrics))
    return rows


def compare_run_folders(one: Path, other: Path) -> RunComparison:
    """Compare the finished stages in two pipeline folders (`<output>/<pipeline>`)."""
    files = size = points = 0
    stages: list[str] = []
    differences: list[FileDifference] = []
    for pair in _pair_stage_folders(one, other):
        stages.append(pair.stage)
        if pair.one is None or pair.other is None:
            owner = "uninterrupted" if pair.other is None else "interrupted"
            differences.append(FileDifference(pair, "", f"only the {owner} run has it"))
            continue
        for name in sorted(_list_compared_files(pair.one) | _list_compared_files(pair.other)):
            paths = pair.one / name, pair.other / name
            if not all(path.is_file() for path in paths):
                owner = "uninterrupted" if paths[0].is_file() else "interrupted"
                differences.append(FileDifference(pair, name, f"only the {owner} run has it"))
                continue
            files += 1
            size += paths[0].stat().st_size
            if name == "metrics.jsonl":
                points += sum(len(row) for _, row in read_metric_rows(paths[0]))
            problem = _compare_files(name, *paths)
            if problem:
                differences.append(FileDifference(pair, name, problem))
    return RunComparison(list(dict.fromkeys(stages)), files, size, points, differences)


def _pair_stage_folders(one: Path, other: Path) -> Iterator[StageFolderPair]:
    for stage in stage_registry.list_stage_names():
        first = _list_finished_folders(one / "stages" / stage)
        second = _list_finished_folders(other / "stages" / stage)
        for key in first:
            if key in second:
                yield StageFolderPair(stage, first[key], second[key])
        # The keys of the others differ, because earlier stages gave different results.
        unpaired = zip_longest(
            [folder for key, folder in first.items() if key not in second],
            [folder for key, folder in second.items() if key not in first],
        )
        for first_folder, second_folder in unpaired:
            yield StageFolderPair(stage, first_folder, second_folder)


def _list_finished_folders(stage: Path) -> dict[str, Path]:
    """Return the finished folders of a stage by key, in the order in which they finished."""
    folders = [path.parent for path in stage.glob("*/manifest.json") if "." not in path.parent.name]
    return {path.name: path for path in sorted(folders, key=lambda path: path.stat().st_mtime)}


def _list_compared_files(folder: Path) -> set[str]:
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return names - set(_IGNORED_FILES)


def _compare_files(name: str, one: Path, other: Path) -> str:
    """Describe the difference of two files; "" = equal."""
    if name == "metrics.jsonl":
        return "" if _merge_metric_rows(one) == _merge_metric_rows(other) else "other values"
    if name == "summary.json":
        summaries = [_remove_timings(json.loads(path.read_text())) for path in (one, other)]
        return _describe_first_difference(*summaries)
    if name == FAILED_EPISODES:
        is_same = _read_failed_episodes(one) == _read_failed_episodes(other)
        return "" if is_same else "other episodes failed"
    return "" if one.read_bytes() == other.read_bytes() else "other bytes"


def _merge_metric_rows(journal: Path) -> dict[tuple[int, str], Any]:
    """Return values by step and name, because a kill may fall between the lines of one step."""
    return {
        (step, name): value
        for step, row in read_metric_rows(journal)
        for name, value in row.items()
    }


def _read_failed_episodes(path: Path) -> list[tuple[Any, Any]]:
    return [(record.get("episode"), record.get("error")) for record in read_records(path)]


def _remove_timings(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _remove_timings(item)
            for name, item in value.items()
            if name not in (*_IGNORED_FIELDS, "key") and not is_timing_metric(name)
        }
    if isinstance(value, list):
        return [_remove_timings(item) for item in value]
    return value


def _describe_first_difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    for name in sorted(one.keys() | other.keys()):
        if one.get(name) != other.get(name):
            return f"{name}: {str(one.get(name))[:120]!r} and {str(other.get(name))[:120]!r}"
    return ""
