"""The interface between the trainer and the processes of its workers, and heartbeats of playing workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class WorkerLost(Exception):
    """Error: a worker's process has died during a call; the text says how."""


class WorkerCluster(Protocol):
    """A set of worker processes: starts them and calls their methods.

    Handles, shared values and calls are opaque to callers.
    """

    def open_cluster(self, num_bytes: int) -> None:
        """Start or join the cluster, once; shared values take up to `num_bytes` at a time.

        Raises: SettingsError if there is no cluster, no memory or no package.
        """

    def share_value(self, value: Any) -> Any:
        """Make a value readable by all workers, stored once per machine; it lives as long as the result."""

    def start_worker(self, spec: Any, base: Any, *, is_live: bool) -> Any:
        """Start a `RolloutWorker`, or an `AsyncRolloutWorker` if `is_live`, from shared values; its first call
        reports errors.
        """

    def call_worker(self, worker: Any, method: str, *arguments: Any) -> Any:
        """Call a worker's method; shared values among the arguments arrive as their contents."""

    def call_concurrently(self, worker: Any, method: str, *arguments: Any) -> Any:
        """Call a method that waits, like `call_worker`; the worker answers other calls meanwhile. One at a time per
        worker.
        """

    def ping_worker(self, worker: Any) -> Any:
        """Request a heartbeat, which a worker answers even while it plays."""

    def wait_for_calls(self, calls: Sequence[Any], timeout_s: float) -> list[Any]:
        """Return the calls that have ended, at least one unless the timeout passes."""

    def fetch_result(self, call: Any) -> Any:
        """Return the result of a call that has ended.

        Raises: WorkerLost; errors of the worker are values (`RolloutWorker.call_method`).
        """

    def stop_worker(self, worker: Any) -> None:
        """End a worker's process; ignore one that has already ended."""

    def close(self) -> None:
        """End everything that was started and clean up."""


HEARTBEAT_INTERVAL_S = 15.0  # between two pings of one worker
HEARTBEAT_TIMEOUT_S = 120.0  # a worker without an answer for this long counts as lost
NO_HEARTBEAT = f"no heartbeat for {HEARTBEAT_TIMEOUT_S:g} s"  # reason of a loss, for messages


@dataclass
class _PendingPing:
    call: Any
    sent_at: float


@dataclass
class HeartbeatMonitor:
    """Heartbeats of workers, identified by the numbers of their slots.

    A worker answers heartbeats while it plays; a hanging process does not.
    """

    cluster: WorkerCluster
    clock: Callable[[], float] = time.monotonic
    _pending: dict[int, _PendingPing] = field(default_factory=dict)
    _last_checked: dict[int, float] = field(
        default_factory=dict
    )  # when each last answered, or began

    def list_unresponsive(self, workers: Iterable[tuple[int, Any]]) -> list[int]:
        """List the numbers of workers without an answer for HEARTBEAT_TIMEOUT_S; ping the others when due."""
        now = self.clock()
        unresponsive = []
        for number, worker in workers:
            ping = self._pending.get(number)
            if ping is None:
                if now - self._last_checked.setdefault(number, now) >= HEARTBEAT_INTERVAL_S:
                    self._pending[number] = _PendingPing(self.cluster.ping_worker(worker), now)
            elif self.cluster.wait_for_calls([ping.call], 0.0):
                del self._pending[number]
                self._last_checked[number] = now
            elif now - ping.sent_at >= HEARTBEAT_TIMEOUT_S:
                unresponsive.append(number)
        return unresponsive

    def forget_worker(self, number: int) -> None:
        """Forget a number: it has another worker, or its worker plays nothing."""
        self._pending.pop(number, None)
        self._last_checked.pop(number, None)
