"""Supervision of one process: start, liveness check, restart with exponential backoff; signals of a supervisor.

`posttrain up` supervises by health checks (`posttrain/operations/managed_service.py`), online learning by heartbeats
(`heartbeats.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rl_core.errors import PosttrainError

log = logging.getLogger(__name__)


@contextlib.contextmanager
def handle_signals(
    handlers: Mapping[int, Callable[[int, FrameType | None], None]],
) -> Iterator[None]:
    """Handle signals, by number, within the block, and restore the previous handlers. For the main thread."""
    previous_handlers = {
        number: signal.signal(number, handler) for number, handler in handlers.items()
    }
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


class MonotonicClock:
    """Clock in seconds since 1970 that does not jump when the system clock is set.

    It starts at the wall clock's time and continues with the monotonic clock. Supervision compares times: if the wall
    clock were set forward by an hour, a server would seem unresponsive for an hour; set back, no restart would be due.
    The training service's clock (`create_service_clock`) differs: all processes of a store share its offset.
    """

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def __call__(self) -> float:
        """Return the current time."""
        return self._offset + time.monotonic()


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Delays between the restarts of a process that keeps failing."""

    first_delay_s: float  # doubled after each further consecutive failure
    max_delay_s: float
    steady_s: float  # lifetime after which earlier failures no longer count
    num_immediate: int = 0  # consecutive failures that are followed by a restart without a delay

    def compute_delay(self, failures: int) -> float:
        """Compute the delay in seconds after `failures` consecutive failures, at least 1."""
        doublings = failures - 1 - self.num_immediate
        if doublings < 0:
            return 0.0
        return min(self.max_delay_s, self.first_delay_s * 2.0 ** min(doublings, 10))


class SupervisedProcess(ABC):
    """A process that is restarted when it ends or hangs. `step` is called periodically and blocks only for a check."""

    def __init__(self, name: str, log_path: Path, policy: RestartPolicy) -> None:
        """Prepare the process; the first `step` starts it.

        Args:
            log_path: file of the output, appended to by each start.
        """
        self.name, self.log_path, self._policy = name, log_path, policy
        self.process: subprocess.Popen[bytes] | None = None
        self.restarts = 0
        self.failures = 0  # consecutive
        self.started_at = self.retry_at = 0.0  # in the time of `step`
        self._log_start = 0  # bytes of the log written by earlier processes

    def step(self, now: float) -> None:
        """Start, check or restart as due. Args: now: seconds, of the same clock in every call."""
        if self.process is None:
            if now >= self.retry_at:
                self._start_process(now)
        elif (code := self.process.poll()) is not None:
            self._record_exit(now, self._describe_exit(code))
        else:
            self._check_liveness(now)

    @abstractmethod
    def _spawn_process(self) -> subprocess.Popen[bytes]:
        """Start the process. Raises: OSError, PosttrainError; the start is then tried again later."""

    @abstractmethod
    def _check_liveness(self, now: float) -> None:
        """Check that the running process is alive; end it if it hangs."""

    @abstractmethod
    def _describe_exit(self, code: int) -> str:
        """Describe the end of the process, as the predicate of a sentence."""

    def _start_process(self, now: float) -> None:
        self._log_start = self.log_path.stat().st_size if self.log_path.is_file() else 0
        try:
            self.process = self._spawn_process()
        except (OSError, PosttrainError) as error:  # temporarily out of memory, processes or disk
            self._record_exit(now, f"cannot be started: {error}")
            return
        self.started_at, self.retry_at = now, 0.0

    def _record_exit(self, now: float, reason: str) -> None:
        """Record an unexpected end or a failed start, and schedule the restart."""
        self.process = None
        self.failures += 1
        self.restarts += 1
        delay_s = self._policy.compute_delay(self.failures)
        self.retry_at = now + delay_s
        log.warning("%s: %s; next start in %g s (%s)", self.name, reason, delay_s, self.log_path)

    def _forget_failures_if_steady(self, now: float) -> None:
        """Let earlier failures no longer count if the process has lived long enough."""
        if now - self.started_at > self._policy.steady_s:
            self.failures = 0

    def skip_restart_delay(self) -> None:
        """Skip the remaining restart delay."""
        self.retry_at, self.failures = 0.0, 0

    def read_log_lines(self, max_bytes: int) -> list[str]:
        """Read the last lines that the current or last process wrote, from the last `max_bytes` bytes of the log."""
        try:
            with self.log_path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                # A log shorter than that was replaced.
                start = self._log_start if self._log_start <= size else 0
                file.seek(max(start, size - max_bytes))
                return file.read().decode(errors="replace").splitlines()
        except OSError:
            return []
