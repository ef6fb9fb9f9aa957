"""Durable state of the training service: SQLite (WAL) or PostgreSQL through SQLAlchemy Core.

records      rows as plain data, and the errors of acceptance
tables       the tables
transactions connections and transactions
intake       the server's side of requests: accept, look up, wait, forget, cancel
work         the worker's side: ready, claim, finish, replay, snapshots
directory    sessions, runs, samplers and checkpoints
access       API keys and audit
durable      ServiceStore: all of it

The store of a training service: everything that server and worker share.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from posttrain.training_service.store.database import StoreDatabase, create_service_clock
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
    "SessionRecord",
    "StoredRequest",
    "TrainingRunRecord",
]


__all__ = ["ServiceStore"]


class ServiceStore(RequestIntake, WorkQueue, ResourceDirectory, AccessControl):
    """Requests, sessions, runs, samplers, checkpoints, keys and audit in one database; safe for threads.

    Any number of processes may open it, one of them as the worker.
    """

    def __init__(self, url: str, clock: Callable[[], float] | None = None) -> None:
        """`url`: `sqlite:///FILE` or `postgresql://USER:PASSWORD@HOST/NAME`. Raises: SettingsError, BackendError.

        clock: None = one that does not jump (`create_service_clock`), the same for all processes of the store.
        """
        database = StoreDatabase(url)
        RequestIntake.__init__(self, database, clock or create_service_clock(database))

    def read_clock(self) -> float:
        """The store's time, seconds since 1970: deadlines and lifetimes are given in it."""
        return self._clock()

    def read_change_counter(self) -> int:
        """A number that differs when another connection has committed since; take it before reading."""
        return self._database.read_change_counter()

    def wait_for_change(
        self, seen: int, timeout: float, is_over: threading.Event | None = None
    ) -> int:
        """Wait until `changes()` is not `seen`, at most `timeout` seconds or until `is_over`; its present value."""
        return self._database.wait_for_change(seen, timeout, is_over)

    def checkpoint_log(self, max_bytes: int) -> None:
        """Copy SQLite's log into its file; begin it anew where it is longer. Nothing to do with PostgreSQL."""
        self._database.checkpoint_log(max_bytes)

    def close(self) -> None:
        """Close all connections."""
        self._database.close_connections()
