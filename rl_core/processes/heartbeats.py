"""Heartbeats over a socket: supervision of processes that can hang, with a standby process. Used by online learning.

The process inherits one end of a socket. A thread sends a byte through it as long as the main thread makes progress: a
waiting process has to report that every moment, one that works has the time of the longest piece of work. A process
that is stopped, or whose interpreter hangs, sends nothing. A crash is detected at the next step, a hang within seconds.
If the server at the other end no longer exists, the process ends itself. Two other kinds of liveness stay apart:
`rl_core/rollout_workers/cluster.py` pings actors that may run on other machines, and a crashed run is one whose journal
nobody locks (`tasks/lifecycle/crashed_runs.py`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rl_core.processes.children import kill_group, start_child, stop_group
from rl_core.processes.supervision import RestartPolicy, SupervisedProcess
from rl_core.storage.faults import inject_fault

BEAT_SECONDS = 0.5
IDLE_SECONDS = 1.5  # a waiting process has to report again within this time
ORPHAN_SECONDS = 2.0  # to save the state once the server no longer exists

HANG_SECONDS = 2.5  # without a heartbeat, not counting the time spent waiting for a processor
STARVED_SECONDS = 60.0  # without a heartbeat in total, after which a process counts as hung anyway
START_SECONDS = 300.0  # until the first heartbeat
RESTART_POLICY = RestartPolicy(first_delay_s=0.5, max_delay_s=30.0, steady_s=10.0, num_immediate=1)
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
        """Prepare the standby. `command`: as for `HeartbeatProcess`; the process sends a byte when it is ready."""
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
        except OSError:  # it has ended, or hangs
            connection.close()
            process.kill()
            process.wait()
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
    Raises: OSError, PosttrainError.
    """
    connection, child_end = socket.socketpair()
    connection.setblocking(False)
    try:
        with child_end:
            process = start_child(
                [*command, str(child_end.fileno())],
                log=log_path,
                append_up_to=LOG_BYTES,
                descriptors=(child_end.fileno(),),
            )
    except BaseException:
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


class HeartbeatProcess(SupervisedProcess):
    """A process that is restarted when it ends or sends no heartbeat. `step` never blocks."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_path: Path,
        *,
        report_exit: Callable[[str], None] = lambda text: None,
        standby: StandbyProcess | None = None,
    ) -> None:
        """Prepare the process; the first `step` starts it.

        Args:
            command: gets the descriptor of its heartbeat as last argument.
            report_exit: called with a sentence about each unexpected end.
            standby: takes over instead of a new process, if ready.
        """
        super().__init__(name, log_path, RESTART_POLICY)
        self._command, self._report_exit, self._standby = list(command), report_exit, standby
        self._beats: socket.socket | None = None
        self._last_beat = 0.0
        self._has_beaten = False
        # At its last heartbeat, see `read_processor_waits`.
        self._processor_waits: dict[str, float] = {}

    @property
    def is_up(self) -> bool:
        """True = it runs and has sent a heartbeat."""
        return self.process is not None and self._has_beaten

    def stop_process(self) -> None:
        """Stop the process and wait for its end: SIGTERM, then SIGKILL."""
        if self.process is not None:
            stop_group(self.process, STOP_SECONDS)
            self._clear_process()

    def _spawn_process(self) -> subprocess.Popen[bytes]:
        spare = self._standby.claim_process(self.name) if self._standby is not None else None
        process, self._beats = spare or spawn_with_heartbeat(self._command, self.log_path)
        return process

    def _start_process(self, now: float) -> None:
        self._last_beat, self._has_beaten = now, False
        super()._start_process(now)

    def _check_liveness(self, now: float) -> None:
        assert self.process is not None and self._beats is not None
        if has_received_beat(self._beats):
            self._last_beat, self._has_beaten = now, True
            self._processor_waits = read_processor_waits(self.process.pid)
        limit = HANG_SECONDS if self._has_beaten else START_SECONDS
        late_s = now - self._last_beat - limit
        if late_s > 0 and not self._is_starved(late_s):
            kill_group(self.process)
            self._record_exit(now, f"sent no heartbeat for {limit:g} s and was killed")

    def _describe_exit(self, code: int) -> str:
        if code < 0:
            return f"was ended by signal {-code}"
        # The last line usually names the error.
        lines = [line for line in self.read_log_lines(LOG_TAIL_BYTES) if line.strip()]
        last_line = f": {lines[-1].strip()[:MAX_LINE_CHARACTERS]}" if lines else ""
        return f"ended with exit code {code}{last_line}"

    def _record_exit(self, now: float, reason: str) -> None:
        self._clear_process()
        self._forget_failures_if_steady(now)
        super()._record_exit(now, reason)
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

    def _clear_process(self) -> None:
        self.process, self._has_beaten = None, False
        if self._beats is not None:
            self._beats.close()
            self._beats = None
