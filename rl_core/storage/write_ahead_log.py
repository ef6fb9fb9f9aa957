"""Durability of an SQLite database in WAL mode, apart from its transactions.

With `synchronous=FULL` a commit waits for the disk while it holds the only writer's lock. With `synchronous=NORMAL` it
does not wait; what is committed is durable once the log file has been synced. So transactions stay short, and one wait
for the disk serves all that were committed before it began, those of other processes included: the log is one file, of
which a crash keeps a beginning (SQLite finds its end by checksums, https://www.sqlite.org/walformat.html).
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from pathlib import Path

from rl_core.storage.atomic_files import fsync_path

BUSY_SECONDS = 30.0  # that the writer's lock is waited for
CHUNK_BYTES = 1 << 20  # bytes that are written again at a time

_fdatasync = getattr(os, "fdatasync", os.fsync)


class WriteAheadLog:
    """The log of a database file that this process has open; safe for threads."""

    def __init__(self, database: Path) -> None:
        """`database`: in WAL mode, `synchronous` at least NORMAL: then SQLite syncs the log before it copies it."""
        self._database = os.path.realpath(
            database
        )  # SQLite follows links: the log is beside the file itself
        self._path = Path(f"{self._database}-wal")
        self._descriptor: int | None = None
        self._state = threading.Condition()
        self._num_started = self._num_done = self._num_failures = 0  # waits for the disk
        self._is_waiting = False
        self._needs_rewrite = (
            False  # the disk has refused since the log was last written as a whole
        )

    def sync_commits(self) -> None:
        """Have everything on the disk that anybody has committed by now.

        Threads that come while another waits for the disk share the next wait. Raises: OSError of the disk; then
        nothing is known about what was committed before.
        """
        with self._state:
            needed, failures = (
                self._num_started + 1,
                self._num_failures,
            )  # one under way may have begun before our commit
            while self._is_waiting and self._num_done < needed and self._num_failures == failures:
                self._state.wait()
            if self._num_failures != failures:
                raise OSError(f"{self._path}: was not synced")
            if self._num_done >= needed:
                return
            self._num_started, self._is_waiting = self._num_started + 1, True
            mine = self._num_started
        is_synced = False
        try:
            self._sync_log()
            is_synced = True
        finally:
            with self._state:
                self._is_waiting = False
                if is_synced:
                    self._num_done = mine
                else:
                    self._num_failures += 1
                self._state.notify_all()

    def _sync_log(self) -> None:
        """Wait for the disk, in one thread at a time."""
        if self._needs_rewrite:
            self._write_log_again()
        else:
            self._needs_rewrite = True
            _fdatasync(self._open_descriptor())
        self._needs_rewrite = False

    def _write_log_again(self) -> None:
        """Write the log over itself, and wait for the disk.

        A disk that refuses may have dropped what it was given, and the system says so once: the next wait would succeed
        without it (https://lwn.net/Articles/752063/).
        """
        try:
            with contextlib.closing(
                sqlite3.connect(self._database, timeout=BUSY_SECONDS, isolation_level=None)
            ) as connection:
                connection.execute(
                    "BEGIN IMMEDIATE"
                )  # nobody else writes into the log until the end
                descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    place = 0
                    while part := os.pread(descriptor, CHUNK_BYTES, place):
                        place += os.pwrite(descriptor, part, place)
                    _fdatasync(descriptor)
                finally:
                    os.close(descriptor)
        except sqlite3.Error as error:
            raise OSError(
                f"{self._path}: cannot be written again after the disk has refused it: {error}"
            ) from error

    def _open_descriptor(self) -> int:
        """The log's descriptor. SQLite removes the log with the last connection, and the next one makes another."""
        if self._descriptor is not None and os.fstat(self._descriptor).st_nlink == 0:
            os.close(self._descriptor)
            self._descriptor = None
        if self._descriptor is None:
            # SQLite's locks are on the database and its -shm file: closing another descriptor of the log loses none.
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            fsync_path(self._path.parent)
        return self._descriptor

    def close(self) -> None:
        """Let go of the file, after a wait that is under way: the descriptor's number may then be another file's."""
        with self._state:
            while self._is_waiting:
                self._state.wait()
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
