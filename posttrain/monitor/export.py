"""Export of a run: all metrics as CSV at full resolution, stages as CSV, summary as JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.monitor.runs import RunView, StageView
from posttrain.monitor.tail import JsonLinesTail
from rl_core.errors import CheckpointError, DataError
from rl_core.storage.atomic_files import make_folder, replace_file, write_text_atomic

METRIC_COLUMNS = ("run", "stage", "metric", "step", "time", "value")


def format_metrics_csv(run: RunView) -> Iterator[str]:
    """Format all values of the run's journals, one per line, in blocks; `time` in seconds since the epoch.

    A stage without a journal yields the points in memory, which may be downsampled.
    """
    yield _format_csv_lines([METRIC_COLUMNS])
    for stage in run.stages:
        if stage.journal is None:
            yield _format_csv_lines(_list_stored_points(run, stage))
            continue
        tail, offset = JsonLinesTail(stage.journal.tail.path), -1
        while tail.offset > offset:  # not "while there are rows": a block may have no valid row
            offset = tail.offset
            yield _format_csv_lines(_list_values(run, stage, tail.read_rows(1 << 20)))


def _list_values(
    run: RunView, stage: StageView, rows: list[dict[str, Any]]
) -> Iterator[tuple[Any, ...]]:
    for row in rows:
        metrics = row.get("metrics")
        if not isinstance(metrics, dict):
            continue
        step, seconds = row.get("step"), _convert_to_seconds(row.get("time"))
        for name, value in metrics.items():
            yield run.id, stage.label, name, step, seconds, value


def _list_stored_points(run: RunView, stage: StageView) -> Iterator[tuple[Any, ...]]:
    for name, series in stage.table.series.items():
        steps, times, values = (column.tolist() for column in series.read_arrays())
        for step, time_s, value in zip(steps, times, values, strict=True):
            yield run.id, stage.label, name, int(step), time_s, value


def _convert_to_seconds(milliseconds: object) -> float | None:
    return milliseconds / 1000 if isinstance(milliseconds, int | float) else None


def _format_csv_lines(rows: Any) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _collect_stage_facts(stage: StageView) -> dict[str, Any]:
    """Collect the columns of a stage that both files share."""
    return {
        "stage": stage.label,
        "status": stage.status,
        "started": stage.started or None,
        "ended": stage.ended or None,
        "done": stage.done,
        "total": stage.total,
        "seconds_left": stage.seconds_left,
        "result": stage.result,
    }


def format_stages_csv(run: RunView) -> str:
    """Format the stages as CSV."""
    rows = [(run.id, *_collect_stage_facts(stage).values()) for stage in run.stages]
    return _format_csv_lines([("run", *_collect_stage_facts(StageView("", ""))), *rows])


def format_run_json(run: RunView) -> str:
    """Format a summary as JSON: stages, settings, curriculum moves, each metric's last value and mean."""
    stages = []
    for stage in run.stages:
        metrics = {
            name: {
                "last": series.last,
                "step": series.last_step,
                "mean_10": series.compute_mean(10),
                "count": series.count,
            }
            for name, series in sorted(stage.table.series.items())
        }
        facts = _collect_stage_facts(stage)
        stages.append(facts | {"curriculum": stage.curriculum, "metrics": metrics})
    values = {
        "run": run.id,
        "mlflow_run_id": run.run_id,
        "status": run.status,
        "why": run.status_reason,
        "started": run.started or None,
        "ended": run.ended or None,
        "result": run.result,
        "settings": run.config,
        "stages": stages,
    }
    return json.dumps(values, indent=2) + "\n"


def export_run(run: RunView, folder: Path) -> list[Path]:
    """Write metrics.csv, stages.csv and run.json into a folder; create it if needed. Raises: DataError on failure."""
    try:
        make_folder(folder)
        paths = [folder / name for name in ("metrics.csv", "stages.csv", "run.json")]
        with replace_file(paths[0]) as file:
            for block in format_metrics_csv(run):
                file.write(block)
        write_text_atomic(paths[1], format_stages_csv(run))
        write_text_atomic(paths[2], format_run_json(run))
    except CheckpointError as error:
        raise DataError(f"--export: {error}") from error
    return paths
