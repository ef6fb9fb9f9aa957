"""Local journal of a run: records on disk before anything is sent, and a cursor of their delivery.

    <folder>/metrics.jsonl             one line per call: {"step": 3, "time": <ms>, "metrics": {"train/loss": 0.5}}
    <folder>/.tracking/events.jsonl    all other records in order: run, params, tags, artifacts, data sets, traces,
    models, end
    <folder>/.tracking/files/          contents of artifacts and models, until they are delivered
    <folder>/.tracking/shipped.json    the store's run for this folder, and the byte offset delivered of each file
    <folder>/.tracking/progress.json   progress of the work: {"done": 3, "total": 10, "message": "...", "time": <ms>,
                                       "seconds": spent on it, in all its processes}

A line is appended with one write and never changed, including its time stamp, so delivering it twice stores it once.
The process may die at any byte. A torn last line was never sent; the next start truncates it. Each line of the first
two files has a checksum (`rl_core.storage.append_log`). A line that was damaged by the disk or edited is reported,
counted and skipped.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rl_core.errors import CheckpointError, DataError
from rl_core.storage.append_log import (
    RECORD_LOST,
    LockedAppendLog,
    encode_checked_line,
    read_checked_lines,
)
from rl_core.storage.atomic_files import write_text_atomic
from rl_core.storage.faults import inject_fault
from rl_core.storage.folders import clear_leftovers

log = logging.getLogger(__name__)

SCRATCH_PREFIX = "model-"  # name prefix of temporaries in a journal's folder


def build_metrics_path(folder: Path) -> Path:
    """Return the metrics file of a run folder."""
    return folder / "metrics.jsonl"


def build_events_path(folder: Path) -> Path:
    """Return the file of all other records of a run folder."""
    return folder / ".tracking" / "events.jsonl"


def build_cursor_path(folder: Path) -> Path:
    """Return the file of a run folder's delivery cursor."""
    return folder / ".tracking" / "shipped.json"


def build_progress_path(folder: Path) -> Path:
    """Return the file of a run's progress and elapsed time, for the live page."""
    return folder / ".tracking" / "progress.json"


def read_recorded_seconds(folder: Path) -> float:
    """Read the seconds that all processes of a run have spent on it, as last recorded; 0.0 if nothing is recorded."""
    try:
        seconds = float(json.loads(build_progress_path(folder).read_text())["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0


class LineLog(LockedAppendLog):
    """Locked append log that keeps lines in memory while the disk refuses them, so that no line is lost."""

    def __init__(self, path: Path) -> None:
        """Open for appending and truncate a torn last line.

        Raises: FolderBusy while another process has it open; CheckpointError if the disk refuses.
        """
        super().__init__(path)
        self._pending_lock = threading.Lock()
        self._pending: deque[bytes] = deque()  # lines that the disk refused, in order
        self._num_refusals = 0
        inject_fault("journal.opened")

    def append_record(self, record: Mapping[str, Any]) -> None:
        """Append one record. If the disk refuses, warn, keep the line in memory and retry later."""
        line = encode_checked_line(record)
        with self._pending_lock:
            self._pending.append(line)
            self._write_pending()

    def flush_pending(self, *, sync: bool = False) -> bool:
        """Write the lines that the disk refused before, and fsync if `sync`. Return whether everything is written."""
        with self._pending_lock:
            self._write_pending()
            if self._pending:
                return False
            try:
                if sync and self.is_open:
                    self.sync_lines()
            except CheckpointError as error:
                log.warning("%s", error)
                return False
            return True

    def _write_pending(self) -> None:
        while self._pending and self.is_open:
            try:
                self.append_lines(self._pending[0])
            except CheckpointError as error:
                self._num_refusals += 1
                if self._num_refusals & (self._num_refusals - 1) == 0:  # 1st, 2nd, 4th, 8th, ...
                    log.warning("%s; %d lines wait in memory", error, len(self._pending))
                return
            self._pending.popleft()
            inject_fault("journal.line")

    def read_records(self, offset: int) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield complete records from byte `offset` on, each with the offset after it."""
        return read_lines(self.path, offset, end=self.end)

    def close(self) -> None:
        """Write pending lines, fsync, and release the file. A second call does nothing."""
        if self.is_open:
            self.flush_pending(sync=True)
            inject_fault("journal.synced")
            with self._pending_lock:
                super().close()


def read_lines(
    path: Path, offset: int = 0, end: int | None = None
) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the complete JSON lines of `path`, each with the byte offset after it.

    A damaged line yields {} and a warning.
    """
    for line in read_checked_lines(path, offset, end, consequence=RECORD_LOST):
        yield line.record or {}, line.end


class MetricsJournal:
    """Journal metrics.jsonl, which holds each (step, name) once, however often a run is killed and replayed."""

    def __init__(self, folder: Path) -> None:
        """Open the journal of a run folder and remember its contents."""
        self.lines = LineLog(build_metrics_path(folder))
        self._lock = threading.Lock()
        # Most steps log the same names, so the sets of names are shared and stay small.
        self._names: dict[int, frozenset[str]] = {}
        self._shared: dict[frozenset[str], frozenset[str]] = {}
        self.num_repeated = 0  # values skipped because their (step, name) was already recorded
        self.last_system_step = -1
        for record, _ in read_lines(self.lines.path):
            names = record.get("metrics")
            if not names:
                continue
            self._remember_names(int(record["step"]), frozenset(names))
            if any(name.startswith("system/") for name in names):
                self.last_system_step = max(self.last_system_step, int(record["step"]))

    def _remember_names(self, step: int, names: frozenset[str]) -> None:
        if step in self._names:
            names = self._names[step] | names
        self._names[step] = self._shared.setdefault(names, names)

    def append_metrics(
        self, metrics: Mapping[str, Any], step: int, *, is_local: bool = False
    ) -> None:
        """Record scalars of one step. An existing value of (step, name) stays unchanged.

        Args:
            is_local: they stay in this folder, for the live page, and are not delivered.
        Raises: DataError for a value that is not a number.
        """
        step = int(step)
        row: dict[str, float | str] = {}
        for name, value in metrics.items():
            try:
                number = float(value)
            except (TypeError, ValueError):
                raise DataError(
                    f"metric '{name}' at step {step}: {value!r} is not a number"
                ) from None
            # JSON has no literals for nan and inf; float() parses them from strings.
            row[str(name)] = number if math.isfinite(number) else str(number)
        with self._lock:
            recorded = self._names.get(step)
            if recorded:
                fresh = {name: value for name, value in row.items() if name not in recorded}
                self.num_repeated += len(row) - len(fresh)
                row = fresh
            if row:
                record = {"step": step, "time": time.time_ns() // 1_000_000, "metrics": row}
                self.lines.append_record(record | ({"local": True} if is_local else {}))
                self._remember_names(step, frozenset(row))

    def close(self) -> None:
        """Write and fsync."""
        self.lines.close()


def read_metrics(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """Read all (step, metrics) of a run folder in recorded order."""
    return [
        (int(record["step"]), {name: float(value) for name, value in record["metrics"].items()})
        for record, _ in read_lines(build_metrics_path(folder))
        if record
    ]


def find_metric_points(
    folder: Path, metrics: Mapping[str, float], step: int, time_ms: int
) -> dict[str, tuple[int, int]]:
    """Find the point (step, time in ms) of a run's curve that each metric of its model belongs to.

    It is the newest point of that value, which logging again leaves unchanged. A metric without a curve gets the run's
    last step. A value that its curve lacks, such as a mean over steps, is left out: the store would add a second point
    at a step.

    Args:
        step, time_ms: for a run without metrics.
    """
    exact: dict[str, tuple[int, int]] = {}
    curves: set[str] = set()
    last = (step, time_ms)
    for record, _ in read_lines(build_metrics_path(folder)):
        point = (int(record.get("step", step)), int(record.get("time", time_ms)))
        for name, value in (record.get("metrics") or {}).items():
            if name.startswith("system/"):
                continue
            last = max(last, point)
            curves.add(name)
            if name in metrics and float(value) == metrics[name]:
                exact[name] = point
    return {name: exact.get(name, last) for name in metrics if name in exact or name not in curves}


@dataclass
class DeliveryCursor:
    """Part of a run folder that a tracking store has acknowledged."""

    store: str = ""
    run_id: str | None = None
    experiment_id: str | None = None
    metrics_offset: int = 0
    events_offset: int = 0
    num_failed: int = 0  # records that the store refused permanently
    num_damaged: int = 0  # lines whose checksum does not match; their contents are lost
    # of the store's experiment; a different one at the same address has lost the run
    identity: str = ""
    # model versions by the key of their record
    versions: dict[str, int] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> DeliveryCursor:
        """Load the folder's cursor. If it is unreadable start from the beginning, because sending again is harmless."""
        try:
            return cls(**json.loads(build_cursor_path(folder).read_bytes()))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, TypeError) as error:
            log.warning(
                "%s is unreadable (%s); everything is sent again", build_cursor_path(folder), error
            )
            return cls()

    def save(self, folder: Path) -> None:
        """Replace the folder's cursor atomically."""
        write_text_atomic(
            build_cursor_path(folder), json.dumps(asdict(self)), point="cursor.written"
        )
        inject_fault("cursor.saved")


def clear_journal(folder: Path, delivered: int) -> None:
    """Remove what a killed process left behind while recording or delivering. The caller holds the journal.

    Args:
        delivered: offset in events.jsonl; copies that no later record names are removed.
    """
    tracking_folder = build_events_path(folder).parent
    clear_leftovers(folder)  # without the lock, because others write run.json there
    clear_leftovers(tracking_folder, locked=True)
    recorded_paths = {
        str(record.get("path", ""))
        for record, _ in read_lines(build_events_path(folder), delivered)
    }
    needed = {Path(path).parent.name for path in recorded_paths}
    copies = [path for path in (tracking_folder / "files").glob("*") if path.name not in needed]
    for path in (*copies, *tracking_folder.glob(f"{SCRATCH_PREFIX}*")):
        shutil.rmtree(path, ignore_errors=True)
        inject_fault("leftover.removed")
