"""A process beside the server, kept running: noticed at once when it dies, within seconds when it hangs."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rl_core.storage.single_files import open_log

__all__ = ["SupervisedProcess"]

log = logging.getLogger(__name__)

HANG_SECONDS = 2.5  # without a sign of life
START_SECONDS = 300.0  # for the first one
STEADY_SECONDS = 30.0  # of life, after which the next start is at once
LONGEST_WAIT = 30.0
STOP_SECONDS = 10.0  # from SIGTERM to SIGKILL
LOG_BYTES = 4 * 2**20


class SupervisedProcess:
    """One process. `step` is called several times a second and never blocks."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_path: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        """command: is given the number of its heartbeat's descriptor as last argument. tell: takes a sentence about
        every end that nobody asked for."""
        self.name, self._command, self._log = name, list(command), log_path
        self._clock, self._tell = clock, tell
        self.process: subprocess.Popen[bytes] | None = None
        self.restarts = 0
        self.failures = 0  # in a row
        self._beats: socket.socket | None = None
        self._began = self._last = self._retry_at = 0.0
        self._has_beaten = False

    @property
    def is_up(self) -> bool:
        """True = it runs, and has given a sign of life."""
        return self.process is not None and self._has_beaten

    def step(self) -> None:
        """Start it, look at it, or end it, as is due."""
        now = self._clock()
        if self.process is None:
            if now >= self._retry_at:
                self._start(now)
            return
        if (code := self.process.poll()) is not None:
            self._ended(now, f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code}")
            return
        if self._take_beats():
            self._last, self._has_beaten = now, True
        limit = HANG_SECONDS if self._has_beaten else START_SECONDS
        if now - self._last > limit:
            self._signal(signal.SIGKILL)
            self.process.wait()
            self._ended(now, f"gave no sign of life for {limit:g} s and was killed")

    def stop(self) -> None:
        """End it and wait: SIGTERM, then SIGKILL."""
        if self.process is None:
            return
        self._signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self.process.wait()
        self._clear()

    def _start(self, now: float) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with open_log(self._log, append_up_to=LOG_BYTES) as out, theirs:
                self.process = subprocess.Popen(
                    [*self._command, str(theirs.fileno())], stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                    pass_fds=(theirs.fileno(),), start_new_session=True,
                )  # fmt: skip
        except OSError as error:  # temporarily out of memory, processes or disk
            ours.close()
            self._ended(now, f"cannot be started: {error}")
            return
        self._beats, self._began, self._last, self._has_beaten = ours, now, now, False

    def _take_beats(self) -> bool:
        assert self._beats is not None
        try:
            return bool(self._beats.recv(65_536))
        except OSError:  # nothing there
            return False

    def _ended(self, now: float, how: str) -> None:
        self._clear()
        self.failures = 1 if now - self._began > STEADY_SECONDS else self.failures + 1
        self.restarts += 1
        wait = 0.0 if self.failures == 1 else min(LONGEST_WAIT, 0.5 * 2 ** min(self.failures - 2, 10))
        self._retry_at = now + wait
        log.warning("%s %s; next start in %g s (%s)", self.name, how, wait, self._log)
        self._tell(f"the {self.name} {how}")

    def _clear(self) -> None:
        self.process, self._has_beaten = None, False
        if self._beats is not None:
            self._beats.close()
            self._beats = None

    def _signal(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
