"""Lifecycle of one server: start, health checks, restart after a crash or hang; orderly stop of several."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from posttrain.operations.processes import (
    MARK_VARIABLE,
    ProcessId,
    is_port_free,
    terminate_marked,
)
from posttrain.operations.services import ServiceSpec
from posttrain.operations.state import ServiceState
from rl_core.processes.children import spawn_server
from rl_core.processes.supervision import RestartPolicy, SupervisedProcess

START_SECONDS = 600.0  # start timeout; a first start creates databases, possibly on a busy machine
HANG_SECONDS = 120.0  # unresponsive time after which a server counts as hung
CHECK_SECONDS = 10.0  # health check interval
RESTART_POLICY = RestartPolicy(first_delay_s=1.0, max_delay_s=60.0, steady_s=120.0)
TAIL_LINES, TAIL_BYTES = 15, 20_000


class ManagedService(SupervisedProcess):
    """A server and its process. `step` is called periodically and blocks only for one health check."""

    def __init__(
        self,
        service: ServiceSpec,
        log_path: Path,
        start: Callable[..., subprocess.Popen[bytes]] = spawn_server,
    ) -> None:
        super().__init__(service.name, log_path, RESTART_POLICY)
        self.service, self._spawn = service, start
        self.state = ServiceState(
            service.name, url=service.url, log=str(log_path), access=service.access
        )
        self._checked_at = self._healthy_at = 0.0
        self._hang = ""  # why the current process was ended

    @property
    def is_up(self) -> bool:
        """True if it was healthy at the last check."""
        return self.state.phase == "up"

    def _start_process(self, now: float) -> None:
        service = self.service
        if self.restarts and (mark := service.environment.get(MARK_VARIABLE)):
            # Descendants may survive if the keeper was killed.
            terminate_marked(mark, grace=service.lead + service.grace)
        if service.port is not None and not is_port_free(service.port):
            self._record_exit(now, f"port {service.port} is taken")
            return
        super()._start_process(now)
        if self.process is not None:
            self.state.phase, self.state.since, self.state.retry_at = "starting", now, 0.0
            self.state.process = ProcessId.from_pid(self.process.pid)
            self._healthy_at, self._hang = now, ""

    def _spawn_process(self) -> subprocess.Popen[bytes]:
        service = self.service
        return self._spawn(
            list(service.command),
            dict(service.environment),
            service.folder,
            self.log_path,
            lead=service.lead,
            soft=service.soft,
            grace=service.grace,
        )

    def _check_liveness(self, now: float) -> None:
        if now - self._checked_at < (CHECK_SECONDS if self.is_up else 0.0):
            return
        self._checked_at = now
        must_check = not self.is_up or self.service.restart_if_hung
        if not must_check or self.service.check_health():
            self._healthy_at = now
            self.state.phase = "up"
            self._forget_failures_if_steady(now)
            return
        timeout = HANG_SECONDS if self.is_up else START_SECONDS
        if now - self._healthy_at > timeout:
            self.send_signal(signal.SIGTERM)  # a later step detects its end
            self._hang = self.state.message = f"did not answer for {timeout:.0f} s"
            self._healthy_at = now

    def _describe_exit(self, code: int) -> str:
        """Describe the exit code of a keeper; 128 + n = the server was ended by signal n."""
        if self._hang:
            return self._hang
        number = -code if code < 0 else code - 128
        if number > 0 and number in set(signal.Signals):
            return f"was ended by {signal.Signals(number).name}"
        return f"ended with exit code {code}"

    def _record_exit(self, now: float, reason: str) -> None:
        super()._record_exit(now, reason)
        self.state.process = None
        self.state.phase, self.state.message = "waiting", reason
        self.state.restarts, self.state.retry_at = self.restarts, self.retry_at

    def skip_restart_delay(self) -> None:
        """Skip the remaining restart delay."""
        super().skip_restart_delay()
        self.state.retry_at = 0.0

    def send_signal(self, number: int) -> None:
        """Send a signal to the keeper, which ends the process tree."""
        if self.process is not None:
            self.process.send_signal(number)

    def wait_for_exit(self, now: float, seconds: float) -> bool:
        """Wait up to `seconds` for the end after `send_signal`; return whether it has ended."""
        if self.process is not None:
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                return False
        self.process = self.state.process = None
        if self.state.phase != "stopped":
            self.state.phase, self.state.since = "stopped", now
        return True

    def read_log_tail(self) -> str:
        """Read the last output lines of the current process."""
        return "\n".join(self.read_log_lines(TAIL_BYTES)[-TAIL_LINES:])


def stop_services(
    servers: Sequence[ManagedService],
    clock: Callable[[], float],
    count_stop_signals: Callable[[], int],
    limit_s: float,
) -> None:
    """Stop servers together: SIGTERM, and again for each further stop signal, so that they do not finish saving.

    Args:
        count_stop_signals: returns the number of stop signals that this process has received.
        limit_s: seconds after which the rest is left running; a server's keeper bounds its shutdown earlier.
    """
    num_signals, deadline = count_stop_signals(), time.monotonic() + limit_s
    for server in servers:
        server.send_signal(signal.SIGTERM)
    # A list, not a generator: every server is polled each time.
    while not all([server.wait_for_exit(clock(), 0.2) for server in servers]):
        if time.monotonic() > deadline:
            return
        if count_stop_signals() > num_signals:
            num_signals = count_stop_signals()
            for server in servers:
                server.send_signal(signal.SIGTERM)
