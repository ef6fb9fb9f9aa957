"""Durable state of the training service in SQLite (WAL) or PostgreSQL, through SQLAlchemy Core.

records            rows as plain data, and the errors of acceptance
tables             table definitions
database           connections, transactions and the service's clock
intake             the server's side of requests: accept, look up, wait, drop, cancel
work_queue         the worker's side: ready, claim, finish, replay, snapshots
waiting_requests   what waits, in the worker's memory
directory          sessions, runs, samplers and checkpoints; API keys and audit
overview           queue statistics, and a read-only view for pages

`ServiceStore` combines them: everything that server and worker share.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from posttrain.training_service.paths import ServiceFolder
from posttrain.training_service.store.database import (
    StoreDatabase,
    create_service_clock,
    find_sqlite_file,
)
from posttrain.training_service.store.directory import (
    DEFAULT_PROJECT,
    AccessControl,
    ResourceDirectory,
)
from posttrain.training_service.store.intake import RequestIntake
from posttrain.training_service.store.records import (
    ApiKey,
    AuditEntry,
    CheckpointRecord,
    KeyLimitExceeded,
    NewRequest,
    Page,
    RequestForgotten,
    RequestKind,
    ResultBody,
    SamplerRecord,
    SequenceIdReused,
    SessionRecord,
    StoredRequest,
    TrainingRunRecord,
)
from posttrain.training_service.store.work_queue import WorkQueue
from rl_core.errors import SettingsError
from rl_core.settings import ServiceSettings

__all__ = [
    "DEFAULT_PROJECT",
    "ResultBody",
    "ApiKey",
    "AuditEntry",
    "CheckpointRecord",
    "NewRequest",
    "KeyLimitExceeded",
    "Page",
    "RequestForgotten",
    "RequestKind",
    "SamplerRecord",
    "SequenceIdReused",
    "ServiceStore",
    "open_service_store",
    "SessionRecord",
    "StoredRequest",
    "TrainingRunRecord",
]


class ServiceStore(RequestIntake, WorkQueue, ResourceDirectory, AccessControl):
    """Requests, sessions, runs, samplers, checkpoints, keys and audit in one database. Thread-safe.

    Any number of processes may open it, one of them as the worker.
    """

    def __init__(self, url: str, clock: Callable[[], float] | None = None) -> None:
        """Open the database.

        Args:
            url: `sqlite:///FILE` or `postgresql://USER:PASSWORD@HOST/NAME`.
            clock: None = a clock that does not jump (`create_service_clock`), the same for all processes of the store.
        Raises: SettingsError, BackendError.
        """
        database = StoreDatabase(url)
        RequestIntake.__init__(self, database, clock or create_service_clock(database))

    def read_clock(self) -> float:
        """Return the store's time in seconds since 1970. Deadlines and lifetimes use it."""
        return self._clock()

    def read_change_counter(self) -> int:
        """Return a number that changes when another connection commits. Read it before reading data."""
        return self._database.read_change_counter()

    def wait_for_change(
        self, seen: int, timeout: float, is_over: threading.Event | None = None
    ) -> int:
        """Wait until `read_change_counter()` is not `seen`; return its current value.

        The wait ends after `timeout` seconds or when `is_over` is set.
        """
        return self._database.wait_for_change(seen, timeout, is_over)

    def checkpoint_log(self, max_bytes: int) -> None:
        """Copy SQLite's log into the database file and restart the log if it is longer than `max_bytes`.

        Does nothing for PostgreSQL.
        """
        self._database.checkpoint_log(max_bytes)

    def close(self) -> None:
        """Close all connections."""
        self._database.close_connections()


def open_service_store(settings: ServiceSettings) -> ServiceStore:
    """Open a service's store.

    Raises: SettingsError for an invalid URL, or a store without a training run beside snapshots of runs: it is lost, or
        another one; BackendError if the database does not answer.
    """
    snapshots = ServiceFolder(Path(settings.folder)).snapshots_root
    num_runs = len(list(snapshots.glob("[!.]*"))) if snapshots.is_dir() else 0
    advice = (
        f"but {snapshots} holds snapshots of {num_runs} training runs; restore the store from a backup, or move "
        f"{settings.folder} away to begin with an empty service"
    )
    file = find_sqlite_file(settings.store_url)
    if num_runs and file is not None and not (file.is_file() and file.stat().st_size):
        problem = "is empty" if file.is_file() else "does not exist"
        raise SettingsError(f"store: {file} {problem}, {advice}")
    store = ServiceStore(settings.store_url)
    if num_runs and not store.list_runs(limit=1).total:
        store.close()
        raise SettingsError(f"store: it has no training run, {advice}")
    return store
