"""Signs of life of a supervised process: bytes through a socket that it inherited.

A thread sends them for as long as the main thread gets on: while it waits it has to say so every moment, in the middle
of an update it has the time of one. A process that is stopped, or whose interpreter is stuck, sends nothing at all.
When the server at the other end is gone, the process ends itself.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

from rl_core.storage.faults import fault

__all__ = ["LifeSign"]

BEAT_SECONDS = 0.5
IDLE_SECONDS = 1.5  # within which a process that only waits has to say so again
ORPHAN_SECONDS = 2.0  # to save what it has, once its server is gone


class LifeSign:
    """The sender; a context manager. Without a descriptor it does nothing."""

    def __init__(self, descriptor: int | None, work_seconds: float) -> None:
        """descriptor: of the socket. work_seconds: of the longest piece of work."""
        self._socket = socket.socket(fileno=descriptor) if descriptor is not None else None
        self._work_seconds = work_seconds
        self._until = time.monotonic() + work_seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> LifeSign:
        if self._socket is not None:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()

    def working(self) -> None:
        """A piece of work begins."""
        self._until = time.monotonic() + self._work_seconds
        fault("online.working")

    def waiting(self) -> None:
        """There is nothing to do; said again every moment."""
        self._until = time.monotonic() + IDLE_SECONDS

    def _run(self) -> None:
        assert self._socket is not None
        while not self._over.is_set():
            if time.monotonic() < self._until:
                try:
                    self._socket.send(b".")
                except OSError:
                    self._orphaned()
                    return
            self._over.wait(BEAT_SECONDS)

    def _orphaned(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        if not self._over.wait(ORPHAN_SECONDS):
            os._exit(1)  # a kill costs nothing but time: what is not saved is computed again
