"""Signs of life of a supervised process: bytes through a socket that it inherited.

A thread sends them for as long as the main thread gets on: while it waits it has to say so every moment, in the middle
of an update it has the time of one. A process that is stopped, or whose interpreter is stuck, sends nothing at all.
When the server at the other end is gone, the process ends itself.

A process beside the server, kept running: noticed at once when it dies, within seconds when it hangs.
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

BEAT_SECONDS = 0.5
IDLE_SECONDS = 1.5  # within which a process that only waits has to say so again
ORPHAN_SECONDS = 2.0  # to save what it has, once its server is gone


class Heartbeat:
    """The sender; a context manager. Without a descriptor it does nothing."""

    def __init__(self, descriptor: int | None, work_seconds: float) -> None:
        """descriptor: of the socket. work_seconds: of the longest piece of work."""
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
        """A piece of work begins."""
        self._alive_until = time.monotonic() + self._work_seconds
        inject_fault("online.working")

    def report_waiting(self) -> None:
        """There is nothing to do; said again every moment."""
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
            os._exit(1)  # a kill costs nothing but time: what is not saved is computed again


log = logging.getLogger(__name__)

HANG_SECONDS = 2.5  # without a sign of life, those not counted in which it waited for a processor
STARVED_SECONDS = 60.0  # in all, after which it counts as hung even so
START_SECONDS = 300.0  # for the first one
STEADY_SECONDS = (
    10.0  # of life, after which the next start is at once; one that fails faster has to wait
)
MAX_RESTART_DELAY = 30.0
STOP_SECONDS = 10.0  # from SIGTERM to SIGKILL
LOG_BYTES = 4 * 2**20
LOG_TAIL_BYTES, MAX_LINE_CHARACTERS = (
    4096,
    500,
)  # of a log, that are looked at and told when its process has failed


class StandbyProcess:
    """A spare process that has imported everything, and becomes the next worker or gate: a restart takes a second or
    two in place of the time that torch takes to load."""

    def __init__(self, command: Sequence[str], log_path: Path) -> None:
        """command: as for `SupervisedProcess`; the process says by a byte that it is ready."""
        self._command, self._log = list(command), log_path
        self._spare: tuple[subprocess.Popen[bytes], socket.socket] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """The spare process."""
        return self._spare[0] if self._spare is not None else None

    def ensure_started(self) -> None:
        """Start a spare where there is none."""
        if self._spare is not None and self._spare[0].poll() is not None:
            self._spare[1].close()
            self._spare = None
        if self._spare is None:
            self._spare = spawn_with_heartbeat(self._command, self._log)

    def claim_process(self, role: str) -> tuple[subprocess.Popen[bytes], socket.socket] | None:
        """The spare as this part from now on; None where none is ready."""
        if (
            self._spare is None
            or self._spare[0].poll() is not None
            or not has_received_beat(self._spare[1])
        ):
            return None
        spare, self._spare = self._spare, None
        try:
            spare[1].sendall(f"{role}\n".encode())
        except OSError:
            return None
        return spare

    def stop_process(self) -> None:
        """End the spare."""
        if self._spare is not None:
            self._spare[1].close()
            self._spare[0].kill()
            self._spare[0].wait()
            self._spare = None


def spawn_with_heartbeat(
    command: Sequence[str], log_path: Path
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A process with the number of its heartbeat's descriptor as last argument, and our end. Raises: OSError."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    try:
        with open_log_file(log_path, append_up_to=LOG_BYTES) as out, theirs:
            process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
    except OSError:
        ours.close()
        raise
    return process, ours


def has_received_beat(ours: socket.socket) -> bool:
    """True = the other end has sent something."""
    try:
        return bool(ours.recv(65_536))
    except OSError:  # nothing there
        return False


def read_processor_waits(pid: int) -> dict[str, float]:
    """Seconds that each thread of a process was ready to run and waited for a processor; {} where Linux does not say.

    Source: Linux, Documentation/scheduler/sched-stats.rst (/proc/PID/schedstat, second field, nanoseconds).
    """
    found = {}
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            found[path.parent.name] = int(path.read_text().split()[1]) / 1e9
    return found


class SupervisedProcess:
    """One process. `step` is called several times a second and never blocks."""

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
        """command: is given the number of its heartbeat's descriptor as last argument. tell: takes a sentence about
        every end that nobody asked for."""
        self.name, self._command, self._log = name, list(command), log_path
        self._clock, self._report_exit, self._standby = clock, report_exit, standby
        self.process: subprocess.Popen[bytes] | None = None
        self.restarts = 0
        self.failures = 0  # in a row
        self._beats: socket.socket | None = None
        self._started_at = self._last_beat = self._retry_at = 0.0
        self._has_beaten = False
        self._log_start = 0  # bytes of the log that are of earlier processes
        self._processor_waits: dict[
            str, float
        ] = {}  # at its last sign of life, see `read_processor_waits`

    @property
    def is_up(self) -> bool:
        """True = it runs, and has given a sign of life."""
        return self.process is not None and self._has_beaten

    def step(self) -> None:
        """Start it, look at it, or end it, as is due."""
        now = self._clock()
        if self.process is None:
            if now >= self._retry_at:
                self._start_process(now)
            return
        if (code := self.process.poll()) is not None:
            self._record_exit(
                now,
                f"ended with exit code {code}{self._read_last_line()}"
                if code >= 0
                else f"was ended by signal {-code}",
            )
            return
        assert self._beats is not None
        if has_received_beat(self._beats):
            self._last_beat, self._has_beaten = now, True
            self._processor_waits = read_processor_waits(self.process.pid)
        limit = HANG_SECONDS if self._has_beaten else START_SECONDS
        if now - self._last_beat > limit and not self._is_starved(now - self._last_beat - limit):
            self._send_signal(signal.SIGKILL)
            self.process.wait()
            self._record_exit(now, f"gave no sign of life for {limit:g} s and was killed")

    def stop_process(self) -> None:
        """End it and wait: SIGTERM, then SIGKILL."""
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
        found = self._standby.claim_process(self.name) if self._standby is not None else None
        try:
            self.process, self._beats = found or spawn_with_heartbeat(self._command, self._log)
        except OSError as error:  # temporarily out of memory, processes or disk
            self._record_exit(now, f"cannot be started: {error}")
            return
        self._started_at, self._last_beat, self._has_beaten = now, now, False

    def _record_exit(self, now: float, reason: str) -> None:
        self._clear_process()
        self.failures = 1 if now - self._started_at > STEADY_SECONDS else self.failures + 1
        self.restarts += 1
        wait = (
            0.0
            if self.failures == 1
            else min(MAX_RESTART_DELAY, 0.5 * 2 ** min(self.failures - 2, 10))
        )
        self._retry_at = now + wait
        log.warning("%s %s; next start in %g s (%s)", self.name, reason, wait, self._log)
        self._report_exit(f"the {self.name} {reason}")

    def _is_starved(self, late: float) -> bool:
        """True = it wanted to run and could not, for as long as it is late: other programs take the processors."""
        if not self._has_beaten or self.process is None or late > STARVED_SECONDS - HANG_SECONDS:
            return False
        now = read_processor_waits(self.process.pid)
        return (
            max(
                (waited - self._processor_waits.get(thread, 0.0) for thread, waited in now.items()),
                default=0.0,
            )
            >= late
        )

    def _read_last_line(self) -> str:
        """The last line that the process wrote, which says why it failed; "" = it wrote nothing."""
        try:
            with self._log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                start = (
                    self._log_start if self._log_start <= size else 0
                )  # else the log was begun anew
                file.seek(max(start, size - LOG_TAIL_BYTES))
                lines = file.read().decode(errors="replace").split("\n")
        except OSError:
            return ""
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f": {last[:MAX_LINE_CHARACTERS]}" if last else ""

    def _clear_process(self) -> None:
        self.process, self._has_beaten = None, False
        if self._beats is not None:
            self._beats.close()
            self._beats = None

    def _send_signal(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
