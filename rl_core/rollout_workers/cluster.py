"""Interface between the trainer and the processes that its workers live in.

Questions to workers that play, answered beside the playing: a process that hangs answers none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class WorkerLost(Exception):
    """A worker's process is gone, with the call that it was asked for; the text says how."""


class WorkerCluster(Protocol):
    """Starts workers and calls their methods. Handles, shared values and calls are its own, opaque to others."""

    def open_cluster(self, num_bytes: int) -> None:
        """Make ready, once; shared values take up to so many bytes at a time.

        Raises: SettingsError where there is no cluster, no room, or no package.
        """

    def share_value(self, value: Any) -> Any:
        """Put a value where all workers can read it, once for each machine; it lives as long as the result."""

    def start_worker(self, spec: Any, base: Any, *, is_live: bool) -> Any:
        """Start a worker (`RolloutWorker`, or `AsyncRolloutWorker`) from shared values; its first call reports what failed."""

    def call_worker(self, worker: Any, method: str, *arguments: Any) -> Any:
        """Ask a worker for a method; shared values among the arguments arrive as what they hold."""

    def call_concurrently(self, worker: Any, method: str, *arguments: Any) -> Any:
        """As `call`, for a method that waits: the worker answers other calls meanwhile. One at a time for each."""

    def ping_worker(self, worker: Any) -> Any:
        """Ask a worker for a sign of life, which it gives while it plays, too."""

    def wait_for_calls(self, calls: Sequence[Any], timeout_s: float) -> list[Any]:
        """Those of the calls that have ended, at least one unless the time is over."""

    def fetch_result(self, call: Any) -> Any:
        """Result of a call that has ended. Raises: WorkerLost; errors of the worker are values (`answer`)."""

    def stop_worker(self, worker: Any) -> None:
        """End a worker's process; one that is gone already is no error."""

    def close(self) -> None:
        """End everything that was started, and leave nothing behind."""


HEARTBEAT_INTERVAL_S = 15.0  # between two questions to one worker
HEARTBEAT_TIMEOUT_S = 120.0  # without an answer, until a worker counts as lost
NO_HEARTBEAT = f"no sign of life for {HEARTBEAT_TIMEOUT_S:g} s"  # how it was lost, for people


@dataclass
class _PendingPing:
    call: Any
    sent_at: float


@dataclass
class HeartbeatMonitor:
    """Watches workers by their seats' numbers."""

    cluster: WorkerCluster
    clock: Callable[[], float] = time.monotonic
    _pending: dict[int, _PendingPing] = field(default_factory=dict)
    _last_checked: dict[int, float] = field(default_factory=dict)  # when each was asked, or began

    def list_unresponsive(self, workers: Iterable[tuple[int, Any]]) -> list[int]:
        """Numbers of those (number, worker) that have not answered for HUNG_S; the others are asked when it is time."""
        now, found = self.clock(), []
        for number, worker in workers:
            question = self._pending.get(number)
            if question is None:
                if now - self._last_checked.setdefault(number, now) >= HEARTBEAT_INTERVAL_S:
                    self._pending[number] = _PendingPing(self.cluster.ping_worker(worker), now)
            elif self.cluster.wait_for_calls([question.call], 0.0):
                del self._pending[number]
                self._last_checked[number] = now
            elif now - question.sent_at >= HEARTBEAT_TIMEOUT_S:
                found.append(number)
        return found

    def forget_worker(self, number: int) -> None:
        """Note that another worker has this number, or that it plays nothing."""
        self._pending.pop(number, None)
        self._last_checked.pop(number, None)
