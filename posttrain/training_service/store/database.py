"""Connections and transactions of the store.

One transaction writes at a time: SQLite's own rule (BEGIN IMMEDIATE), an advisory lock in PostgreSQL. So places in an
order that readers follow are committed in that order. What is committed outlives the process. It outlives the machine
with PostgreSQL's default; with SQLite once the log is synced (`Database.sync`), which happens outside of transactions:
nobody holds the writer's lock while he waits for the disk.

The service's time: seconds since 1970 that do not jump when somebody sets the machine's clock.

Ages decide what expires, so an hour forward by the wall clock must not be an hour of age. The first process that opens
a store after a boot notes there how the wall clock stood to the time since boot; from then on all processes add that
to the time since boot. Between two boots the wall clock alone can tell how much time has passed; it is never taken to
have gone back.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError

from posttrain.training_service.store.tables import STORE_FORMAT, counters, metadata
from rl_core.errors import BackendError, ServiceError, SettingsError
from rl_core.storage.atomic_files import create_file_once, make_folder
from rl_core.storage.write_ahead_log import WriteAheadLog

BUSY_SECONDS = 30.0
LOCK_RETRY_SECONDS = (
    0.0005  # between two tries to get a lock, which is held for about a millisecond
)
WRITER_LOCK_ID = 0x706F7374  # PostgreSQL's advisory lock of writers
PAGE_BYTES = 4096  # bytes, of SQLite
AUTOCHECKPOINT_PAGES = (
    32_768  # after which any commit copies SQLite's log; `copy_log` comes before it
)
RESTART_SECONDS = 0.05  # that writers wait at most for readers of a log that is to begin anew
_WRITE_OPTION = "service_writes"

# When a transaction is to be on the disk: before the call returns; before a reader tells anybody (`Database.sync`);
# with the next one that is, which is enough for what can be found out again.
Durability = Literal["now", "when told", "later"]


class StoreDatabase:
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
            raise SettingsError(
                f"store: {parsed.drivername} is not supported; use sqlite or postgresql"
            )
        self._file = Path(parsed.database or "")
        if self.is_sqlite:
            if not parsed.database or parsed.database == ":memory:":
                raise SettingsError(
                    "store: sqlite needs a file, as in sqlite:///outputs/service/service.db"
                )
            make_folder(self._file.parent)
            create_file_once(self._file, "", mode=0o600)  # it holds what users send
        self._engine = sa.create_engine(
            url, pool_size=16, max_overflow=64, pool_pre_ping=not self.is_sqlite
        )
        self._writer_lock = threading.RLock()
        self._change_lock = threading.Lock()
        self._change_connection: sqlite3.Connection | None = None
        if self.is_sqlite:
            sa.event.listen(self._engine, "connect", _configure_connection)
            sa.event.listen(self._engine, "begin", _begin_transaction)
        self._log = self._open_write_ahead_log()
        self._create_tables()

    def _open_write_ahead_log(self) -> WriteAheadLog | None:
        """SQLite's log; None = every commit is on the disk by itself."""
        if not self.is_sqlite:
            return None
        with self.read_transaction() as connection:
            mode = connection.exec_driver_sql("PRAGMA journal_mode").scalar()
        return WriteAheadLog(self._file) if mode == "wal" else None

    def _create_tables(self) -> None:
        with self.write_transaction() as connection:
            metadata.create_all(connection)
            found = connection.scalar(
                sa.select(counters.c.value).where(counters.c.name == "format")
            )
            if found is None:
                connection.execute(counters.insert().values(name="format", value=STORE_FORMAT))
            elif found != STORE_FORMAT:
                raise SettingsError(
                    f"store: format {found} of another version of the service, expected {STORE_FORMAT}"
                )

    @contextmanager
    def read_transaction(self) -> Iterator[sa.Connection]:
        """One consistent view. Raises: BackendError."""
        with _convert_database_errors(), self._engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def write_transaction(self, durability: Durability = "now") -> Iterator[sa.Connection]:
        """A transaction of one writer, committed when the block ends.

        Raises: BackendError; ServiceError (user) for a value that the database does not take.
        """
        with self._writer_lock, _convert_database_errors(), self._engine.connect() as connection:
            connection = connection.execution_options(**{_WRITE_OPTION: True})
            with connection.begin():
                if not self.is_sqlite:
                    connection.execute(
                        sa.text("select pg_advisory_xact_lock(:lock)"), {"lock": WRITER_LOCK_ID}
                    )
                    if durability == "later":
                        connection.execute(sa.text("set local synchronous_commit to off"))
                yield connection
                if not self.is_sqlite:
                    next_counter_value(connection, "changes")
        if durability == "now":
            self.sync_to_disk()

    def sync_to_disk(self) -> None:
        """Have everything on the disk that anybody has committed by now. Raises: BackendError."""
        if self._log is None:
            return
        try:
            self._log.sync_commits()
        except OSError as error:
            raise BackendError(f"the service's store: {error.strerror or error}") from error

    def checkpoint_log(self, max_bytes: int) -> None:
        """Copy SQLite's log into the database file beside others' transactions, and begin it anew where it is longer.

        Raises: BackendError.
        """
        if self._log is None:
            return
        with _convert_database_errors(), self._engine.connect() as connection:
            raw: Any = connection.connection.dbapi_connection
            _, pages, _ = raw.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            if (
                pages * PAGE_BYTES <= max_bytes
            ):  # of the file, which stays as large as it ever was, those in use
                return
            _set_busy_timeout(raw, RESTART_SECONDS)
            try:
                raw.execute("PRAGMA wal_checkpoint(RESTART)")
            finally:
                _set_busy_timeout(raw, BUSY_SECONDS)

    def read_change_counter(self) -> int:
        """A number that differs when anybody has committed since. Raises: BackendError."""
        if not self.is_sqlite:
            with self.read_transaction() as connection:
                return (
                    connection.scalar(
                        sa.select(counters.c.value).where(counters.c.name == "changes")
                    )
                    or 0
                )
        with self._change_lock, _convert_database_errors():
            if self._change_connection is None:
                self._change_connection = sqlite3.connect(self._file, check_same_thread=False)
            return int(self._change_connection.execute("PRAGMA data_version").fetchone()[0])

    def wait_for_change(
        self, seen: int, timeout: float, is_over: threading.Event | None = None
    ) -> int:
        """Wait until `changes()` is no longer `seen`, the time is over, or `is_over` is set; its present value.

        Looks every millisecond at first, then every 10: a look at SQLite takes microseconds.
        """
        began = time.monotonic()
        while (now := self.read_change_counter()) == seen:
            waited = time.monotonic() - began
            if waited >= timeout or (is_over is not None and is_over.is_set()):
                break
            time.sleep(0.001 if waited < 1 and self.is_sqlite else 0.01)
        return now

    def close_connections(self) -> None:
        """Close all connections."""
        with self._change_lock:
            if self._change_connection is not None:
                self._change_connection.close()
                self._change_connection = None
        self._engine.dispose()
        if self._log is not None:
            self._log.close()


_INCREMENT_COUNTER = (
    counters.update()
    .where(counters.c.name == sa.bindparam("counter"))
    .values(value=counters.c.value + sa.bindparam("by"))
    .returning(counters.c.value)
)


def next_counter_value(connection: sa.Connection, name: str, by: int = 1) -> int:
    """The new value of a counter, which never falls."""
    value = connection.scalar(_INCREMENT_COUNTER, {"counter": name, "by": by})
    if value is None:
        connection.execute(counters.insert().values(name=name, value=by))
        return by
    return int(value)


def _configure_connection(connection: Any, record: object) -> None:
    connection.isolation_level = None  # transactions begin where `_begin` says
    (mode,) = _execute_when_free(
        connection, "PRAGMA journal_mode=WAL"
    ).fetchone()  # SQLite refuses the second of two at once
    # without a log (some file systems cannot share memory) every commit has to wait for the disk by itself
    for pragma in (
        f"synchronous={'NORMAL' if mode == 'wal' else 'FULL'}",
        "temp_store=MEMORY",
        f"wal_autocheckpoint={AUTOCHECKPOINT_PAGES}",
    ):
        connection.execute(f"PRAGMA {pragma}")


def _set_busy_timeout(connection: Any, seconds: float) -> None:
    """Time that SQLite waits for a lock."""
    connection.execute(f"PRAGMA busy_timeout={int(1000 * seconds)}")


def _begin_transaction(connection: sa.Connection) -> None:
    raw: Any = connection.connection.dbapi_connection
    if not connection.get_execution_options().get(_WRITE_OPTION):
        raw.execute("BEGIN")
        return
    _execute_when_free(raw, "BEGIN IMMEDIATE")


def _execute_when_free(connection: Any, statement: str) -> Any:
    """Execute a statement that needs the database to itself.

    SQLite's own waiting sleeps longer each time, up to 100 ms, whatever the others need; and it does not wait at all
    where two that read both want to write.
    """
    _set_busy_timeout(connection, 0.0)
    try:
        end = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                return connection.execute(statement)
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                    raise
                time.sleep(LOCK_RETRY_SECONDS)
    finally:
        _set_busy_timeout(connection, BUSY_SECONDS)


@contextmanager
def _convert_database_errors() -> Iterator[None]:
    try:
        yield
    except DataError as error:  # the fault of one row, not of the database
        words = " ".join(str(error.orig).split())[:300]
        raise ServiceError(
            f"a value that the service's store cannot hold: {words}", "user"
        ) from error
    except (DBAPIError, sqlite3.Error) as error:
        reason = error.orig if isinstance(error, DBAPIError) else error
        raise BackendError(f"the service's store: {' '.join(str(reason).split())}") from error


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LATEST_TIME_KEY = "clock.latest"
MICROSECONDS_PER_SECOND = 1_000_000


def read_boot_id() -> str:
    """Name of this boot of the machine; "" where the system does not tell."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def read_boot_seconds() -> float:
    """Seconds since boot, those of suspension included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def create_service_clock(
    database: StoreDatabase,
    wall_clock: Callable[[], float] = time.time,
    boot_clock: Callable[[], float] = read_boot_seconds,
    read_boot: Callable[[], str] = read_boot_id,
) -> Callable[[], float]:
    """The clock of a store. Where the system has no time since boot: the wall clock."""
    if not hasattr(time, "CLOCK_BOOTTIME") or not (name := read_boot()):
        return wall_clock
    key, value = f"clock.{name}"[:64], counters.c.value

    def stored(connection: sa.Connection, one: str) -> int | None:
        found: int | None = connection.scalar(sa.select(value).where(counters.c.name == one))
        return found

    with database.read_transaction() as connection:
        offset = stored(connection, key)
    if offset is None:
        with database.write_transaction() as connection:
            offset = stored(connection, key)
            if offset is None:
                latest = stored(connection, _LATEST_TIME_KEY) or 0
                offset = max(int(wall_clock() * MICROSECONDS_PER_SECOND), latest) - int(
                    boot_clock() * MICROSECONDS_PER_SECOND
                )
                old = counters.c.name.startswith("clock.") & (counters.c.name != _LATEST_TIME_KEY)
                connection.execute(counters.delete().where(old))  # of earlier boots
                connection.execute(counters.insert().values(name=key, value=offset))
    found = offset / MICROSECONDS_PER_SECOND
    return lambda: found + boot_clock()


def record_latest_time(connection: sa.Connection, now: float) -> None:
    """Keep the newest moment, from which the next boot goes on at the earliest."""
    latest = {"value": int(now * MICROSECONDS_PER_SECOND)}
    if not connection.execute(
        counters.update().where(counters.c.name == _LATEST_TIME_KEY).values(latest)
    ).rowcount:
        connection.execute(counters.insert().values(name=_LATEST_TIME_KEY, **latest))
