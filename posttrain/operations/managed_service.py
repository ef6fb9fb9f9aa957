"""Lifecycle of one server: start, health checks, restart with exponential backoff after a crash or hang."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from posttrain.operations.processes import (
    MARK_VARIABLE,
    ProcessId,
    is_port_free,
    spawn_server,
    terminate_marked,
)
from posttrain.operations.services import ServiceSpec
from posttrain.operations.state import ServiceState

log = logging.getLogger(__name__)

START_SECONDS = 600.0  # start timeout; a first start creates databases, possibly on a busy machine
HANG_SECONDS = 120.0  # unresponsive time after which a server counts as hung
CHECK_SECONDS = 10.0  # health check interval
STEADY_SECONDS = 120.0  # healthy time after which the backoff is reset
MIN_RESTART_DELAY, MAX_RESTART_DELAY = 1.0, 60.0
TAIL_LINES = 15


class MonotonicClock:
    """Clock in seconds since 1970 that does not jump when the system clock is set.

    It starts at the wall clock's time and continues with the monotonic clock. Supervision compares times: if the wall
    clock were set forward by an hour, a server would seem unresponsive for an hour; set back, no restart would be due.
    """

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def __call__(self) -> float:
        """Return the current time."""
        return self._offset + time.monotonic()


def compute_restart_delay(failures: int) -> float:
    """Compute the restart delay in seconds after `failures` consecutive failures: 1, 2, 4, ... 60."""
    return float(min(MAX_RESTART_DELAY, MIN_RESTART_DELAY * 2 ** min(failures - 1, 10)))


class ManagedService:
    """A server and its process. `step` is called periodically and blocks only for one health check."""

    def __init__(
        self,
        service: ServiceSpec,
        log_path: Path,
        start: Callable[..., subprocess.Popen[bytes]] = spawn_server,
    ) -> None:
        self.service, self._log, self._spawn = service, log_path, start
        self.state = ServiceState(
            service.name, url=service.url, log=str(log_path), access=service.access
        )
        self.process: subprocess.Popen[bytes] | None = None
        self.failures = 0  # consecutive
        self._log_start = 0  # start of the current process's output in the log
        self._checked_at = self._healthy_at = 0.0

    @property
    def is_up(self) -> bool:
        """True if it was healthy at the last check."""
        return self.state.phase == "up"

    def step(self, now: float) -> None:
        """Start, check or restart as due. Args: now: seconds since 1970."""
        if self.process is None:
            if now >= self.state.retry_at:
                self._start_process(now)
        elif (code := self.process.poll()) is not None:
            self._record_exit(now, _describe_exit_code(code))
        elif now - self._checked_at >= (CHECK_SECONDS if self.is_up else 0.0):
            self._check_health(now)

    def _start_process(self, now: float) -> None:
        service = self.service
        if self.state.restarts and (mark := service.environment.get(MARK_VARIABLE)):
            # Descendants may survive if the keeper was killed.
            terminate_marked(mark, grace=service.lead + service.grace)
        if service.port is not None and not is_port_free(service.port):
            self._schedule_restart(now, f"port {service.port} is taken")
            return
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        try:
            self.process = self._spawn(
                list(service.command),
                dict(service.environment),
                service.folder,
                self._log,
                lead=service.lead,
                soft=service.soft,
                grace=service.grace,
            )
        except OSError as error:  # temporarily out of memory or processes
            self._schedule_restart(now, f"cannot be started: {error}")
            return
        self.state.phase, self.state.since, self.state.retry_at = "starting", now, 0.0
        self.state.process = ProcessId.from_pid(self.process.pid)
        self._healthy_at = now

    def _check_health(self, now: float) -> None:
        self._checked_at = now
        must_check = not self.is_up or self.service.restart_if_hung
        if not must_check or self.service.check_health():
            self._healthy_at = now
            self.state.phase = "up"
            if now - self.state.since > STEADY_SECONDS:
                self.failures = 0
            return
        timeout = HANG_SECONDS if self.is_up else START_SECONDS
        if now - self._healthy_at > timeout:
            self.send_signal(signal.SIGTERM)  # a later step detects its end
            self.state.message = f"did not answer for {timeout:.0f} s"
            self._healthy_at = now

    def _record_exit(self, now: float, reason: str) -> None:
        is_hung = self.state.message.startswith("did not answer")
        self._schedule_restart(now, self.state.message if is_hung else reason)

    def _schedule_restart(self, now: float, reason: str) -> None:
        self.process = self.state.process = None
        self.failures += 1
        self.state.restarts += 1
        self.state.phase, self.state.message = "waiting", reason
        self.state.retry_at = now + compute_restart_delay(self.failures)
        log.warning(
            "%s: %s; next start in %.0f s", self.service.name, reason, self.state.retry_at - now
        )

    def skip_restart_delay(self) -> None:
        """Skip the remaining restart delay."""
        self.state.retry_at, self.failures = 0.0, 0

    def send_signal(self, number: int) -> None:
        """Send a signal to the keeper, which ends the process tree."""
        if self.process is not None and self.process.poll() is None:
            os.kill(self.process.pid, number)

    def wait_for_exit(self, now: float, seconds: float) -> bool:
        """Wait up to `seconds` for the end after `send_signal`; return whether it has ended."""
        if self.process is not None:
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                return False
        self.process = self.state.process = None
        self.state.phase, self.state.since = "stopped", now
        return True

    def read_log_tail(self) -> str:
        """Read the last output lines of the current process."""
        try:
            with self._log.open("rb") as file:
                file.seek(self._log_start)
                lines = file.read()[-20_000:].decode(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-TAIL_LINES:])


def _describe_exit_code(code: int) -> str:
    """Describe the exit code of a keeper; 128 + n = the server was ended by signal n."""
    number = -code if code < 0 else code - 128
    if number > 0 and number in set(signal.Signals):
        return f"was ended by {signal.Signals(number).name}"
    return f"ended with exit code {code}"
