"""The process of a sweep's trials (`worker.py`), on this machine: lines go in, lines come out."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Protocol

from rl_core.storage.single_files import make_folder, open_log

__all__ = ["LAST_SECONDS", "LocalTrialProcess", "NodeLost", "TrialProcess"]

LAST_SECONDS = 9.0  # for a process to save and stop


class NodeLost(Exception):
    """The machine that a trial ran on is gone; the text says how."""


class TrialProcess(Protocol):
    """A process that runs trials, wherever it is. Raises: NodeLost in every method but `end`."""

    @property
    def is_alive(self) -> bool:
        """False = it has ended."""

    def send(self, line: str) -> None:
        """Give it a line; one that has ended takes none."""

    def lines(self) -> Iterator[str]:
        """Lines that it writes, until it ends."""

    def terminate(self) -> None:
        """SIGTERM: it saves and ends. From any thread."""

    def close_input(self) -> None:
        """Say that no line follows: it ends where it waits for a job."""

    def end(self) -> int:
        """Wait for its end, or kill it after `LAST_SECONDS`; returns its exit code."""


class LocalTrialProcess:
    """A `TrialProcess` that is a child of this process, which it does not outlive."""

    def __init__(self, log: Path, environment: Mapping[str, str]) -> None:
        """Start it. `log`: of what it prints. Raises: OSError."""
        read, write = os.pipe()
        make_folder(log.parent)
        with open_log(log) as file:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "flows.sweep.worker", str(os.getpid()), str(write)],
                stdin=subprocess.PIPE, stdout=file, stderr=file, text=True, pass_fds=(write,),
                env=dict(environment), start_new_session=True,
            )  # fmt: skip
        os.close(write)
        self._events: IO[str] = os.fdopen(read)

    @property
    def is_alive(self) -> bool:
        """See `TrialProcess`."""
        return self.process.poll() is None

    def send(self, line: str) -> None:
        """See `TrialProcess`."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):  # it has ended, or its input is closed
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def lines(self) -> Iterator[str]:
        """See `TrialProcess`."""
        yield from iter(self._events.readline, "")  # not from the file: a caller that goes would close it

    def terminate(self) -> None:
        """See `TrialProcess`."""
        if self.is_alive:
            self.process.terminate()

    def close_input(self) -> None:
        """See `TrialProcess`."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()

    def end(self) -> int:
        """See `TrialProcess`."""
        try:
            code = self.process.wait(timeout=LAST_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self._events.close()
        self.close_input()
        return code
