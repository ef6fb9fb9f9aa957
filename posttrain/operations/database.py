"""PostgreSQL for Prefect and MLflow (`--database postgresql://...`), in separate databases.

Both store their schema version in a table of the same name, so they cannot share a database. `postgresql://host/team`
yields `team_prefect` and `team_mlflow`, created if absent.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_core.errors import BackendError, SettingsError

if TYPE_CHECKING:
    from sqlalchemy import URL

SQLITE = "sqlite"
DRIVERS = {"psycopg2": "MLflow", "asyncpg": "Prefect"}
CONNECT_SECONDS = 10


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
            f"--database: {' and '.join(missing)} is not installed; pip install -c constraints.txt -e '.[postgres]'"
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
