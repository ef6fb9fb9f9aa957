"""Prefect's embedded server of a run: started in a separate session, with a database copied from a cache.

A new output folder would otherwise run all of Prefect's migrations, which takes longer than many a fully cached
pipeline run. The cached database has tables, and no rows except the migration number. A database with that number is
fully migrated, so its server need not look for migrations, for which it would import Alembic.

Prefect would start the server in our process group and import the whole server here for that, which takes about a
fifth of a fully cached run.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import importlib.util
import logging
import os
import resource
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path

from flows.runtime import prefect_access
from flows.runtime.prefect_home import build_embedded_access, build_prefect_environment
from rl_core.errors import BackendError, PosttrainError
from rl_core.json_client import RequestError, fetch_json
from rl_core.processes.children import start_child, stop_child
from rl_core.storage.atomic_files import (
    REMEDIES,
    make_folder,
    move_into_place,
    protect_database,
    reserve_temporary,
    resolve_cache_folder,
)
from rl_core.storage.faults import inject_fault

log = logging.getLogger(__name__)

STOP_SECONDS = 5.0  # from SIGTERM to SIGKILL
MIN_FREE_BYTES = 5_000_000  # for Prefect's database and its log
PORT_TAKEN_EXIT_CODE = 3  # of uvicorn; also of a server that cannot open its database
MAX_PORT_RETRIES = 2
# Prefect's marks of a server that a client started: no pages, no services that only a shared server needs
_EMBEDDED_VARIABLES = {
    "PREFECT_UI_ENABLED": "0",
    "PREFECT__SERVER_EPHEMERAL": "1",
    "PREFECT__SERVER_FINAL": "1",
}
_MIGRATION_TABLE = "alembic_version"
_DATABASE_VARIABLES = ("PREFECT_API_DATABASE_", "PREFECT_SERVER_DATABASE_")  # of another database


def locate_database(home: Path) -> Path:
    """Return the database file of a Prefect home."""
    return home / "prefect.db"


def copy_cached_tables(home: Path, environment: Mapping[str, str] = os.environ) -> bool:
    """Copy the cached tables into a home without a database; return False if nothing was copied. Never raise."""
    path = locate_database(home)
    cached = _locate_cached_tables()
    if (
        cached is None
        or path.exists()
        or not _is_migrated(cached)
        or _uses_other_database(environment)
    ):
        return False
    try:
        make_folder(home)
        with reserve_temporary(path) as copy:
            try:
                shutil.copyfile(cached, copy)
                copy.chmod(0o600)  # a password guards what it will hold
                inject_fault("prefect.copied")
                return move_into_place(copy, path, once=True)  # False: another run was faster
            finally:
                copy.unlink(missing_ok=True)
    except (OSError, PosttrainError) as error:
        log.debug("Prefect creates its tables itself: %s", error)
        return False


def prepare_database(home: Path, environment: Mapping[str, str]) -> None:
    """Create the database of a home if it is missing, readable only by this user."""
    copy_cached_tables(home, environment)
    if not _uses_other_database(environment):
        with contextlib.suppress(PosttrainError):  # the server reports what it cannot write
            protect_database(locate_database(home))


def cache_tables(home: Path, environment: Mapping[str, str] = os.environ) -> bool:
    """Cache the tables of a home's database, which a server may have open, unless they are cached. Never raise."""
    path = locate_database(home)
    cached = _locate_cached_tables()
    if (
        cached is None
        or _is_migrated(cached)
        or _uses_other_database(environment)
        or not _is_migrated(path)
    ):
        return False
    try:
        make_folder(cached.parent)
        with reserve_temporary(cached) as copy:
            try:
                _copy_schema(path, copy)
                inject_fault("prefect.kept")
                move_into_place(copy, cached)
            finally:
                copy.unlink(missing_ok=True)
        return True
    except (OSError, sqlite3.Error, PosttrainError) as error:
        log.debug("Prefect's tables are not cached: %s", error)
        return False


def build_migration_environment(
    home: Path, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return variables with which the server of a home skips migrations; {} if migrations may be missing. Never raise.

    Args:
        environment: of the server.
    """
    cached = _locate_cached_tables()
    if cached is None or _uses_other_database(environment):
        return {}
    number = _read_migration(cached)
    if not number or number != _read_migration(locate_database(home)):
        return {}
    return {"PREFECT_SERVER_DATABASE_MIGRATE_ON_START": "false"}


def _locate_cached_tables() -> Path | None:
    """Return the file of the cached tables; None if this user has no cache."""
    try:
        return resolve_cache_folder("prefect") / f"{version('prefect')}.db"
    except (OSError, PosttrainError):
        return None


def _uses_other_database(environment: Mapping[str, str]) -> bool:
    return any(name.startswith(_DATABASE_VARIABLES) for name in environment)


def _is_migrated(path: Path) -> bool:
    """Return whether a database has run its migrations."""
    return bool(_read_migration(path))


def _read_migration(path: Path) -> str:
    """Return the number of the newest migration of a database; "" if it is none, or has run none."""
    if not path.is_file():
        return ""
    try:
        with contextlib.closing(_open_read_only(path)) as database:
            rows = database.execute(f"SELECT version_num FROM {_MIGRATION_TABLE}").fetchall()
            return ",".join(sorted(str(row[0]) for row in rows))
    except sqlite3.Error:
        return ""


def _open_read_only(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)


def _copy_schema(path: Path, copy: Path) -> None:
    with (
        contextlib.closing(_open_read_only(path)) as source,
        contextlib.closing(sqlite3.connect(copy)) as target,
    ):
        source.backup(target)
        target.execute("PRAGMA journal_mode = DELETE")  # one file
        target.execute("PRAGMA foreign_keys = OFF")
        names = target.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
        )
        for (name,) in names.fetchall():
            if name != _MIGRATION_TABLE:
                target.execute(f'DELETE FROM "{name}"')
        target.commit()
        target.execute("VACUUM")


class _ServerExited(Exception):
    """The server's process ended before it answered."""


class _EmbeddedServer:
    """Process of the embedded server, and its port."""

    def __init__(self, extra_environment: Mapping[str, str], home: Path) -> None:
        """Start the server.

        Args:
            extra_environment: environment of the server in addition to this process's.
            home: of Prefect, with the database.
        """
        self._extra_environment = {
            **extra_environment,
            **build_migration_environment(home, {**os.environ, **extra_environment}),
        }
        self.port = _find_free_port()
        self.process = self._start_process()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    def _start_process(self) -> subprocess.Popen[bytes]:
        """Start the server with our check of hosts and origins, from wherever this project is imported."""
        prefect = importlib.util.find_spec("prefect")
        assert prefect is not None and prefect.origin is not None
        environment = {**os.environ, **_EMBEDDED_VARIABLES, **self._extra_environment}
        environment["PYTHONPATH"] = prefect_access.build_python_path(environment)
        return start_child(
            [
                sys.executable,
                "-P",
                "-m",
                "uvicorn",
                "--app-dir",
                str(Path(prefect.origin).parents[1]),
                "--factory",
                f"{prefect_access.__name__}:create_app",
                "--host",
                "127.0.0.1",
                "--port",
                str(self.port),
                "--log-level",
                "error",
                "--lifespan",
                "on",
            ],
            environment=environment,
            death_signal=signal.SIGTERM,
        )

    def wait_until_healthy(self, limit: float) -> None:
        """Wait until the server answers. Raises: RuntimeError; _ServerExited."""
        deadline = time.monotonic() + limit
        num_restarts = 0
        while time.monotonic() < deadline:
            code = self.process.poll()
            if code == PORT_TAKEN_EXIT_CODE and num_restarts < MAX_PORT_RETRIES:
                num_restarts += 1
                self.port = _find_free_port()
                self.process = self._start_process()
            elif code is not None:
                raise _ServerExited(f"it exited with code {code}")
            with contextlib.suppress(RequestError):
                fetch_json(f"{self.url}/health")
                return
            time.sleep(0.1)
        raise RuntimeError("It does not answer.")

    def stop_process(self) -> None:
        """Stop the server."""
        stop_child(self.process, STOP_SECONDS)


_server: _EmbeddedServer | None = None  # shared by all runs of this process
_prestarted_server: _EmbeddedServer | None = None  # started early, not waited for yet


def prestart_embedded_server() -> None:
    """Start the server before Prefect is imported; `start_embedded_server` then waits for it.

    Do nothing unless the environment is as `set_prefect_environment` leaves it and no file here configures Prefect:
    another server, database or password is left to Prefect's own settings.
    """
    global _prestarted_server
    known_variables = {*build_prefect_environment(), "PREFECT_HOME"}
    home = os.environ.get("PREFECT_HOME", "")
    configured = [
        name for name in os.environ if name.startswith("PREFECT_") and name not in known_variables
    ]
    if (
        _server is not None
        or _prestarted_server is not None
        or not home
        or configured
        or _has_prefect_configuration(Path(home))
    ):
        return
    if "prefect.settings" in sys.modules:
        return
    _refuse_full_disk(Path(home))
    prepare_database(Path(home), os.environ)
    _prestarted_server = _EmbeddedServer(build_embedded_access(), Path(home))
    atexit.register(stop_embedded_server)


def _has_prefect_configuration(home: Path) -> bool:
    """Return whether a profile, or a file of the current folder, may configure Prefect."""
    if (home / "profiles.toml").exists() or Path("prefect.toml").exists():
        return True
    for name in (".env", "pyproject.toml"):
        with contextlib.suppress(OSError):
            if "prefect" in Path(name).read_text(errors="replace").lower():
                return True
    return False


def start_embedded_server(while_starting: Callable[[], None] | None = None) -> None:
    """Start the server, unless it runs or another one is configured; see `use_embedded_address`.

    In its own session it lives as long as this process, on Linux even if we are killed. Ctrl-C does not reach it, so
    the run can still report that it was stopped.
    Args:
        while_starting: called while the server starts; not called if there is nothing to wait for.
    Raises: BackendError if it does not answer in time, ends unexpectedly, or neither it nor another one is allowed.
    """
    global _server, _prestarted_server
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    if settings.api.url is not None or not settings.server.ephemeral.enabled:
        stop_embedded_server()
        if settings.api.url is None:
            raise BackendError(
                "Prefect is set to start no server of its own, and no other is named: set PREFECT_API_URL, or "
                f"PREFECT_SERVER_EPHEMERAL_ENABLED=true, here or in your profile ({settings.profiles_path})"
            )
        return
    if _server is not None and _server.process.poll() is None:
        return
    _refuse_full_disk(settings.home)
    inject_fault("prefect.starting")
    limit = settings.server.ephemeral.startup_timeout_seconds
    explicit = settings.to_environment_variables(exclude_unset=True)
    # A profile may name another database than that of the home.
    environment = {**os.environ, **explicit}
    prepare_database(settings.home, environment)
    server = _prestarted_server or _EmbeddedServer(explicit, settings.home)
    _prestarted_server = None
    if while_starting is not None:
        try:
            while_starting()
        except BaseException:
            server.stop_process()
            raise
    try:
        server.wait_until_healthy(limit)
        inject_fault("prefect.started")
        cache_tables(settings.home, environment)
    except KeyboardInterrupt:  # or SIGTERM
        server.stop_process()
        raise
    except _ServerExited as error:
        raise BackendError(
            f"Prefect's embedded server did not start: {error}. Its database, {locate_database(settings.home)}, has to "
            "be writable; if a newer version of Prefect wrote it, or it is damaged, move it away: it holds Prefect's "
            "pages of earlier runs, neither stages nor metrics. To see the server's log, set "
            "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL=ERROR"
        ) from error
    except Exception as error:  # RuntimeError, or any client error while the server is starting
        server.stop_process()
        raise BackendError(
            f"Prefect's embedded server did not start within about {limit} s: {error} Is this machine very busy? Try "
            "again, give it longer with PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS=600, or use a server that "
            "runs already: PREFECT_API_URL=http://127.0.0.1:4200/api"
        ) from error
    _server = server
    atexit.register(stop_embedded_server)


def stop_embedded_server() -> None:
    """Stop the server that this process started; also called when the process ends."""
    global _server, _prestarted_server
    for server in filter(None, (_server, _prestarted_server)):
        server.stop_process()
    _server = _prestarted_server = None
    atexit.unregister(stop_embedded_server)


@contextlib.contextmanager
def use_embedded_address() -> Iterator[None]:
    """Set Prefect's API address to that of the started server within the block, if there is one.

    No automation of that server waits for heartbeats, and stopping their thread takes a flow up to a second.
    """
    from prefect.settings import (
        PREFECT_API_URL,
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
        get_current_settings,
        temporary_settings,
    )

    if _server is None or get_current_settings().api.url is not None:
        yield
        return
    with temporary_settings(
        {PREFECT_API_URL: _server.url, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}
    ):
        yield


def read_external_address() -> str:
    """Return the API address of Prefect's client; "" for the embedded server, which ends with the run."""
    from prefect.settings import get_current_settings

    url = get_current_settings().api.url or ""
    return "" if _server is not None and url == _server.url else url


def _find_free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _read_file_size_limit() -> int:
    """Return the file size limit of this process and its children in bytes; -1 without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return -1 if soft == resource.RLIM_INFINITY else soft


def _refuse_full_disk(home: Path) -> None:
    """Refuse early if the server could not write its database, instead of waiting for it in vain."""
    limit = _read_file_size_limit()
    if 0 <= limit < MIN_FREE_BYTES:
        raise BackendError(
            f"{home}: {os.strerror(errno.EFBIG)} for Prefect's database: files may have {limit / 1e6:.1f} MB here, it "
            f"needs {MIN_FREE_BYTES / 1e6:.0f}; {REMEDIES[errno.EFBIG]}"
        )
    if not home.is_dir():
        return
    free = shutil.disk_usage(home).free
    if free < MIN_FREE_BYTES:
        raise BackendError(
            f"{home}: {os.strerror(errno.ENOSPC)} for Prefect's database: {free / 1e6:.1f} MB are free, it needs "
            f"{MIN_FREE_BYTES / 1e6:.0f}; {REMEDIES[errno.ENOSPC]}"
        )
