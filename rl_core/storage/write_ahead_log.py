"""Durability of an SQLite database in WAL mode, separate from its transactions (group commit).

With `synchronous=FULL` a commit waits for the disk while it holds the only writer's lock. With `synchronous=NORMAL` it
does not wait; a commit becomes durable once the log file is synced. So transactions stay short, and one sync serves all
earlier commits, including those of other processes: the log is a single file of which a crash preserves a prefix
(SQLite detects its end by checksums, https://www.sqlite.org/walformat.html).
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from pathlib import Path

from rl_core.storage.atomic_files import fsync_path

BUSY_SECONDS = 30.0  # timeout for the writer's lock
CHUNK_BYTES = 1 << 20  # rewritten at a time

_fdatasync = getattr(os, "fdatasync", os.fsync)


class WriteAheadLog:
    """Log of a database file that this process has open; thread-safe."""

    def __init__(self, database: Path) -> None:
        """Locate the log of `database`, which is in WAL mode.

        `synchronous` must be at least NORMAL, so that SQLite syncs the log before copying it into the database.
        """
        # SQLite follows links, so the log is next to the link's target.
        self._database = os.path.realpath(database)
        self._path = Path(f"{self._database}-wal")
        self._descriptor: int | None = None
        self._condition = threading.Condition()
        self._num_started = self._num_done = self._num_failures = 0  # of syncs
        self._is_syncing = False
        self._needs_rewrite = False  # a sync has failed since the log was last rewritten

    def sync_commits(self) -> None:
        """Make everything durable that any thread or process has committed so far.

        Threads that arrive while another thread syncs share the next sync. Raises: OSError from the disk; it is then
        unknown whether earlier commits are durable.
        """
        with self._condition:
            # The sync in progress may have started before our commit.
            needed, failures = self._num_started + 1, self._num_failures
            while self._is_syncing and self._num_done < needed and self._num_failures == failures:
                self._condition.wait()
            if self._num_failures != failures:
                raise OSError(f"{self._path}: was not synced")
            if self._num_done >= needed:
                return
            self._num_started, self._is_syncing = self._num_started + 1, True
            sync_number = self._num_started
        is_synced = False
        try:
            self._sync_log()
            is_synced = True
        finally:
            with self._condition:
                self._is_syncing = False
                if is_synced:
                    self._num_done = sync_number
                else:
                    self._num_failures += 1
                self._condition.notify_all()

    def _sync_log(self) -> None:
        """Sync the log; called by one thread at a time."""
        if self._needs_rewrite:
            self._rewrite_log()
        else:
            self._needs_rewrite = True
            _fdatasync(self._open_descriptor())
        self._needs_rewrite = False

    def _rewrite_log(self) -> None:
        """Write the log over itself and sync it.

        A disk may drop the pages of a failed sync, and the error is reported only once: the next sync would succeed
        without them (https://lwn.net/Articles/752063/).
        """
        try:
            with contextlib.closing(
                sqlite3.connect(self._database, timeout=BUSY_SECONDS, isolation_level=None)
            ) as connection:
                # Keeps other writers out of the log.
                connection.execute("BEGIN IMMEDIATE")
                descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    offset = 0
                    while chunk := os.pread(descriptor, CHUNK_BYTES, offset):
                        offset += os.pwrite(descriptor, chunk, offset)
                    _fdatasync(descriptor)
                finally:
                    os.close(descriptor)
        except sqlite3.Error as error:
            raise OSError(
                f"{self._path}: cannot be rewritten after a failed sync: {error}"
            ) from error

    def _open_descriptor(self) -> int:
        """Return the log's descriptor.

        SQLite removes the log with its last connection, and the next connection creates another.
        """
        if self._descriptor is not None and os.fstat(self._descriptor).st_nlink == 0:
            os.close(self._descriptor)
            self._descriptor = None
        if self._descriptor is None:
            # SQLite locks the database and its -shm file, so closing a descriptor of the log releases no lock.
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            fsync_path(self._path.parent)
        return self._descriptor

    def close(self) -> None:
        """Close the file after any sync in progress, whose descriptor number could otherwise be reused meanwhile."""
        with self._condition:
            while self._is_syncing:
                self._condition.wait()
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
