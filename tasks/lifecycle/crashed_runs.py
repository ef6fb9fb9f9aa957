"""Dead runs, killed before they could end: detected by their released lock, delivered, and marked as killed.

A journal is locked by the process that writes it, for as long as that lives (`LineLog`). One that has no end and that
nobody holds belongs to a process that is gone, whichever process has its number now.
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


@dataclass(frozen=True)
class CrashedRun:
    """A run whose process is gone, as it was found."""

    name: str  # as `posttrain runs` shows it
    journal_folder: Path  # of its journal
    mlflow_run_id: str  # MLflow's; "" = it never got one
    flow_run_id: str  # Prefect's
    is_pipeline: bool  # else one stage of one
    host: str
    pid: int
    is_remote: bool = False  # it ran on another machine, where alone it can be judged
    num_undelivered: int = 0  # records that the store did not take yet

    @property
    def description(self) -> str:
        """The finding as a sentence."""
        what = "run" if self.is_pipeline else "stage run"
        if self.is_remote:
            return f"{what} '{self.name}' has no end; it ran on {self.host}, where alone it can be judged"
        who = f"process {self.pid}" if self.pid else "its process"
        return f"{what} '{self.name}' was killed without a word: {who} is gone"


def find_crashed_runs(root: Path) -> list[CrashedRun]:
    """Runs under `root` that have no end and no living process, outer ones first; nothing is changed."""
    return [
        gone for folder in list_journals(root) if (gone := _read_crashed_run(folder)) is not None
    ]


def close_crashed_runs(tracking: Tracking, root: Path) -> list[CrashedRun]:
    """Find dead runs under `root`; deliver what they recorded and mark them as killed.

    Returns: those found, also those that ran on another machine and were therefore left as they are.
    """
    marked = (
        gone if gone.is_remote else _mark_killed(tracking, gone) for gone in find_crashed_runs(root)
    )
    return [gone for gone in marked if gone is not None]


def _is_locked(path: Path) -> bool:
    """True = a living process holds the lock of a journal's file, or none can be told from here."""
    # else it is somebody else's, which can be locked all the same
    writable = os.access(path, os.W_OK)
    try:
        descriptor = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
    except (FileNotFoundError, PermissionError):  # removed just now, or another user's alone
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)  # lets go of the lock
    return False


def _read_crashed_run(folder: Path) -> CrashedRun | None:
    """The run of a journal, if its process is gone; None where it ended, or lives."""
    if _is_locked(build_events_path(folder)):
        return None
    name, open_since = "", False
    tags: dict[str, str] = {}
    process: dict[str, Any] = {}
    parent = ""
    for event, _ in read_lines(build_events_path(folder)):
        op = event.get("op")
        if op in ("start", "resume"):
            open_since, process = True, event
            name = event.get("name", name)
            parent = str(event.get("parent_folder") or event.get("parent_run_id") or parent)
        elif op == "end":
            open_since = False
        elif op == "tags":
            tags |= _parse_json_object(event.get("tags"))
    if not open_since:
        return None
    host = str(process.get("host", ""))
    return CrashedRun(
        name=name,
        journal_folder=folder,
        mlflow_run_id=DeliveryCursor.load(folder).run_id or "",
        flow_run_id=str(tags.get("prefect.flow_run_id", "")),
        is_pipeline=not parent,
        host=host,
        pid=int(process.get("pid") or 0),
        is_remote=bool(host) and host != platform.node(),
    )


def _mark_killed(tracking: Tracking, gone: CrashedRun) -> CrashedRun | None:
    """End the journal where the process ended, and deliver it. None where somebody took it up meanwhile."""
    try:
        events = LineLog(build_events_path(gone.journal_folder))
    except FolderBusy:
        return None
    try:
        paths = (build_events_path(gone.journal_folder), build_metrics_path(gone.journal_folder))
        last = int(max(path.stat().st_mtime for path in paths if path.exists()) * 1000)
        events.append_record(
            {"op": "tags", "time": last, "tags": {"interrupted": gone.description}}
        )
        spent = read_recorded_seconds(gone.journal_folder)
        events.append_record(
            {"op": "end", "time": last, "status": "KILLED", **({"seconds": spent} if spent else {})}
        )
        inject_fault("dead.noted")
    finally:
        events.close()
    logger.info("%s; marked as killed", gone.description)
    try:
        waiting = tracking.deliver_journal(gone.journal_folder)
    except (BackendError, FolderBusy) as error:
        logger.warning("%s cannot be delivered yet: %s", gone.journal_folder, error)
        waiting = 1
    return dataclasses.replace(gone, num_undelivered=waiting)


_COMPLETED_STATUSES = ("finished", "waiting", "postponed")  # states of a run whose stages are done


@dataclass(frozen=True)
class PipelineRunRecord:
    """A pipeline run as the output folder remembers it."""

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


def list_recorded_runs(output: Path) -> list[PipelineRunRecord]:
    """All pipeline runs of an output folder, the newest first."""
    found = [
        _read_run_record(path.parent.parent)
        for path in output.glob("*/runs/*/.tracking/events.jsonl")
    ]
    return sorted(
        (record for record in found if record), key=lambda record: record.started, reverse=True
    )


def list_recorded_sweeps(home: Path) -> list[PipelineRunRecord]:
    """The sweeps of a pipeline's folder; their trials are in `trials/*/runs/*` of each."""
    found = [
        _read_run_record(path.parent.parent)
        for path in home.glob("sweeps/*/.tracking/events.jsonl")
    ]
    return [
        dataclasses.replace(one, started=one.started.removeprefix("sweep ")) for one in found if one
    ]


def _read_run_record(folder: Path) -> PipelineRunRecord | None:
    name, status, settings, host = "", "", None, ""
    tags: dict[str, str] = {}
    for event, _ in read_lines(build_events_path(folder)):
        op = event.get("op")
        if op in ("start", "resume"):
            name, status, host = str(event.get("name", name)), "running", str(event.get("host", ""))
            tags = {key: text for key, text in tags.items() if key not in STALE_STOP_TAGS}
        elif op == "end":
            status = describe_run_status(str(event.get("status")), tags)
        elif op == "tags":
            tags |= _parse_json_object(event.get("tags"))
        elif op == "text" and event.get("name") == "config.json":
            settings = _parse_json_object(event.get("text")) or None
    if not name:
        return None
    own = _read_json_object(folder / "run.json")
    if status == "running":
        gone = _read_crashed_run(folder)
        status = "killed" if gone is not None and not gone.is_remote else "running"
    elif status in _COMPLETED_STATUSES and own.get("status") in _COMPLETED_STATUSES:
        # the journal still says "waiting" after the answer, which is noted beside it
        status = own["status"]
    return PipelineRunRecord(
        pipeline=folder.parent.parent.name,
        started=name.partition(" · ")[2],
        name=name,
        run_id=DeliveryCursor.load(folder).run_id or "",
        status=status,
        folder=folder,
        settings=settings,
        only=own.get("only"),
        evaluated_models=_parse_json_object(own.get("given")),
        code_version=tags.get("code_version", ""),
        host=host,
    )


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        return _parse_json_object(path.read_text()) if path.is_file() else {}
    except (OSError, ValueError):
        return {}


def _parse_json_object(value: Any) -> dict[str, Any]:
    """An object, or its JSON text; {} for anything else: others may have written here."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
