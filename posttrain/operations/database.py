"""Databases of Prefect and MLflow: PostgreSQL (`--database postgresql://...`), and what locks the sqlite files.

Both store their schema version in a table of the same name, so they cannot share a database. `postgresql://host/team`
yields `team_prefect` and `team_mlflow`, created if absent.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.runtime.embedded_server import locate_database
from rl_core.errors import BackendError, SettingsError
from rl_core.processes.children import START_LINE

if TYPE_CHECKING:
    from sqlalchemy import URL

SQLITE = "sqlite"
DRIVERS = {"psycopg2": "MLflow", "asyncpg": "Prefect"}
CONNECT_SECONDS = 10
LOCK_MESSAGE = b"database is locked"
LOG_TAIL_BYTES = 1_000_000  # of a server's log, which is searched for the message
LOCK_LOOK_SECONDS = 0.3  # a lock that two looks see is held, not just passing
POSTGRES_ADVICE = (
    "sqlite has one writer at a time; for several runs at once take PostgreSQL: `posttrain down`, then `posttrain up "
    "--database postgresql://USER@HOST/NAME`, which starts empty"
)


@dataclass(frozen=True, slots=True)
class DatabaseAddresses:
    """Addresses with passwords, only for the servers' environment; "" = sqlite files in the output folder."""

    prefect: str = ""
    mlflow: str = ""


def _parse_address(address: str) -> URL:
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        url = make_url(address)
    except (ArgumentError, ValueError):  # its message would repeat the address, with the password
        raise SettingsError(
            "--database: not a valid address; write postgresql://USER:PASSWORD@HOST:5432/NAME, or leave it out for "
            "sqlite"
        ) from None
    if url.get_backend_name() not in ("postgresql", "postgres"):
        raise SettingsError(
            f"--database: {url.drivername} is not supported; write postgresql://USER:PASSWORD@HOST:5432/NAME, "
            "or leave it out for sqlite"
        )
    if not url.database:
        raise SettingsError(
            "--database: names no database; append one to the host, as in postgresql://HOST/team"
        )
    return url


def strip_password(address: str) -> str:
    """Return the address without its password, for output and files. Raises: SettingsError."""
    if address == SQLITE:
        return SQLITE
    from sqlalchemy import URL

    url = _parse_address(address)
    query = {key: value for key, value in url.query.items() if "password" not in key}
    return URL.create(
        "postgresql", url.username, None, url.host, url.port, url.database, query
    ).render_as_string()


def prepare_databases(address: str) -> DatabaseAddresses:
    """Create both databases if they do not exist.

    Raises: SettingsError for an invalid address, a missing driver, a refused login or a missing privilege;
    BackendError if the server does not respond.
    """
    if address == SQLITE:
        return DatabaseAddresses()
    url = _parse_address(address)
    missing = [name for name in DRIVERS if importlib.util.find_spec(name) is None]
    if missing:
        raise SettingsError(
            f"--database: {' and '.join(missing)} is not installed; python -m posttrain.install --extras postgres"
        )
    names = {tool: f"{url.database}_{tool}" for tool in ("prefect", "mlflow")}
    with _connect_to_server(url) as connection, connection.cursor() as cursor:
        for name in names.values():
            _create_database(cursor, name, url)
        cursor.execute("select 1 from pg_available_extensions where name = 'pg_trgm'")
        if cursor.fetchone() is None:
            raise SettingsError(
                f"--database: the server at {_format_host(url)} lacks the extension pg_trgm, which Prefect needs for "
                "search; install PostgreSQL's contrib package there"
            )
    return DatabaseAddresses(
        prefect=_format_address(_convert_for_asyncpg(url), "postgresql+asyncpg", names["prefect"]),
        mlflow=_format_address(url, "postgresql+psycopg2", names["mlflow"]),
    )


def _format_address(url: URL, driver: str, name: str) -> str:
    return url.set(drivername=driver, database=name).render_as_string(hide_password=False)


def _convert_for_asyncpg(url: URL) -> URL:
    """Convert an address for asyncpg: rename libpq's `sslmode` to `ssl` (same values), drop `connect_timeout`."""
    query = {("ssl" if key == "sslmode" else key): value for key, value in url.query.items()}
    query.pop("connect_timeout", None)
    return url.set(query=query)


def _format_host(url: URL) -> str:
    return f"{url.host or url.query.get('host') or 'localhost'}:{url.port or 5432}"


@contextmanager
def _connect_to_server(url: URL) -> Iterator[Any]:
    """Connect to an existing database of the server: `postgres`, or else the one in the address."""
    import psycopg2

    arguments: dict[str, Any] = {"connect_timeout": CONNECT_SECONDS, **url.query}
    parts = {"host": url.host, "port": url.port, "user": url.username, "password": url.password}
    arguments |= {key: value for key, value in parts.items() if value is not None}
    connection, problem = None, ""
    for name in ("postgres", url.database):
        try:
            connection = psycopg2.connect(dbname=name, **arguments)
            break
        except psycopg2.OperationalError as error:
            problem = problem or " ".join(str(error).split())
        except psycopg2.Error as error:  # a bad option in the address
            message = " ".join(str(error).split())
            raise SettingsError(f"--database: {message}") from None
    if connection is None:
        raise _explain_refusal(url, problem)
    connection.autocommit = True  # a database cannot be created within a transaction
    try:
        yield connection
    finally:
        connection.close()


def _explain_refusal(url: URL, problem: str) -> Exception:
    refusals = ("authentication failed", "no password supplied", "role")
    if any(text in problem for text in refusals):
        return SettingsError(
            f"--database: PostgreSQL at {_format_host(url)} refuses the login: {problem}; check user and password "
            "(the password may also be in PGPASSWORD or ~/.pgpass)"
        )
    return BackendError(
        f"PostgreSQL at {_format_host(url)} does not answer: {problem}; start it, or check host and port of --database "
        f"(`pg_isready -h {url.host or 'localhost'} -p {url.port or 5432}`)"
    )


def _create_database(cursor: Any, name: str, url: URL) -> None:
    import psycopg2
    from psycopg2 import errors, sql

    cursor.execute("select 1 from pg_database where datname = %s", (name,))
    if cursor.fetchone() is not None:
        return
    try:
        cursor.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    except errors.DuplicateDatabase:  # another `up` was faster
        return
    except psycopg2.Error as error:
        message = " ".join(str(error).split())
        raise SettingsError(
            f"--database: cannot create the database '{name}' at {_format_host(url)}: {message}; let an "
            f'administrator run: create database "{name}" owner "{url.username or "you"}"'
        ) from None


def describe_sqlite_locks(
    output: Path, prefect_home: Path, look_s: float = LOCK_LOOK_SECONDS
) -> list[str]:
    """Describe what locks the sqlite files of an output folder, and what their servers logged about locks.

    Returns: one line each, then what to do; [] = nothing.
    """
    files = (locate_database(prefect_home), output / "mlflow" / "mlflow.db")
    first = find_sqlite_writers(files)
    lines = []
    if first:
        time.sleep(look_s)
        still = find_sqlite_writers(files)
        lines += [
            f"{path} is locked by {_describe_process(pid)}"
            for path, pid in first.items()
            if still.get(path) == pid
        ]
    for name in ("prefect", "mlflow"):
        log = output / "logs" / f"{name}.log"
        if count := _count_since_start(log, LOCK_MESSAGE):
            times = "once" if count == 1 else f"{count} times"
            lines.append(
                f"{name} reported 'database is locked' {times} since its start (log: {log})"
            )
    return [*lines, POSTGRES_ADVICE] if lines else []


def find_sqlite_writers(files: tuple[Path, ...]) -> dict[Path, int]:
    """Find the process that holds a write lock on each sqlite file, or on its write-ahead index."""
    inodes: dict[tuple[int, int, int], Path] = {}
    for path in files:
        for name in (path, path.with_name(f"{path.name}-shm")):
            with contextlib.suppress(OSError):
                status = name.stat()
                device = status.st_dev
                inodes[os.major(device), os.minor(device), status.st_ino] = path
    writers: dict[Path, int] = {}
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:  # not Linux
        return {}
    for line in lines:
        words = line.split()
        if "->" in words or "WRITE" not in words:  # "->": waits for the lock
            continue
        with contextlib.suppress(ValueError, IndexError):
            kind = words.index("WRITE")
            major, minor, inode = words[kind + 2].split(":")
            locked = inodes.get((int(major, 16), int(minor, 16), int(inode)))
            pid = int(words[kind + 1])
            if locked is not None and pid > 0:
                writers[locked] = pid
    return writers


def _describe_process(pid: int) -> str:
    """Return a process's number with its command, as far as this user may read it."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return f"process {pid}"
    command = b" ".join(words).decode(errors="replace").strip()
    return f"process {pid} ({command[:80]})" if command else f"process {pid}"


def _count_since_start(log: Path, text: bytes) -> int:
    """Count a text in the newest part of a server's log, from the server's last start on; 0 without the file."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - LOG_TAIL_BYTES))
            return file.read().rpartition(START_LINE.encode())[2].count(text)
    except OSError:
        return 0
