"""The store of a training service: everything that server and worker share."""

from __future__ import annotations

import threading
from collections.abc import Callable

from flows.service.store.access import Access
from flows.service.store.directory import Directory
from flows.service.store.intake import Intake
from flows.service.store.service_clock import service_clock
from flows.service.store.transactions import Database
from flows.service.store.work import Work

__all__ = ["ServiceStore"]


class ServiceStore(Intake, Work, Directory, Access):
    """Requests, sessions, runs, samplers, checkpoints, keys and audit in one database; safe for threads.

    Any number of processes may open it, one of them as the worker.
    """

    def __init__(self, url: str, clock: Callable[[], float] | None = None) -> None:
        """`url`: `sqlite:///FILE` or `postgresql://USER:PASSWORD@HOST/NAME`. Raises: SettingsError, BackendError.

        clock: None = one that does not jump (`service_clock`), the same for all processes of the store.
        """
        database = Database(url)
        Intake.__init__(self, database, clock or service_clock(database))

    def now(self) -> float:
        """The store's time, seconds since 1970: deadlines and lifetimes are given in it."""
        return self._clock()

    def changes(self) -> int:
        """A number that differs when another connection has committed since; take it before reading."""
        return self._database.changes()

    def wait_for_change(self, seen: int, timeout: float, is_over: threading.Event | None = None) -> int:
        """Wait until `changes()` is not `seen`, at most `timeout` seconds or until `is_over`; its present value."""
        return self._database.wait_for_change(seen, timeout, is_over)

    def copy_log(self, most_bytes: int) -> None:
        """Copy SQLite's log into its file; begin it anew where it is longer. Nothing to do with PostgreSQL."""
        self._database.copy_log(most_bytes)

    def close(self) -> None:
        """Close all connections."""
        self._database.close()
