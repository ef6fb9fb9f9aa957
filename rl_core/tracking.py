"""Tracker protocol, the interface of rl_core to experiment tracking, and its basic implementations.

A tracker must never block a training step: implementations append to a local journal and upload in the background.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

logger = logging.getLogger(__name__)

QUEUE_CAPACITY = 10_000  # waiting records; later ones are dropped and counted
CLOSE_SECONDS = 5.0


class Tracker(Protocol):
    """Sink of a trainer's metrics, tags, artifacts and progress."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record scalars of one step, with names such as `train/...`, `policy/...`."""

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """Store a copy of a finished file or folder."""

    def log_dict(self, values: Mapping[str, Any], name: str) -> None:
        """Store a structure as a JSON artifact, replacing any of the same name."""

    def set_tag(self, name: str, value: str) -> None:
        """Set a short text tag on the run."""

    def progress(self, done: int, total: int, message: str = "") -> None:
        """Report progress; cheap enough to call at every iteration."""


def replace_invalid_characters(
    text: str, valid: str, substitute: str = "_", *, merge: bool = True
) -> str:
    """Replace the characters that a name of a metric, model or file may not have.

    Args:
        valid: the characters that stay, as in a character class of `re`: "A-Za-z0-9_".
        merge: True = one substitute for adjacent invalid characters, False = one for each.
    """
    return re.sub(f"[^{valid}]{'+' if merge else ''}", substitute, text)


def distinguish_name(clean: str, name: str, max_length: int = 250) -> str:
    """Return `clean`, marked by a digest of `name` if that was changed: two names never become the same one."""
    if clean == name:
        return clean
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:6]
    return f"{clean[: max_length - 7]}_{digest}"


def sync_tracker(tracker: Tracker) -> None:
    """Flush records to the disk if the tracker has a `sync()`. Call it before a checkpoint is published.

    Otherwise a power cut could leave a checkpoint with steps that nobody recorded.
    """
    sync = getattr(tracker, "sync", None)
    if sync is not None:
        sync()


@dataclass
class MemoryTracker:
    """In-memory tracker; the default of rl_core."""

    metrics: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    artifacts: list[tuple[Path, str]] = field(default_factory=list)
    dicts: dict[str, dict[str, Any]] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    done: int = 0
    total: int = 0
    message: str = ""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Append one step's scalars."""
        self.metrics.append((step, dict(metrics)))

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """Store the path."""
        self.artifacts.append((Path(path), folder))

    def log_dict(self, values: Mapping[str, Any], name: str) -> None:
        """Store the structure."""
        self.dicts[name] = dict(values)

    def set_tag(self, name: str, value: str) -> None:
        """Store the tag."""
        self.tags[name] = value

    def progress(self, done: int, total: int, message: str = "") -> None:
        """Store the latest progress."""
        self.done, self.total, self.message = done, total, message

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return all (step, value) pairs of one metric."""
        return [(step, row[name]) for step, row in self.metrics if name in row]


class SilentTracker:
    """Tracker whose methods do nothing; subclasses override those that they support."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Do nothing."""

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """Do nothing."""

    def log_dict(self, values: Mapping[str, Any], name: str) -> None:
        """Do nothing."""

    def set_tag(self, name: str, value: str) -> None:
        """Do nothing."""

    def progress(self, done: int, total: int, message: str = "") -> None:
        """Do nothing."""


class BackgroundTracker(SilentTracker):
    """Tracker that forwards records to another tracker on a separate thread, so it can neither stall nor fail a run.

    The other tracker is also created there: importing its package may take seconds. An error disables it with one
    warning.
    Records that do not fit the queue are lost there; MLflow and the journal have all of them.
    """

    def __init__(
        self, name: str, make: Callable[[], Tracker], capacity: int = QUEUE_CAPACITY
    ) -> None:
        """Configure the tracker; the thread starts with the first record.

        Args:
            name: for warnings.
            make: creates the other tracker.
        """
        self.name, self._build_tracker = name, make
        self._queue: queue.Queue[tuple[str, tuple[Any, ...]] | None] = queue.Queue(capacity)
        self._thread: threading.Thread | None = None
        self.num_dropped = 0
        self.is_broken = False

    def begin(self, name: str, params: Mapping[str, Any]) -> None:
        """Forward the start of a run."""
        self._enqueue_call("begin", name, dict(params))

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Forward the scalars of one step."""
        self._enqueue_call("log_metrics", dict(metrics), step)

    def log_system(self, metrics: Mapping[str, float], number: int) -> None:
        """Forward a reading of the machine, for trackers that support it."""
        self._enqueue_call("log_system", dict(metrics), number)

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """Forward a finished file; it is skipped if it no longer exists when the thread gets to it."""
        self._enqueue_call("log_artifact", path, folder)

    def log_dict(self, values: Mapping[str, Any], name: str) -> None:
        """Forward a structure."""
        self._enqueue_call("log_dict", values, name)

    def set_tag(self, name: str, value: str) -> None:
        """Forward a short text."""
        self._enqueue_call("set_tag", name, value)

    def close(self, status: str, timeout_s: float = CLOSE_SECONDS) -> None:
        """Close the tracker; records that it has not accepted within `timeout_s` are lost."""
        if self._thread is None:
            return
        self._enqueue_call("close", status)
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            self.is_broken = True
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self.is_broken = True
            logger.warning(
                "%s does not accept the run's records within %g s; they are lost there",
                self.name,
                timeout_s,
            )
        elif self.num_dropped:
            logger.warning(
                "%s was too slow: %d records were dropped there", self.name, self.num_dropped
            )
        self._thread = None

    def _enqueue_call(self, method: str, *arguments: Any) -> None:
        if self.is_broken:
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run_thread, name=f"sink-{self.name}", daemon=True
            )
            self._thread.start()
        try:
            self._queue.put_nowait((method, arguments))
        except queue.Full:
            self.num_dropped += 1

    def _run_thread(self) -> None:
        tracker: Tracker | None = None
        while (item := self._queue.get()) is not None:
            if self.is_broken:
                continue
            method, arguments = item
            try:
                tracker = tracker or self._build_tracker()
                call = getattr(tracker, method, None)  # begin, log_system and close are optional
                is_missing = method == "log_artifact" and not arguments[0].exists()
                if call is not None and not is_missing:
                    call(*arguments)
            except Exception as error:
                self.is_broken = True
                logger.warning(
                    "%s accepts no more records of this run: %s: %s",
                    self.name,
                    type(error).__name__,
                    error,
                )
