"""Connections and transactions of the store, and the service's clock.

One transaction writes at a time: by SQLite's own rule (BEGIN IMMEDIATE), by an advisory lock in PostgreSQL. Positions
in an order are therefore committed in that order, and readers can follow it. A commit survives a crash of the process.
It survives a crash of the machine with PostgreSQL's default settings, and with SQLite once the log is synced
(`StoreDatabase.sync_to_disk`). The sync happens outside of transactions, so nobody holds the writer's lock while
waiting for the disk.

The clock counts seconds since 1970 and does not jump when the machine's clock is set. Ages decide what expires, and
moving the wall clock forward by an hour must not age anything by an hour. The first process that opens a store after a
boot records the offset between wall clock and time since boot; all processes then add that offset to the time since
boot. Only the wall clock can measure the time between two boots, but it is never believed to have gone backwards.
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
LOCK_RETRY_SECONDS = 0.0005  # between attempts to get a lock, which is held for about a millisecond
WRITER_LOCK_ID = 0x706F7374  # PostgreSQL's advisory lock of writers
PAGE_BYTES = 4096  # SQLite's page size
# Any commit beyond this copies SQLite's log; `checkpoint_log` normally runs before.
AUTOCHECKPOINT_PAGES = 32_768
RESTART_SECONDS = 0.05  # longest wait of writers for readers of a log that is being restarted
MICROSECONDS_PER_SECOND = 1_000_000
_WRITE_OPTION = "service_writes"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LATEST_TIME_KEY = "clock.latest"

# When a transaction reaches the disk:
# now                 before the call returns
# on_acknowledgement  before anybody acknowledges it (`StoreDatabase.sync_to_disk`)
# later               with the next transaction that is synced, which suffices for facts that can be determined again
Durability = Literal["now", "on_acknowledgement", "later"]


class StoreDatabase:
    """Database opened by URL: `sqlite:///FILE` or `postgresql://...`. Missing tables are created."""

    def __init__(self, url: str) -> None:
        """Open the database. Raises: SettingsError for an invalid URL; BackendError if the database does not answer."""
        try:
            parsed = sa.make_url(url)
        except ArgumentError:  # the original message could contain a password
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
            create_file_once(self._file, "", mode=0o600)  # contains the users' data
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
        """Return SQLite's log; None = every commit is synced by the database itself."""
        if not self.is_sqlite:
            return None
        with self.read_transaction() as connection:
            mode = connection.exec_driver_sql("PRAGMA journal_mode").scalar()
        return WriteAheadLog(self._file) if mode == "wal" else None

    def _create_tables(self) -> None:
        with self.write_transaction() as connection:
            metadata.create_all(connection)
            store_format = connection.scalar(
                sa.select(counters.c.value).where(counters.c.name == "format")
            )
            if store_format is None:
                connection.execute(counters.insert().values(name="format", value=STORE_FORMAT))
            elif store_format != STORE_FORMAT:
                raise SettingsError(
                    f"store: format {store_format} of another version of the service, expected {STORE_FORMAT}"
                )

    @contextmanager
    def read_transaction(self) -> Iterator[sa.Connection]:
        """Yield a connection with one consistent view. Raises: BackendError."""
        with _convert_database_errors(), self._engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def write_transaction(self, durability: Durability = "now") -> Iterator[sa.Connection]:
        """Yield the connection of the only writer; commit when the block ends.

        Raises: BackendError; ServiceError (user) for a value that the database refuses.
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
        """Sync everything that any process has committed so far to disk. Raises: BackendError."""
        if self._log is None:
            return
        try:
            self._log.sync_commits()
        except OSError as error:
            raise BackendError(f"the service's store: {error.strerror or error}") from error

    def checkpoint_log(self, max_bytes: int) -> None:
        """Copy SQLite's log into the database file, alongside other transactions; restart the log if it is longer.

        Raises: BackendError.
        """
        if self._log is None:
            return
        with _convert_database_errors(), self._engine.connect() as connection:
            raw: Any = connection.connection.dbapi_connection
            # The log file never shrinks; `pages` counts those in use.
            _, pages, _ = raw.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            if pages * PAGE_BYTES <= max_bytes:
                return
            _set_busy_timeout(raw, RESTART_SECONDS)
            try:
                raw.execute("PRAGMA wal_checkpoint(RESTART)")
            finally:
                _set_busy_timeout(raw, BUSY_SECONDS)

    def read_change_counter(self) -> int:
        """Return a number that changes with every commit by anybody. Raises: BackendError."""
        if not self.is_sqlite:
            query = sa.select(counters.c.value).where(counters.c.name == "changes")
            with self.read_transaction() as connection:
                return connection.scalar(query) or 0
        with self._change_lock, _convert_database_errors():
            if self._change_connection is None:
                self._change_connection = sqlite3.connect(self._file, check_same_thread=False)
            return int(self._change_connection.execute("PRAGMA data_version").fetchone()[0])

    def wait_for_change(
        self, seen: int, timeout: float, is_over: threading.Event | None = None
    ) -> int:
        """Wait until `read_change_counter()` is not `seen`; return its current value.

        The wait ends after `timeout` seconds or when `is_over` is set. It polls every millisecond during the first
        second and then every 10 ms. A poll of SQLite takes microseconds.
        """
        started_at = time.monotonic()
        while (counter := self.read_change_counter()) == seen:
            waited = time.monotonic() - started_at
            if waited >= timeout or (is_over is not None and is_over.is_set()):
                break
            time.sleep(0.001 if waited < 1 and self.is_sqlite else 0.01)
        return counter

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
    """Increase a counter and return its new value. Counters never decrease."""
    value = connection.scalar(_INCREMENT_COUNTER, {"counter": name, "by": by})
    if value is None:
        connection.execute(counters.insert().values(name=name, value=by))
        return by
    return int(value)


def _configure_connection(connection: Any, record: object) -> None:
    connection.isolation_level = None  # transactions begin in `_begin_transaction`
    # SQLite refuses to change the journal mode in two connections at the same time.
    (mode,) = _execute_when_free(connection, "PRAGMA journal_mode=WAL").fetchone()
    # Without a log (some file systems cannot share memory) every commit must be synced by SQLite itself.
    for pragma in (
        f"synchronous={'NORMAL' if mode == 'wal' else 'FULL'}",
        "temp_store=MEMORY",
        f"wal_autocheckpoint={AUTOCHECKPOINT_PAGES}",
    ):
        connection.execute(f"PRAGMA {pragma}")


def _set_busy_timeout(connection: Any, seconds: float) -> None:
    """Set how long SQLite waits for a lock."""
    connection.execute(f"PRAGMA busy_timeout={int(1000 * seconds)}")


def _begin_transaction(connection: sa.Connection) -> None:
    raw: Any = connection.connection.dbapi_connection
    if not connection.get_execution_options().get(_WRITE_OPTION):
        raw.execute("BEGIN")
        return
    _execute_when_free(raw, "BEGIN IMMEDIATE")


def _execute_when_free(connection: Any, statement: str) -> Any:
    """Execute a statement that needs exclusive access to the database, retrying while it is locked.

    SQLite's own waiting sleeps longer each time, up to 100 ms, whatever other connections need. It does not wait at all
    when two readers both want to write.
    """
    _set_busy_timeout(connection, 0.0)
    try:
        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                return connection.execute(statement)
            except sqlite3.OperationalError as error:
                if (
                    error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY
                    or time.monotonic() > deadline
                ):
                    raise
                time.sleep(LOCK_RETRY_SECONDS)
    finally:
        _set_busy_timeout(connection, BUSY_SECONDS)


@contextmanager
def _convert_database_errors() -> Iterator[None]:
    try:
        yield
    except DataError as error:  # a row is invalid; the database works
        reason = " ".join(str(error.orig).split())[:300]
        raise ServiceError(f"the service's store cannot hold a value: {reason}", "user") from error
    except (DBAPIError, sqlite3.Error) as error:
        cause = error.orig if isinstance(error, DBAPIError) else error
        raise BackendError(f"the service's store: {' '.join(str(cause).split())}") from error


def find_sqlite_file(url: str) -> Path | None:
    """Return the file of a sqlite:///FILE URL; None for another URL."""
    try:
        parsed = sa.make_url(url)
    except ArgumentError:
        return None
    is_file = parsed.get_backend_name() == "sqlite" and parsed.database not in (
        None,
        "",
        ":memory:",
    )
    return Path(str(parsed.database)) if is_file else None


def read_boot_id() -> str:
    """Return the id of the machine's current boot; "" if the system does not report it."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def read_boot_seconds() -> float:
    """Return seconds since boot, including suspended time."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def create_service_clock(
    database: StoreDatabase,
    wall_clock: Callable[[], float] = time.time,
    boot_clock: Callable[[], float] = read_boot_seconds,
    read_boot: Callable[[], str] = read_boot_id,
) -> Callable[[], float]:
    """Create the clock of a store. Systems without a time since boot use the wall clock."""
    if not hasattr(time, "CLOCK_BOOTTIME") or not (boot_id := read_boot()):
        return wall_clock
    key, value = f"clock.{boot_id}"[:64], counters.c.value

    def read_stored(connection: sa.Connection, name: str) -> int | None:
        stored: int | None = connection.scalar(sa.select(value).where(counters.c.name == name))
        return stored

    with database.read_transaction() as connection:
        offset = read_stored(connection, key)
    if offset is None:
        with database.write_transaction() as connection:
            offset = read_stored(connection, key)
            if offset is None:
                latest = read_stored(connection, _LATEST_TIME_KEY) or 0
                now = max(int(wall_clock() * MICROSECONDS_PER_SECOND), latest)
                offset = now - int(boot_clock() * MICROSECONDS_PER_SECOND)
                is_clock = counters.c.name.startswith("clock.")
                earlier_boots = is_clock & (counters.c.name != _LATEST_TIME_KEY)
                connection.execute(counters.delete().where(earlier_boots))
                connection.execute(counters.insert().values(name=key, value=offset))
    offset_seconds = offset / MICROSECONDS_PER_SECOND
    return lambda: offset_seconds + boot_clock()


def record_latest_time(connection: sa.Connection, now: float) -> None:
    """Record the latest known time. After the next boot the clock does not start before it."""
    latest = {"value": int(now * MICROSECONDS_PER_SECOND)}
    if not connection.execute(
        counters.update().where(counters.c.name == _LATEST_TIME_KEY).values(latest)
    ).rowcount:
        connection.execute(counters.insert().values(name=_LATEST_TIME_KEY, **latest))
