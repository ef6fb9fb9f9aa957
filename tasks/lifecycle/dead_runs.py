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
from rl_core.storage.faults import fault
from tasks.run_status import OF_AN_EARLIER_STOP, run_status
from tasks.tracking import Tracking
from tasks.tracking.journal import DeliveryCursor, LineLog, events_path, metrics_path, read_lines, recorded_seconds
from tasks.tracking.replay import journals

__all__ = ["DeadRun", "RunRecord", "close_dead_runs", "dead_runs", "recorded_runs", "recorded_sweeps"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeadRun:
    """A run whose process is gone, as it was found."""

    name: str  # as `posttrain runs` shows it
    folder: Path  # of its journal
    run_id: str  # MLflow's; "" = it never got one
    flow_run_id: str  # Prefect's
    is_pipeline: bool  # else one stage of one
    host: str
    pid: int
    elsewhere: bool = False  # it ran on another machine, where alone it can be judged
    waiting: int = 0  # records that the store did not take yet

    @property
    def why(self) -> str:
        """The finding as a sentence."""
        what = "run" if self.is_pipeline else "stage run"
        if self.elsewhere:
            return f"{what} '{self.name}' has no end; it ran on {self.host}, where alone it can be judged"
        who = f"process {self.pid}" if self.pid else "its process"
        return f"{what} '{self.name}' was killed without a word: {who} is gone"


def dead_runs(root: Path) -> list[DeadRun]:
    """Runs under `root` that have no end and no living process, outer ones first; nothing is changed."""
    return [gone for folder in journals(root) if (gone := _judge(folder)) is not None]


def close_dead_runs(tracking: Tracking, root: Path) -> list[DeadRun]:
    """Find dead runs under `root`; deliver what they recorded and mark them as killed.

    Returns: those found, also those that ran on another machine and were therefore left as they are.
    """
    marked = (gone if gone.elsewhere else _mark(tracking, gone) for gone in dead_runs(root))
    return [gone for gone in marked if gone is not None]


def _is_held(path: Path) -> bool:
    """True = a living process holds the lock of a journal's file, or none can be told from here."""
    writable = os.access(path, os.W_OK)  # else it is somebody else's, which can be locked all the same
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


def _judge(folder: Path) -> DeadRun | None:
    """The run of a journal, if its process is gone; None where it ended, or lives."""
    if _is_held(events_path(folder)):
        return None
    name, open_since = "", False
    tags: dict[str, str] = {}
    process: dict[str, Any] = {}
    parent = ""
    for event, _ in read_lines(events_path(folder)):
        op = event.get("op")
        if op in ("start", "resume"):
            open_since, process = True, event
            name = event.get("name", name)
            parent = str(event.get("parent_folder") or event.get("parent_run_id") or parent)
        elif op == "end":
            open_since = False
        elif op == "tags":
            tags |= _object(event.get("tags"))
    if not open_since:
        return None
    host = str(process.get("host", ""))
    return DeadRun(
        name=name,
        folder=folder,
        run_id=DeliveryCursor.load(folder).run_id or "",
        flow_run_id=str(tags.get("prefect.flow_run_id", "")),
        is_pipeline=not parent,
        host=host,
        pid=int(process.get("pid") or 0),
        elsewhere=bool(host) and host != platform.node(),
    )


def _mark(tracking: Tracking, gone: DeadRun) -> DeadRun | None:
    """End the journal where the process ended, and deliver it. None where somebody took it up meanwhile."""
    try:
        events = LineLog(events_path(gone.folder))
    except FolderBusy:
        return None
    try:
        paths = (events_path(gone.folder), metrics_path(gone.folder))
        last = int(max(path.stat().st_mtime for path in paths if path.exists()) * 1000)
        events.append({"op": "tags", "time": last, "tags": {"interrupted": gone.why}})
        spent = recorded_seconds(gone.folder)
        events.append({"op": "end", "time": last, "status": "KILLED", **({"seconds": spent} if spent else {})})
        fault("dead.noted")
    finally:
        events.close()
    logger.info("%s; marked as killed", gone.why)
    try:
        waiting = tracking.replay(gone.folder)
    except (BackendError, FolderBusy) as error:
        logger.warning("%s cannot be delivered yet: %s", gone.folder, error)
        waiting = 1
    return dataclasses.replace(gone, waiting=waiting)


_OVER = ("finished", "waiting", "postponed")  # states of a run whose stages are done


@dataclass(frozen=True)
class RunRecord:
    """A pipeline run as the output folder remembers it."""

    pipeline: str
    started: str
    name: str
    run_id: str
    status: str  # running, waiting, postponed, finished, failed, stopped, killed
    folder: Path
    settings: dict[str, Any] | None  # None = they were not recorded
    only: str | None
    given: dict[str, str]
    code_version: str
    host: str


def recorded_runs(output: Path) -> list[RunRecord]:
    """All pipeline runs of an output folder, the newest first."""
    found = [_record(path.parent.parent) for path in output.glob("*/runs/*/.tracking/events.jsonl")]
    return sorted((record for record in found if record), key=lambda record: record.started, reverse=True)


def recorded_sweeps(home: Path) -> list[RunRecord]:
    """The sweeps of a pipeline's folder; their trials are in `trials/*/runs/*` of each."""
    found = [_record(path.parent.parent) for path in home.glob("sweeps/*/.tracking/events.jsonl")]
    return [dataclasses.replace(one, started=one.started.removeprefix("sweep ")) for one in found if one]


def _record(folder: Path) -> RunRecord | None:
    name, status, settings, host = "", "", None, ""
    tags: dict[str, str] = {}
    for event, _ in read_lines(events_path(folder)):
        op = event.get("op")
        if op in ("start", "resume"):
            name, status, host = str(event.get("name", name)), "running", str(event.get("host", ""))
            tags = {key: text for key, text in tags.items() if key not in OF_AN_EARLIER_STOP}
        elif op == "end":
            status = run_status(str(event.get("status")), tags)
        elif op == "tags":
            tags |= _object(event.get("tags"))
        elif op == "text" and event.get("name") == "config.json":
            settings = _object(event.get("text")) or None
    if not name:
        return None
    own = _json(folder / "run.json")
    if status == "running":
        gone = _judge(folder)
        status = "killed" if gone is not None and not gone.elsewhere else "running"
    elif status in _OVER and own.get("status") in _OVER:
        status = own["status"]  # the journal still says "waiting" after the answer, which is noted beside it
    return RunRecord(
        pipeline=folder.parent.parent.name,
        started=name.partition(" · ")[2],
        name=name,
        run_id=DeliveryCursor.load(folder).run_id or "",
        status=status,
        folder=folder,
        settings=settings,
        only=own.get("only"),
        given=_object(own.get("given")),
        code_version=tags.get("code_version", ""),
        host=host,
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        return _object(path.read_text()) if path.is_file() else {}
    except (OSError, ValueError):
        return {}


def _object(value: Any) -> dict[str, Any]:
    """An object, or its JSON text; {} for anything else: others may have written here."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
