"""Durability of an SQLite database in WAL mode, apart from its transactions.

With `synchronous=FULL` a commit waits for the disk while it holds the only writer's lock. With `synchronous=NORMAL` it
does not wait; what is committed is durable once the log file has been synced. So transactions stay short, and one wait
for the disk serves all that were committed before it began, those of other processes included: the log is one file, of
which a crash keeps a beginning (SQLite finds its end by checksums, https://www.sqlite.org/walformat.html).
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from rl_core.storage.single_files import sync

__all__ = ["WriteAheadLog"]

_to_disk = getattr(os, "fdatasync", os.fsync)


class WriteAheadLog:
    """The log of a database file that this process has open; safe for threads."""

    def __init__(self, database: Path) -> None:
        """`database`: in WAL mode, `synchronous` at least NORMAL: then SQLite syncs the log before it copies it."""
        self._path = Path(f"{os.path.realpath(database)}-wal")  # SQLite follows links: it is beside the file itself
        self._descriptor: int | None = None
        self._state = threading.Condition()
        self._begun = self._done = self._failures = 0  # waits for the disk
        self._is_waiting = False

    def sync(self) -> None:
        """Have everything on the disk that anybody has committed by now.

        Threads that come while another waits for the disk share the next wait. Raises: OSError of the disk; then
        nothing is known about what was committed before.
        """
        with self._state:
            needed, failures = self._begun + 1, self._failures  # one under way may have begun before our commit
            while self._is_waiting and self._done < needed and self._failures == failures:
                self._state.wait()
            if self._failures != failures:
                raise OSError(f"{self._path}: was not synced")
            if self._done >= needed:
                return
            self._begun, self._is_waiting = self._begun + 1, True
            mine = self._begun
        is_synced = False
        try:
            _to_disk(self._opened())
            is_synced = True
        finally:
            with self._state:
                self._is_waiting = False
                if is_synced:
                    self._done = mine
                else:
                    self._failures += 1
                self._state.notify_all()

    def size(self) -> int:
        """Bytes of the log; 0 where there is none."""
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0

    def _opened(self) -> int:
        """The log's descriptor. SQLite removes the log with the last connection, and the next one makes another."""
        if self._descriptor is not None and os.fstat(self._descriptor).st_nlink == 0:
            os.close(self._descriptor)
            self._descriptor = None
        if self._descriptor is None:
            # SQLite's locks are on the database and its -shm file: closing another descriptor of the log loses none.
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            sync(self._path.parent)
        return self._descriptor

    def close(self) -> None:
        """Let go of the file."""
        with self._state:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
