"""File-based event channel from rank 0 to the stage's process: metrics, progress, tags and log lines.

A file survives the kill of either side. Its events reach the tracker before the stage is resumed, so that a
checkpoint never holds a step whose metrics are lost.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_core.errors import CheckpointError
from rl_core.storage.checked_lines import read_checked, report_damage, sealed
from rl_core.storage.own_files import own_file
from rl_core.tracking import Tracker

__all__ = ["EventTracker", "Events", "EventLogHandler"]


class EventTracker:
    """A Tracker that writes lines; every line is handed to the kernel before the call returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = own_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def send(self, op: str, **fields: Any) -> None:
        """One line."""
        line = sealed({"op": op, **fields}, allow_nan=True)
        if (written := os.write(self._file, line)) < len(line):  # a full disk; the line that follows must not join it
            os.write(self._file, b"\n")
            raise CheckpointError(f"{self._path}: only {written} of {len(line)} bytes could be written; make room")

    def sync(self) -> None:
        """Put all lines on the disk: a checkpoint that follows says that they were written."""
        os.fsync(self._file)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Scalars of one step."""
        self.send("metrics", metrics=dict(metrics), step=step)

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """A finished file or folder, which has to stay where it is."""
        self.send("artifact", path=str(path), folder=folder)

    def set_tag(self, name: str, value: str) -> None:
        """A short text."""
        self.send("tag", name=name, value=value)

    def log_dict(self, values: Mapping[str, Any], name: str) -> None:
        """A structure as a JSON artifact."""
        self.send("dict", values=dict(values), name=name)

    def progress(self, done: int, total: int, message: str = "") -> None:
        """Steps done, of `total`."""
        self.send("progress", done=done, total=total, message=message)


class EventLogHandler(logging.Handler):
    """Log records as lines of an EventTracker."""

    def __init__(self, events: EventTracker) -> None:
        super().__init__(logging.INFO)
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record's text."""
        self._events.send("log", level=record.levelno, name=record.name, text=record.getMessage())


class Events:
    """The reader's side: hands complete lines to a tracker, each once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.training = False  # whether the processes are in the training loop, which stops by itself when asked
        self._offset = 0

    def forward(self, tracker: Tracker, *, replay: bool = False) -> None:
        """Pass on the lines written since the last call; with `replay` (a run that ended) no progress, no logs."""
        for line in read_checked(self.path, self._offset):
            self._offset = line.end
            if line.record is None:
                report_damage(self.path, line)
            else:
                self._apply(line.record, tracker, replay)

    def _apply(self, event: dict[str, Any], tracker: Tracker, replay: bool) -> None:
        match event["op"]:
            case "metrics":
                tracker.log_metrics(event["metrics"], event["step"])
            case "tag":
                tracker.set_tag(event["name"], event["value"])
            case "dict":
                tracker.log_dict(event["values"], event["name"])
            case "artifact":
                tracker.log_artifact(Path(event["path"]), event["folder"])
            case "progress" if not replay:
                tracker.progress(event["done"], event["total"], event["message"])
            case "log" if not replay:
                logging.getLogger(event["name"]).log(event["level"], "%s", event["text"])
            case "training":
                self.training = event["on"]
