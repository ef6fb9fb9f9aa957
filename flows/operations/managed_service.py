"""Lifecycle of one server: start, health checks, restart with exponential backoff after a crash or hang."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from flows.operations.ports import is_free
from flows.operations.processes import MARK, ProcessId, end_all, spawn
from flows.operations.services import ServiceSpec
from flows.operations.state import ServiceState

__all__ = ["ManagedService", "wait_before"]

log = logging.getLogger(__name__)

START_SECONDS = 600.0  # start timeout; a first start creates databases, possibly on a busy machine
HANG_SECONDS = 120.0  # unresponsive time after which a server counts as hung
LOOK_SECONDS = 10.0  # health check interval
STEADY_SECONDS = 120.0  # healthy time after which the backoff is reset
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0
TAIL_LINES = 15


def wait_before(failures: int) -> float:
    """Restart delay in seconds after `failures` consecutive failures: 1, 2, 4, ... 60."""
    return float(min(LONGEST_WAIT, FIRST_WAIT * 2 ** min(failures - 1, 10)))


class ManagedService:
    """A server and its process. `step` is called periodically and blocks only for one health check."""

    def __init__(
        self, service: ServiceSpec, log_path: Path, start: Callable[..., subprocess.Popen[bytes]] = spawn
    ) -> None:
        self.service, self._log, self._start = service, log_path, start
        self.state = ServiceState(service.name, url=service.url, log=str(log_path), access=service.access)
        self.process: subprocess.Popen[bytes] | None = None
        self.failures = 0  # consecutive
        self._log_start = 0  # start of the current process's output in the log
        self._looked = self._worked = 0.0

    @property
    def is_up(self) -> bool:
        """True if it was healthy at the last check."""
        return self.state.phase == "up"

    def step(self, now: float) -> None:
        """Start, check or restart as due. Args: now: seconds since 1970."""
        if self.process is None:
            if now >= self.state.retry_at:
                self._begin(now)
        elif (code := self.process.poll()) is not None:
            self._ended(now, _in_words(code))
        elif now - self._looked >= (LOOK_SECONDS if self.is_up else 0.0):
            self._look(now)

    def _begin(self, now: float) -> None:
        service = self.service
        if self.state.restarts and (mark := service.environment.get(MARK)):
            end_all(mark, grace=service.lead + service.grace)  # descendants may survive if the keeper was killed
        if service.port is not None and not is_free(service.port):
            self._again(now, f"port {service.port} is taken")
            return
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        try:
            self.process = self._start(
                list(service.command), dict(service.environment), service.folder, self._log,
                lead=service.lead, soft=service.soft, grace=service.grace,
            )  # fmt: skip
        except OSError as error:  # temporarily out of memory or processes
            self._again(now, f"cannot be started: {error}")
            return
        self.state.phase, self.state.since, self.state.retry_at = "starting", now, 0.0
        self.state.process = ProcessId.of(self.process.pid)
        self._worked = now

    def _look(self, now: float) -> None:
        self._looked = now
        if self.service.works() if not self.is_up or self.service.watched else True:
            self._worked = now
            self.state.phase = "up"
            if now - self.state.since > STEADY_SECONDS:
                self.failures = 0
            return
        patience = HANG_SECONDS if self.is_up else START_SECONDS
        if now - self._worked > patience:
            self.signal(signal.SIGTERM)  # its end is detected by a later step
            self.state.message = f"did not answer for {patience:.0f} s"
            self._worked = now

    def _ended(self, now: float, how: str) -> None:
        self._again(now, self.state.message if self.state.message.startswith("did not answer") else how)

    def _again(self, now: float, why: str) -> None:
        self.process = self.state.process = None
        self.failures += 1
        self.state.restarts += 1
        self.state.phase, self.state.message = "waiting", why
        self.state.retry_at = now + wait_before(self.failures)
        log.warning("%s: %s; next start in %.0f s", self.service.name, why, self.state.retry_at - now)

    def at_once(self) -> None:
        """Skip the remaining restart delay."""
        self.state.retry_at, self.failures = 0.0, 0

    def signal(self, number: int) -> None:
        """Signal the keeper, which ends the process tree."""
        if self.process is not None and self.process.poll() is None:
            os.kill(self.process.pid, number)

    def stop(self, now: float, seconds: float) -> bool:
        """After `signal`: wait up to `seconds` for the end; True if it has ended."""
        if self.process is not None:
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                return False
        self.process = self.state.process = None
        self.state.phase, self.state.since = "stopped", now
        return True

    def tail(self) -> str:
        """Last output lines of the current process."""
        try:
            with self._log.open("rb") as file:
                file.seek(self._log_start)
                lines = file.read()[-20_000:].decode(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-TAIL_LINES:])


def _in_words(code: int) -> str:
    """Exit code of a keeper as text; 128 + n = the server was ended by signal n."""
    number = -code if code < 0 else code - 128
    try:
        return f"was ended by {signal.Signals(number).name}" if number > 0 else f"ended with exit code {code}"
    except ValueError:
        return f"ended with exit code {code}"
