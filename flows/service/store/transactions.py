"""Connections and transactions of the store.

One transaction writes at a time: SQLite's own rule (BEGIN IMMEDIATE), an advisory lock in PostgreSQL. So places in an
order that readers follow are committed in that order. What is committed outlives the process and, with SQLite's
synchronous=FULL and PostgreSQL's default, the machine.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, DBAPIError

from flows.service.store.tables import FORMAT, counters, metadata
from rl_core.errors import BackendError, SettingsError
from rl_core.storage.single_files import create_once, make_folder

__all__ = ["Database", "GroupCommit", "counted"]

BUSY_SECONDS = 30.0
LOCK = 0x706F7374  # PostgreSQL's advisory lock of writers
_WRITES = "service_writes"


class Database:
    """A database by URL: `sqlite:///FILE` or `postgresql://...`; tables are made where they are not there."""

    def __init__(self, url: str) -> None:
        """Raises: SettingsError for a URL that is none; BackendError if the database does not answer."""
        try:
            parsed = sa.make_url(url)
        except ArgumentError:  # its message would repeat a password
            raise SettingsError(
                "store: is no URL; write sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME"
            ) from None
        self.is_sqlite = parsed.get_backend_name() == "sqlite"
        if not self.is_sqlite and parsed.get_backend_name() != "postgresql":
            raise SettingsError(f"store: {parsed.drivername} is not supported; use sqlite or postgresql")
        self._file = Path(parsed.database or "")
        if self.is_sqlite:
            if not parsed.database or parsed.database == ":memory:":
                raise SettingsError("store: sqlite needs a file, as in sqlite:///outputs/service/service.db")
            make_folder(self._file.parent)
            create_once(self._file, "", mode=0o600)  # it holds what users send
        self._engine = sa.create_engine(url, pool_size=16, max_overflow=64, pool_pre_ping=not self.is_sqlite)
        self._writer = threading.RLock()
        self._watch_guard = threading.Lock()
        self._watched: sqlite3.Connection | None = None
        if self.is_sqlite:
            sa.event.listen(self._engine, "connect", _prepare)
            sa.event.listen(self._engine, "begin", _begin)
        self._make_tables()

    def _make_tables(self) -> None:
        with self.writing() as connection:
            metadata.create_all(connection)
            found = connection.scalar(sa.select(counters.c.value).where(counters.c.name == "format"))
            if found is None:
                connection.execute(counters.insert().values(name="format", value=FORMAT))
            elif found != FORMAT:
                raise SettingsError(f"store: format {found} of another version of the service, expected {FORMAT}")

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """One consistent view. Raises: BackendError."""
        with _named_errors(), self._engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def writing(self, *, synced: bool = True) -> Iterator[sa.Connection]:
        """A transaction of one writer, committed when the block ends. Raises: BackendError.

        synced: on the disk by then; else with the next one that is, which is enough for what can be found out again.
        """
        with self._writer, _named_errors(), self._engine.connect() as connection:
            connection = connection.execution_options(**{_WRITES: "FULL" if synced else "NORMAL"})
            with connection.begin():
                if not self.is_sqlite:
                    connection.execute(sa.text("select pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
                    if not synced:
                        connection.execute(sa.text("set local synchronous_commit to off"))
                yield connection
                if not self.is_sqlite:
                    counted(connection, "changes")

    def changes(self) -> int:
        """A number that differs when anybody has committed since."""
        if not self.is_sqlite:
            with self.reading() as connection:
                return connection.scalar(sa.select(counters.c.value).where(counters.c.name == "changes")) or 0
        with self._watch_guard:
            if self._watched is None:
                self._watched = sqlite3.connect(self._file, check_same_thread=False)
            return int(self._watched.execute("PRAGMA data_version").fetchone()[0])

    def wait_for_change(self, seen: int, timeout: float) -> int:
        """Wait until `changes()` is no longer `seen`, or the time is over; its present value.

        Looks every millisecond at first, then every 10: a look at SQLite takes microseconds.
        """
        began = time.monotonic()
        while (now := self.changes()) == seen:
            waited = time.monotonic() - began
            if waited >= timeout:
                break
            time.sleep(0.001 if waited < 1 and self.is_sqlite else 0.01)
        return now

    def close(self) -> None:
        """Close all connections."""
        with self._watch_guard:
            if self._watched is not None:
                self._watched.close()
                self._watched = None
        self._engine.dispose()


_RAISED = (
    counters.update().where(counters.c.name == sa.bindparam("counter"))
    .values(value=counters.c.value + sa.bindparam("by")).returning(counters.c.value)
)  # fmt: skip


def counted(connection: sa.Connection, name: str, by: int = 1) -> int:
    """The new value of a counter, which never falls."""
    value = connection.scalar(_RAISED, {"counter": name, "by": by})
    if value is None:
        connection.execute(counters.insert().values(name=name, value=by))
        return by
    return int(value)


def _prepare(connection: Any, record: object) -> None:
    connection.isolation_level = None  # transactions begin where `_begin` says
    for pragma in (
        f"busy_timeout={int(1000 * BUSY_SECONDS)}", "journal_mode=WAL", "synchronous=FULL", "temp_store=MEMORY",
    ):  # fmt: skip
        connection.execute(f"PRAGMA {pragma}")


def _begin(connection: sa.Connection) -> None:
    writes = connection.get_execution_options().get(_WRITES)
    if writes:
        connection.exec_driver_sql(f"PRAGMA synchronous={writes}")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except DBAPIError as error:
        raise BackendError(f"the service's store: {' '.join(str(error.orig).split())}") from error


Given = TypeVar("Given")
Got = TypeVar("Got")


class _Place(Generic[Given, Got]):
    """A call that waits for a transaction."""

    __slots__ = ("answer", "error", "given", "is_done")

    def __init__(self, given: Given) -> None:
        self.given = given
        self.answer: Got | None = None
        self.error: BaseException | None = None
        self.is_done = False


class GroupCommit(Generic[Given, Got]):
    """Calls of several threads in one transaction: one thread does all that wait, for one wait for the disk."""

    def __init__(self, work: Callable[[list[Given]], list[Got | Exception]]) -> None:
        """`work`: answers in order; an exception is raised in the thread that called."""
        self._work = work
        self._turn = threading.Lock()
        self._guard = threading.Lock()
        self._waiting: list[_Place[Given, Got]] = []

    def __call__(self, given: Given) -> Got:
        """The answer to one call, after the transaction that it is part of."""
        place: _Place[Given, Got] = _Place(given)
        with self._guard:
            self._waiting.append(place)
        with self._turn:
            if not place.is_done:
                self._do_all()
        if place.error is not None:
            raise place.error
        return place.answer  # type: ignore[return-value]

    def _do_all(self) -> None:
        with self._guard:
            places, self._waiting = self._waiting, []
        try:
            answers = self._work([place.given for place in places])
        except BaseException as error:
            for place in places:
                place.error, place.is_done = error, True
            return
        for place, answer in zip(places, answers, strict=True):
            if isinstance(answer, Exception):
                place.error = answer
            else:
                place.answer = answer
            place.is_done = True
