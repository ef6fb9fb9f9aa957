"""Runs of a tracking store, read without MLflow: its import takes five times as long as everything else of a listing.

A sqlite file is read by SQL, a server by its REST interface. Stores that need more (other databases, accounts,
certificates, tables of another version) are left to MLflow's client.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from rl_core.errors import BackendError
from rl_core.json_client import RequestError, fetch_json

SQLITE_SECONDS = 10.0  # longest wait for another process that writes
SERVER_SECONDS = 10.0
PAGE_RUNS = 1000  # of one request
# With one of these MLflow's client authenticates or checks certificates in its own way.
_ACCOUNT_VARIABLES = (
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "MLFLOW_TRACKING_AUTH",
)


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """Active run of a tracking store."""

    run_id: str
    name: str  # "" = none
    status: str  # RUNNING, SCHEDULED, FINISHED, FAILED, KILLED
    start_ms: int
    end_ms: int | None
    experiment_id: str
    tags: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)  # newest value of each
    params: dict[str, str] = field(default_factory=dict)


def read_stored_runs(uri: str, limit: int) -> list[TrackedRun] | None:
    """Read the newest runs of all experiments, newest first; None = ask MLflow's client.

    Raises: BackendError if a database is locked or a server does not answer.
    """
    path = uri.removeprefix("sqlite:///")
    if path != uri:
        return _read_sqlite_runs(Path(path), limit) if "?" not in path else None
    is_plain = urlsplit(uri).scheme == "http" and "@" not in uri
    if not is_plain or any(os.environ.get(name) for name in _ACCOUNT_VARIABLES):
        return None
    try:
        return _fetch_server_runs(uri.rstrip("/"), limit)
    except RequestError as error:
        if error.status:
            return (
                None  # another version, or an account that is missing: MLflow's client says which
            )
        raise BackendError(
            f"{uri} could not list runs: {error.reason}; `posttrain status` shows a locked database"
        ) from error
    except (AttributeError, KeyError, TypeError, ValueError):
        return None  # not a response of MLflow, but of a login page or another service


def _read_sqlite_runs(path: Path, limit: int) -> list[TrackedRun] | None:
    if not path.is_file():
        return None
    address = f"file:{quote(str(path))}?mode=ro"
    newest = (
        "SELECT r.run_uuid AS run_uuid FROM runs r JOIN experiments e ON e.experiment_id = r.experiment_id "
        "WHERE r.lifecycle_stage = 'active' AND e.lifecycle_stage = 'active' "
        "ORDER BY r.start_time DESC, r.run_uuid LIMIT ?"
    )
    try:
        with contextlib.closing(
            sqlite3.connect(address, uri=True, timeout=SQLITE_SECONDS)
        ) as database:
            database.execute("BEGIN")  # all tables of one moment, while runs begin
            rows = database.execute(
                "SELECT run_uuid, name, status, start_time, end_time, experiment_id FROM runs "
                f"WHERE run_uuid IN ({newest}) ORDER BY start_time DESC, run_uuid",
                (limit,),
            ).fetchall()
            tags, metrics, params = (
                _group_values(
                    database.execute(
                        f"SELECT run_uuid, key, {value} FROM {table} WHERE run_uuid IN ({newest})",
                        (limit,),
                    )
                )
                for table, value in (
                    ("tags", "value"),
                    ("latest_metrics", "CASE WHEN is_nan THEN NULL ELSE value END"),
                    ("params", "value"),
                )
            )
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            raise BackendError(
                f"{path} is locked by another process; `posttrain status` names it"
            ) from error
        return None  # tables of another version
    except sqlite3.DatabaseError:
        return None
    return [
        TrackedRun(
            run_id=run_id,
            name=name or "",
            status=status,
            start_ms=start or 0,
            end_ms=end,
            experiment_id=str(experiment),
            tags=tags.get(run_id, {}),
            metrics={
                key: float("nan") if value is None else float(value)
                for key, value in metrics.get(run_id, {}).items()
            },
            params=params.get(run_id, {}),
        )
        for run_id, name, status, start, end, experiment in rows
    ]


def _group_values(rows: Iterable[tuple[str, str, Any]]) -> dict[str, dict[str, Any]]:
    """Group (run, key, value) by run."""
    values: dict[str, dict[str, Any]] = {}
    for run_id, key, value in rows:
        values.setdefault(run_id, {})[key] = value
    return values


def _fetch_server_runs(address: str, limit: int) -> list[TrackedRun]:
    """Fetch runs page by page. Raises: RequestError."""
    api = f"{address}/api/2.0/mlflow"
    experiments = fetch_json(
        f"{api}/experiments/search", {"max_results": 1000}, timeout_s=SERVER_SECONDS
    )
    request: dict[str, Any] = {
        "experiment_ids": [row["experiment_id"] for row in experiments.get("experiments", [])],
        "order_by": ["attributes.start_time DESC"],
    }
    runs: list[TrackedRun] = []
    while request["experiment_ids"] and len(runs) < limit:
        request["max_results"] = min(PAGE_RUNS, limit - len(runs))
        page = fetch_json(f"{api}/runs/search", request, timeout_s=SERVER_SECONDS)
        runs += [_parse_server_run(row) for row in page.get("runs", [])]
        request["page_token"] = page.get("next_page_token")
        if not request["page_token"]:
            break
    return runs


def _parse_server_run(row: dict[str, Any]) -> TrackedRun:
    info, data = row["info"], row.get("data", {})
    tags, params = (
        {item["key"]: item.get("value", "") for item in data.get(kind, [])}
        for kind in ("tags", "params")
    )
    return TrackedRun(
        run_id=info["run_id"],
        name=info.get("run_name", ""),
        status=info["status"],
        start_ms=int(info.get("start_time") or 0),
        end_ms=int(info["end_time"]) if info.get("end_time") else None,
        experiment_id=str(info["experiment_id"]),
        tags=tags,
        metrics={item["key"]: float(item["value"]) for item in data.get("metrics", [])},
        params=params,
    )
