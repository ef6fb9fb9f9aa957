"""Tracker protocol, the interface of rl_core to experiment tracking.

A tracker must never block a training step: implementations append to a local journal and upload in the background.

A tracker that does nothing, for trackers that take only part of what a run reports.

A tracker that may be slow, away or broken, on a thread of its own: it can neither stall nor fail what it tracks.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


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


def sync_tracker(tracker: Tracker) -> None:
    """Force what was recorded to the disk, if the tracker has a `sync()`; called before a checkpoint is published.

    Else a power cut could leave a checkpoint whose steps nobody recorded.
    """
    if (sync := getattr(tracker, "sync", None)) is not None:
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
        """All (step, value) pairs of one metric."""
        return [(step, row[name]) for step, row in self.metrics if name in row]


class SilentTracker:
    """A `Tracker` whose methods do nothing; subclasses override what they take."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Ignore."""

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """Ignore."""

    def log_dict(self, values: Mapping[str, Any], name: str) -> None:
        """Ignore."""

    def set_tag(self, name: str, value: str) -> None:
        """Ignore."""

    def progress(self, done: int, total: int, message: str = "") -> None:
        """Ignore."""


logger = logging.getLogger(__name__)

QUEUE_CAPACITY = 10_000  # records that wait; later ones are dropped, and counted
CLOSE_SECONDS = 5.0


class BackgroundTracker(SilentTracker):
    """Hands every record to another tracker, made on the thread as well: importing its package may take seconds.

    An error ends that tracker with one warning. Records that find the queue full are lost; MLflow and the journal have
    them all.
    """

    def __init__(
        self, name: str, make: Callable[[], Tracker], capacity: int = QUEUE_CAPACITY
    ) -> None:
        """`name`: for warnings."""
        self.name, self._build_tracker = name, make
        self._queue: queue.Queue[tuple[str, tuple[Any, ...]] | None] = queue.Queue(capacity)
        self._thread: threading.Thread | None = None
        self.num_dropped = 0
        self.is_broken = False

    def begin(self, name: str, params: Mapping[str, Any]) -> None:
        """A run starts."""
        self._enqueue_call("begin", name, dict(params))

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Scalars of one step."""
        self._enqueue_call("log_metrics", dict(metrics), step)

    def log_system(self, metrics: Mapping[str, float], number: int) -> None:
        """A reading of the machine, for trackers that take them."""
        self._enqueue_call("log_system", dict(metrics), number)

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """A finished file; it may be gone when the thread comes to it, which is then passed over."""
        self._enqueue_call("log_artifact", path, folder)

    def log_dict(self, values: Mapping[str, Any], name: str) -> None:
        """A structure."""
        self._enqueue_call("log_dict", values, name)

    def set_tag(self, name: str, value: str) -> None:
        """A short text."""
        self._enqueue_call("set_tag", name, value)

    def close(self, status: str, timeout_s: float = CLOSE_SECONDS) -> None:
        """End the tracker; what it has not taken within `timeout_s` is left behind."""
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
                "%s does not take the run's records within %g s; they are left out there",
                self.name,
                timeout_s,
            )
        elif self.num_dropped:
            logger.warning(
                "%s was too slow: %d records were left out there", self.name, self.num_dropped
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
                if call is not None and not (
                    method == "log_artifact" and not arguments[0].exists()
                ):
                    call(*arguments)
            except Exception as error:
                self.is_broken = True
                logger.warning(
                    "%s takes no more records of this run: %s: %s",
                    self.name,
                    type(error).__name__,
                    error,
                )
