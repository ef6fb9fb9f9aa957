"""A tracker that may be slow, away or broken, on a thread of its own: it can neither stall nor fail what it tracks."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl_core.trackers.base import SilentTracker
from rl_core.tracking import Tracker

__all__ = ["BackgroundTracker"]

logger = logging.getLogger(__name__)

CAPACITY = 10_000  # records that wait; later ones are dropped, and counted
CLOSE_SECONDS = 5.0


class BackgroundTracker(SilentTracker):
    """Hands every record to another tracker, made on the thread as well: importing its package may take seconds.

    An error ends that tracker with one warning. Records that find the queue full are lost; MLflow and the journal have
    them all.
    """

    def __init__(self, name: str, make: Callable[[], Tracker], capacity: int = CAPACITY) -> None:
        """`name`: for warnings."""
        self.name, self._make = name, make
        self._queue: queue.Queue[tuple[str, tuple[Any, ...]] | None] = queue.Queue(capacity)
        self._thread: threading.Thread | None = None
        self.dropped = 0
        self.is_broken = False

    def begin(self, name: str, params: Mapping[str, Any]) -> None:
        """A run starts."""
        self._put("begin", name, dict(params))

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Scalars of one step."""
        self._put("log_metrics", dict(metrics), step)

    def log_system(self, metrics: Mapping[str, float], number: int) -> None:
        """A reading of the machine, for trackers that take them."""
        self._put("log_system", dict(metrics), number)

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """A finished file; it may be gone when the thread comes to it, which is then passed over."""
        self._put("log_artifact", path, folder)

    def log_dict(self, values: Mapping[str, Any], name: str) -> None:
        """A structure."""
        self._put("log_dict", values, name)

    def set_tag(self, name: str, value: str) -> None:
        """A short text."""
        self._put("set_tag", name, value)

    def close(self, status: str, timeout_s: float = CLOSE_SECONDS) -> None:
        """End the tracker; what it has not taken within `timeout_s` is left behind."""
        if self._thread is None:
            return
        self._put("close", status)
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            self.is_broken = True
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self.is_broken = True
            logger.warning(
                "%s does not take the run's records within %g s; they are left out there", self.name, timeout_s
            )
        elif self.dropped:
            logger.warning("%s was too slow: %d records were left out there", self.name, self.dropped)
        self._thread = None

    def _put(self, method: str, *arguments: Any) -> None:
        if self.is_broken:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"sink-{self.name}", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait((method, arguments))
        except queue.Full:
            self.dropped += 1

    def _serve(self) -> None:
        tracker: Tracker | None = None
        while (item := self._queue.get()) is not None:
            if self.is_broken:
                continue
            method, arguments = item
            try:
                tracker = tracker or self._make()
                call = getattr(tracker, method, None)  # begin, log_system and close are optional
                if call is not None and not (method == "log_artifact" and not arguments[0].exists()):
                    call(*arguments)
            except Exception as error:
                self.is_broken = True
                logger.warning("%s takes no more records of this run: %s: %s", self.name, type(error).__name__, error)
