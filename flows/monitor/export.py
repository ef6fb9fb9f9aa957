"""Export of a run: all metrics as CSV at full resolution, stages as CSV, summary as JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flows.monitor.runs import RunView, StageView
from flows.monitor.tail import Tail
from rl_core.errors import CheckpointError, DataError
from rl_core.storage.single_files import make_folder, replacing, write_text_atomic

__all__ = ["export_run", "metrics_csv", "run_json", "stages_csv"]

METRIC_COLUMNS = ("run", "stage", "metric", "step", "time", "value")


def metrics_csv(run: RunView) -> Iterator[str]:
    """All values of the run's journals, one per line, in blocks; `time` in seconds since the epoch.

    A stage without a journal yields the points in memory, which may be downsampled.
    """
    yield _lines([METRIC_COLUMNS])
    for stage in run.stages:
        if stage.journal is None:
            yield _lines(_kept(run, stage))
            continue
        tail, offset = Tail(stage.journal.tail.path), -1
        while tail.offset > offset:  # not "while there are rows": a block may hold no valid row
            offset = tail.offset
            rows = tail.read(1 << 20)
            yield _lines(
                (run.id, stage.label, name, row.get("step"), _seconds(row.get("time")), value)
                for row in rows
                if isinstance(row.get("metrics"), dict)
                for name, value in row["metrics"].items()
            )


def _kept(run: RunView, stage: StageView) -> Iterator[tuple[Any, ...]]:
    for name, series in stage.table.series.items():
        for step, when, value in zip(*(part.tolist() for part in series.arrays()), strict=True):
            yield run.id, stage.label, name, int(step), when, value


def _seconds(milliseconds: object) -> float | None:
    return milliseconds / 1000 if isinstance(milliseconds, int | float) else None


def _lines(rows: Any) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _facts(stage: StageView) -> dict[str, Any]:
    """Columns of a stage shared by both files."""
    return {
        "stage": stage.label,
        "status": stage.status,
        "started": stage.started or None,
        "ended": stage.ended or None,
        "done": stage.done,
        "total": stage.total,
        "seconds_left": stage.seconds_left,
        "result": stage.note,
    }


def stages_csv(run: RunView) -> str:
    """Stages as CSV."""
    rows = [(run.id, *_facts(stage).values()) for stage in run.stages]
    return _lines([("run", *_facts(StageView("", ""))), *rows])


def run_json(run: RunView) -> str:
    """Summary: stages, settings, curriculum moves, each metric's last value and mean."""
    stages = [
        _facts(stage)
        | {
            "curriculum": stage.curriculum,
            "metrics": {
                name: {"last": series.last, "step": series.last_step, "mean_10": series.mean(10), "count": series.count}
                for name, series in sorted(stage.table.series.items())
            },
        }
        for stage in run.stages
    ]
    values = {
        "run": run.id,
        "mlflow_run_id": run.run_id,
        "status": run.status,
        "why": run.why,
        "started": run.started or None,
        "ended": run.ended or None,
        "result": run.result,
        "settings": run.config,
        "stages": stages,
    }
    return json.dumps(values, indent=2) + "\n"


def export_run(run: RunView, folder: Path) -> list[Path]:
    """Write metrics.csv, stages.csv and run.json into a folder, created if absent. Raises: DataError on failure."""
    try:
        make_folder(folder)
        paths = [folder / name for name in ("metrics.csv", "stages.csv", "run.json")]
        with replacing(paths[0]) as file:
            for block in metrics_csv(run):
                file.write(block)
        write_text_atomic(paths[1], stages_csv(run))
        write_text_atomic(paths[2], run_json(run))
    except CheckpointError as error:
        raise DataError(f"--export: {error}") from error
    return paths
