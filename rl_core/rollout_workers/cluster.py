"""Interface between the trainer and the processes that its workers live in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["WorkerCluster", "WorkerLost"]


class WorkerLost(Exception):
    """A worker's process is gone, with the call that it was asked for; the text says how."""


class WorkerCluster(Protocol):
    """Starts workers and calls their methods. Handles, shared values and calls are its own, opaque to others."""

    def open(self, num_bytes: int) -> None:
        """Make ready, once; shared values take up to so many bytes at a time.

        Raises: SettingsError where there is no cluster, no room, or no package.
        """

    def share(self, value: Any) -> Any:
        """Put a value where all workers can read it, once for each machine; it lives as long as the result."""

    def start(self, spec: Any, base: Any, *, is_live: bool) -> Any:
        """Start a worker (`RolloutWorker`, or `LiveWorker`) from shared values; its first call reports what failed."""

    def call(self, worker: Any, method: str, *arguments: Any) -> Any:
        """Ask a worker for a method; shared values among the arguments arrive as what they hold."""

    def call_beside(self, worker: Any, method: str, *arguments: Any) -> Any:
        """As `call`, for a method that waits: the worker answers other calls meanwhile. One at a time for each."""

    def ping(self, worker: Any) -> Any:
        """Ask a worker for a sign of life, which it gives while it plays, too."""

    def wait(self, calls: Sequence[Any], timeout_s: float) -> list[Any]:
        """Those of the calls that have ended, at least one unless the time is over."""

    def result(self, call: Any) -> Any:
        """Result of a call that has ended. Raises: WorkerLost; errors of the worker are values (`answer`)."""

    def stop(self, worker: Any) -> None:
        """End a worker's process; one that is gone already is no error."""

    def close(self) -> None:
        """End everything that was started, and leave nothing behind."""
