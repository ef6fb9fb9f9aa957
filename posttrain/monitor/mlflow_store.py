"""MLflow's sqlite store as the live page reads it: without MLflow and without locks.

The database is opened as immutable, so that writers are never blocked. A read during a write may be inconsistent;
sqlite then raises, and the previous result stays until the next refresh.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

MAX_STORE_RUNS = 300  # pipeline runs, the newest
MAX_STORE_POINTS = 500_000  # metric values of one run


@dataclass
class MlflowRunRow:
    """One run of MLflow's store."""

    run_id: str
    name: str
    status: str  # RUNNING, FINISHED, FAILED, KILLED
    started: float  # seconds since the epoch
    ended: float | None
    parent: str | None
    experiment: str
    tags: dict[str, str] = field(default_factory=dict)


class MlflowStore:
    """MLflow's store of an output folder; empty if there is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file_version: tuple[int, float] | None = None
        self._runs: list[MlflowRunRow] = []

    @contextmanager
    def _open_connection(self) -> Iterator[sqlite3.Connection]:
        uri = f"file:{quote(str(self.path))}?mode=ro&immutable=1"
        with closing(sqlite3.connect(uri, uri=True, timeout=0.1)) as connection:
            yield connection

    def list_runs(self) -> list[MlflowRunRow]:
        """List the latest pipeline runs and their stages, newest first; read again only if the file has changed."""
        try:
            status = self.path.stat()
            file_version = (status.st_size, status.st_mtime)
            if file_version != self._file_version:
                with self._open_connection() as connection:
                    self._runs = _query_runs(connection)
                self._file_version = file_version
        except FileNotFoundError:
            self._runs, self._file_version = [], None
        except (OSError, sqlite3.Error):
            pass  # being written: keep the previous result
        return self._runs

    def read_metrics(self, run_id: str) -> list[dict[str, Any]]:
        """Read rows in the format of metrics.jsonl; [] if they cannot be read now."""
        query = (
            "SELECT key, value, timestamp, step FROM metrics WHERE run_uuid = ? AND is_nan = 0 "
            "ORDER BY timestamp, step LIMIT ?"
        )
        try:
            with self._open_connection() as connection:
                rows = connection.execute(query, (run_id, MAX_STORE_POINTS)).fetchall()
        except (OSError, sqlite3.Error):
            return []
        return [
            {"step": step, "time": time_ms, "metrics": {name: value}}
            for name, value, time_ms, step in rows
        ]


def _query_runs(connection: sqlite3.Connection) -> list[MlflowRunRow]:
    rows = connection.execute(
        "SELECT r.run_uuid, r.name, r.status, r.start_time, r.end_time, e.name FROM runs r "
        "JOIN experiments e ON e.experiment_id = r.experiment_id "
        "WHERE r.lifecycle_stage = 'active' AND e.lifecycle_stage = 'active' "
        "ORDER BY r.start_time DESC LIMIT ?",
        (20 * MAX_STORE_RUNS,),
    ).fetchall()
    tags: dict[str, dict[str, str]] = {}
    tag_names = (
        "('mlflow.parentRunId', 'pipeline', 'stage', 'stage_key', 'result', 'error', 'interrupted', 'approval', "
        "'curriculum.moves', 'online.service', 'service.run')"
    )
    for run_id, key, value in connection.execute(
        f"SELECT run_uuid, key, value FROM tags WHERE key IN {tag_names} OR key LIKE 'cached.%'"
    ):
        tags.setdefault(run_id, {})[key] = value
    return [
        MlflowRunRow(
            run_id=run_id,
            name=name or run_id,
            status=status,
            started=(started or 0) / 1000,
            ended=ended / 1000 if ended else None,
            parent=tags.get(run_id, {}).get("mlflow.parentRunId"),
            experiment=experiment,
            tags=tags.get(run_id, {}),
        )
        for run_id, name, status, started, ended, experiment in rows
    ]
