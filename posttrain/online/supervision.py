"""Supervision of worker and gate: heartbeats over a socket, restarts after a crash or hang, a standby process.

The process inherits one end of a socket. A thread sends a byte through it as long as the main thread makes progress: a
waiting process has to report that every moment, one that works has the time of the longest piece of work. A process
that is stopped, or whose interpreter hangs, sends nothing. A crash is detected at the next step, a hang within seconds.
If the server at the other end no longer exists, the process ends itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rl_core.storage.atomic_files import open_log_file
from rl_core.storage.faults import inject_fault

log = logging.getLogger(__name__)

BEAT_SECONDS = 0.5
IDLE_SECONDS = 1.5  # a waiting process has to report again within this time
ORPHAN_SECONDS = 2.0  # to save the state once the server no longer exists

HANG_SECONDS = 2.5  # without a heartbeat, not counting the time spent waiting for a processor
STARVED_SECONDS = 60.0  # without a heartbeat in total, after which a process counts as hung anyway
START_SECONDS = 300.0  # until the first heartbeat
STEADY_SECONDS = 10.0  # after this lifetime the next start is immediate; earlier failures back off
MAX_RESTART_DELAY = 30.0
STOP_SECONDS = 10.0  # from SIGTERM to SIGKILL
LOG_BYTES = 4 * 2**20
# Of the log of a failed process: bytes read from its end, characters of the reported line.
LOG_TAIL_BYTES, MAX_LINE_CHARACTERS = 4096, 500


class Heartbeat:
    """Sender of heartbeats; a context manager. Without a descriptor it does nothing."""

    def __init__(self, descriptor: int | None, work_seconds: float) -> None:
        """Open the socket.

        Args:
            descriptor: of the socket; None = not supervised.
            work_seconds: limit for the longest piece of work.
        """
        self._socket = socket.socket(fileno=descriptor) if descriptor is not None else None
        self._work_seconds = work_seconds
        self._alive_until = time.monotonic() + work_seconds
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._send_beats, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        if self._socket is not None:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop_event.set()

    def report_working(self) -> None:
        """Report that a piece of work begins."""
        self._alive_until = time.monotonic() + self._work_seconds
        inject_fault("online.working")

    def report_waiting(self) -> None:
        """Report that there is nothing to do; call it again every moment."""
        self._alive_until = time.monotonic() + IDLE_SECONDS

    def _send_beats(self) -> None:
        assert self._socket is not None
        while not self._stop_event.is_set():
            if time.monotonic() < self._alive_until:
                try:
                    self._socket.send(b".")
                except OSError:
                    self._exit_as_orphan()
                    return
            self._stop_event.wait(BEAT_SECONDS)

    def _exit_as_orphan(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        if not self._stop_event.wait(ORPHAN_SECONDS):
            os._exit(1)  # costs only time: unsaved work is recomputed


class StandbyProcess:
    """A spare process that has imported everything and becomes the next worker or gate.

    With it, a restart takes one or two seconds instead of the time in which torch loads.
    """

    def __init__(self, command: Sequence[str], log_path: Path) -> None:
        """Prepare the standby. `command`: as for `SupervisedProcess`; the process sends a byte when it is ready."""
        self._command, self._log = list(command), log_path
        self._spare: tuple[subprocess.Popen[bytes], socket.socket] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """The spare process."""
        return self._spare[0] if self._spare is not None else None

    def ensure_started(self) -> None:
        """Start a spare process unless one runs."""
        if self._spare is not None and self._spare[0].poll() is not None:
            self._spare[1].close()
            self._spare = None
        if self._spare is None:
            self._spare = spawn_with_heartbeat(self._command, self._log)

    def claim_process(self, role: str) -> tuple[subprocess.Popen[bytes], socket.socket] | None:
        """Assign a role to the spare process and return it; None if no process is ready."""
        if self._spare is None:
            return None
        process, connection = self._spare
        if process.poll() is not None or not has_received_beat(connection):
            return None
        self._spare = None
        try:
            connection.sendall(f"{role}\n".encode())
        except OSError:
            return None
        return process, connection

    def stop_process(self) -> None:
        """Kill the spare process."""
        if self._spare is not None:
            process, connection = self._spare
            connection.close()
            process.kill()
            process.wait()
            self._spare = None


def spawn_with_heartbeat(
    command: Sequence[str], log_path: Path
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process that gets its socket's descriptor as last argument.

    Returns: the process, and this end of the socket.
    Raises: OSError.
    """
    connection, child_end = socket.socketpair()
    connection.setblocking(False)
    try:
        with open_log_file(log_path, append_up_to=LOG_BYTES) as out, child_end:
            process = subprocess.Popen(
                [*command, str(child_end.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                pass_fds=(child_end.fileno(),),
                start_new_session=True,
            )
    except OSError:
        connection.close()
        raise
    return process, connection


def has_received_beat(connection: socket.socket) -> bool:
    """Return whether the other end has sent something since the last call."""
    try:
        return bool(connection.recv(65_536))
    except OSError:  # nothing there
        return False


def read_processor_waits(pid: int) -> dict[str, float]:
    """Read the seconds that each thread of a process was ready to run but waited for a processor; {} if unknown.

    Source: Linux, Documentation/scheduler/sched-stats.rst (/proc/PID/schedstat, second field, nanoseconds).
    """
    seconds = {}
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            seconds[path.parent.name] = int(path.read_text().split()[1]) / 1e9
    return seconds


class SupervisedProcess:
    """A process that is restarted when it ends or hangs. `step` is called several times a second and never blocks."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_path: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        report_exit: Callable[[str], None] = lambda text: None,
        standby: StandbyProcess | None = None,
    ) -> None:
        """Prepare the process; the first `step` starts it.

        Args:
            command: gets the descriptor of its heartbeat as last argument.
            report_exit: called with a sentence about each unexpected end.
            standby: takes over instead of a new process, if ready.
        """
        self.name, self._command, self._log = name, list(command), log_path
        self._clock, self._report_exit, self._standby = clock, report_exit, standby
        self.process: subprocess.Popen[bytes] | None = None
        self.restarts = 0
        self.failures = 0  # consecutive
        self._beats: socket.socket | None = None
        self._started_at = self._last_beat = self._retry_at = 0.0
        self._has_beaten = False
        self._log_start = 0  # bytes of the log written by earlier processes
        # At its last heartbeat, see `read_processor_waits`.
        self._processor_waits: dict[str, float] = {}

    @property
    def is_up(self) -> bool:
        """True = it runs and has sent a heartbeat."""
        return self.process is not None and self._has_beaten

    def step(self) -> None:
        """Start, check or kill the process, as is due."""
        now = self._clock()
        if self.process is None:
            if now >= self._retry_at:
                self._start_process(now)
            return
        if (code := self.process.poll()) is not None:
            reason = f"was ended by signal {-code}"
            if code >= 0:
                reason = f"ended with exit code {code}{self._read_last_line()}"
            self._record_exit(now, reason)
            return
        assert self._beats is not None
        if has_received_beat(self._beats):
            self._last_beat, self._has_beaten = now, True
            self._processor_waits = read_processor_waits(self.process.pid)
        limit = HANG_SECONDS if self._has_beaten else START_SECONDS
        late_s = now - self._last_beat - limit
        if late_s > 0 and not self._is_starved(late_s):
            self._send_signal(signal.SIGKILL)
            self.process.wait()
            self._record_exit(now, f"sent no heartbeat for {limit:g} s and was killed")

    def stop_process(self) -> None:
        """Stop the process and wait for its end: SIGTERM, then SIGKILL."""
        if self.process is None:
            return
        self._send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._send_signal(signal.SIGKILL)
            self.process.wait()
        self._clear_process()

    def _start_process(self, now: float) -> None:
        self._log_start = self._log.stat().st_size if self._log.is_file() else 0
        spare = self._standby.claim_process(self.name) if self._standby is not None else None
        try:
            self.process, self._beats = spare or spawn_with_heartbeat(self._command, self._log)
        except OSError as error:  # temporarily out of memory, processes or disk
            self._record_exit(now, f"cannot be started: {error}")
            return
        self._started_at, self._last_beat, self._has_beaten = now, now, False

    def _record_exit(self, now: float, reason: str) -> None:
        self._clear_process()
        self.failures = 1 if now - self._started_at > STEADY_SECONDS else self.failures + 1
        self.restarts += 1
        delay = 0.0
        if self.failures > 1:
            delay = min(MAX_RESTART_DELAY, 0.5 * 2 ** min(self.failures - 2, 10))
        self._retry_at = now + delay
        log.warning("%s %s; next start in %g s (%s)", self.name, reason, delay, self._log)
        self._report_exit(f"the {self.name} {reason}")

    def _is_starved(self, late_s: float) -> bool:
        """Return whether a thread waited for a processor for as long as the heartbeat is late: the machine is busy."""
        if not self._has_beaten or self.process is None or late_s > STARVED_SECONDS - HANG_SECONDS:
            return False
        waits = [
            seconds - self._processor_waits.get(thread, 0.0)
            for thread, seconds in read_processor_waits(self.process.pid).items()
        ]
        return max(waits, default=0.0) >= late_s

    def _read_last_line(self) -> str:
        """Read the last line that the process wrote, which usually names the error; "" if it wrote nothing."""
        try:
            with self._log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                # A log shorter than that was replaced.
                start = self._log_start if self._log_start <= size else 0
                file.seek(max(start, size - LOG_TAIL_BYTES))
                lines = file.read().decode(errors="replace").split("\n")
        except OSError:
            return ""
        lines = [line.strip() for line in lines if line.strip()]
        return f": {lines[-1][:MAX_LINE_CHARACTERS]}" if lines else ""

    def _clear_process(self) -> None:
        self.process, self._has_beaten = None, False
        if self._beats is not None:
            self._beats.close()
            self._beats = None

    def _send_signal(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
