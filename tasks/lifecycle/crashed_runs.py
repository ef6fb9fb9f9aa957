"""Crash detection: find runs whose process died, deliver their journals, and mark them as killed.

A running process holds a lock on its journal (`LineLog`). An unfinished journal that nobody locks belongs to a crashed
process, even if its pid has been reused.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import logging
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.errors import BackendError, FolderBusy
from rl_core.storage.faults import inject_fault
from tasks.run_status import STALE_STOP_TAGS, describe_run_status
from tasks.tracking import Tracking
from tasks.tracking.journal import (
    DeliveryCursor,
    LineLog,
    build_events_path,
    build_metrics_path,
    read_lines,
    read_recorded_seconds,
)
from tasks.tracking.replay import list_journals

logger = logging.getLogger(__name__)

_COMPLETED_STATUSES = ("finished", "waiting", "postponed")  # of a run whose stages have finished


@dataclass(frozen=True)
class CrashedRun:
    """Run whose process died before the run finished."""

    name: str  # as listed by `posttrain runs`
    journal_folder: Path
    mlflow_run_id: str  # "" = MLflow never assigned one
    flow_run_id: str  # of Prefect
    is_pipeline: bool  # False = one stage of a pipeline
    host: str
    pid: int
    is_remote: bool = False  # ran on another machine; only that machine can check the lock
    num_undelivered: int = 0  # records that the store has not accepted yet

    @property
    def description(self) -> str:
        """One sentence for the user."""
        kind = "run" if self.is_pipeline else "stage run"
        if self.is_remote:
            return f"{kind} '{self.name}' has not finished; only {self.host}, where it ran, can check it"
        process = f"process {self.pid}" if self.pid else "its process"
        return f"{kind} '{self.name}' crashed: {process} no longer exists"


def find_crashed_runs(root: Path) -> list[CrashedRun]:
    """List unfinished runs under `root` without a living process, outer runs first. Change nothing."""
    candidates = [_read_crashed_run(folder) for folder in list_journals(root)]
    return [run for run in candidates if run is not None]


def close_crashed_runs(tracking: Tracking, root: Path) -> list[CrashedRun]:
    """Find crashed runs under `root`, deliver their journals and mark them as killed.

    Returns: the runs, including those of other machines, which stay unchanged.
    """
    closed = [
        run if run.is_remote else _mark_killed(tracking, run) for run in find_crashed_runs(root)
    ]
    return [run for run in closed if run is not None]


def _is_locked(path: Path) -> bool:
    """Return whether a living process locks the file; True if that cannot be determined."""
    # A read-only file of another user can be locked as well.
    is_writable = os.access(path, os.W_OK)
    try:
        descriptor = os.open(path, os.O_RDWR if is_writable else os.O_RDONLY)
    except (FileNotFoundError, PermissionError):  # just removed, or not readable for this user
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)  # releases the lock
    return False


def _read_crashed_run(folder: Path) -> CrashedRun | None:
    """Read the run of a journal if its process died; None if the run finished or is alive."""
    if _is_locked(build_events_path(folder)):
        return None
    name, is_open = "", False
    tags: dict[str, str] = {}
    last_start: dict[str, Any] = {}
    parent = ""
    for event, _ in read_lines(build_events_path(folder)):
        op = event.get("op")
        if op in ("start", "resume"):
            is_open, last_start = True, event
            name = event.get("name", name)
            parent = str(event.get("parent_folder") or event.get("parent_run_id") or parent)
        elif op == "end":
            is_open = False
        elif op == "tags":
            tags |= _parse_json_object(event.get("tags"))
    if not is_open:
        return None
    host = str(last_start.get("host", ""))
    return CrashedRun(
        name=name,
        journal_folder=folder,
        mlflow_run_id=DeliveryCursor.load(folder).run_id or "",
        flow_run_id=str(tags.get("prefect.flow_run_id", "")),
        is_pipeline=not parent,
        host=host,
        pid=int(last_start.get("pid") or 0),
        is_remote=bool(host) and host != platform.node(),
    )


def _mark_killed(tracking: Tracking, run: CrashedRun) -> CrashedRun | None:
    """End the journal at the time of its last record, and deliver it. Return None if the run was resumed meanwhile."""
    events_path = build_events_path(run.journal_folder)
    try:
        events = LineLog(events_path)
    except FolderBusy:
        return None
    try:
        paths = (events_path, build_metrics_path(run.journal_folder))
        last_ms = int(max(path.stat().st_mtime for path in paths if path.exists()) * 1000)
        tags = {"interrupted": run.description}
        events.append_record({"op": "tags", "time": last_ms, "tags": tags})
        end: dict[str, Any] = {"op": "end", "time": last_ms, "status": "KILLED"}
        seconds = read_recorded_seconds(run.journal_folder)
        if seconds:
            end["seconds"] = seconds
        events.append_record(end)
        inject_fault("dead.noted")
    finally:
        events.close()
    logger.info("%s; marked as killed", run.description)
    try:
        num_undelivered = tracking.deliver_journal(run.journal_folder)
    except (BackendError, FolderBusy) as error:
        logger.warning("%s cannot be delivered yet: %s", run.journal_folder, error)
        num_undelivered = 1
    return dataclasses.replace(run, num_undelivered=num_undelivered)


@dataclass(frozen=True)
class PipelineRunRecord:
    """Pipeline run as recorded in the output folder."""

    pipeline: str
    started: str
    name: str
    run_id: str
    status: str  # running, waiting, postponed, finished, failed, stopped, killed
    folder: Path
    settings: dict[str, Any] | None  # None = they were not recorded
    only: str | None
    evaluated_models: dict[str, str]
    code_version: str
    host: str
    key: str = ""  # made when the run began; the short id consists of its first digits


def list_recorded_runs(output: Path) -> list[PipelineRunRecord]:
    """List all pipeline runs of an output folder, newest first."""
    journals = output.glob("*/runs/*/.tracking/events.jsonl")
    records = [read_run_record(path.parent.parent) for path in journals]
    known = [record for record in records if record is not None]
    return sorted(known, key=lambda record: record.started, reverse=True)


def list_recorded_sweeps(home: Path) -> list[PipelineRunRecord]:
    """List the sweeps of a pipeline's folder. Their trials are in `trials/*/runs/*` of each."""
    journals = home.glob("sweeps/*/.tracking/events.jsonl")
    records = [read_run_record(path.parent.parent) for path in journals]
    return [
        dataclasses.replace(record, started=record.started.removeprefix("sweep "))
        for record in records
        if record is not None
    ]


def read_run_record(folder: Path) -> PipelineRunRecord | None:
    """Read the run of a journal's folder; None if it holds none."""
    name, status, settings, host, key = "", "", None, "", ""
    tags: dict[str, str] = {}
    for event, _ in read_lines(build_events_path(folder)):
        op = event.get("op")
        if op in ("start", "resume"):
            name, status, host = str(event.get("name", name)), "running", str(event.get("host", ""))
            key = str(event.get("key", key))
            tags = {key: text for key, text in tags.items() if key not in STALE_STOP_TAGS}
        elif op == "end":
            status = describe_run_status(str(event.get("status")), tags)
        elif op == "tags":
            tags |= _parse_json_object(event.get("tags"))
        elif op == "text" and event.get("name") == "config.json":
            settings = _parse_json_object(event.get("text")) or None
    if not name:
        return None
    run_json = _read_json_object(folder / "run.json")
    if status == "running":
        crashed = _read_crashed_run(folder)
        status = "killed" if crashed is not None and not crashed.is_remote else "running"
    elif status in _COMPLETED_STATUSES and run_json.get("status") in _COMPLETED_STATUSES:
        # After an approval was answered the journal still says "waiting", but run.json has the answer.
        status = run_json["status"]
    return PipelineRunRecord(
        pipeline=folder.parent.parent.name,
        started=name.partition(" · ")[2],
        name=name,
        run_id=DeliveryCursor.load(folder).run_id or "",
        status=status,
        folder=folder,
        settings=settings,
        only=run_json.get("only"),
        evaluated_models=_parse_json_object(run_json.get("given")),
        code_version=tags.get("code_version", ""),
        host=host,
        key=key,
    )


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        return _parse_json_object(path.read_text()) if path.is_file() else {}
    except (OSError, ValueError):
        return {}


def _parse_json_object(value: Any) -> dict[str, Any]:
    """Parse an object or its JSON text; {} for anything else, because other programs may have written the file."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}
