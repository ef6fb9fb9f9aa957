"""Prefect's embedded server of a run: started in its own session, and named to Prefect's client by its address.

Prefect would start it by itself, in our process group, and import the whole server here for that (about a fifth of the
time that a run of which everything is cached takes).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import functools
import importlib.util
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flows.runtime import prefect_access
from flows.runtime.prefect_database import database_of, keep_tables, migration_environment, start_from_tables
from flows.runtime.prefect_home import embedded_access, prefect_environment
from rl_core.errors import BackendError
from rl_core.storage.faults import fault
from rl_core.storage.single_files import REMEDIES

__all__ = [
    "begin_embedded_server",
    "embedded_address",
    "other_address",
    "own_session",
    "start_embedded_server",
    "stop_embedded_server",
]

PR_SET_PDEATHSIG = 1  # of linux/prctl.h
LEAST_BYTES = 5_000_000  # of Prefect's database and its log
PORT_TAKEN = 3  # exit code of uvicorn; of a server that cannot open its database, too
OTHER_PORTS = 2  # tried where one was taken
# Prefect's own marks of a server that a client started: no pages, no services that only a shared server needs
_EMBEDDED = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}


class _Ended(Exception):
    """The server's process ended before it answered."""


class _ServerProcess:
    """The server's process and its port."""

    def __init__(self, given: Mapping[str, str], home: Path) -> None:
        """given: environment of the server beside this process's. home: of Prefect, with the database."""
        self._given = {**given, **migration_environment(home, {**os.environ, **given})}
        self.port = _free_port()
        self.process = self._start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    def _start(self) -> subprocess.Popen[Any]:
        """The server behind our check of hosts and origins, from wherever this project is imported."""
        prefect = importlib.util.find_spec("prefect")
        assert prefect is not None and prefect.origin is not None
        environment = {**os.environ, **_EMBEDDED, **self._given}
        environment["PYTHONPATH"] = prefect_access.own_path(environment)
        return own_session()(
            [
                sys.executable, "-P", "-m", "uvicorn", "--app-dir", str(Path(prefect.origin).parents[1]),
                "--factory", f"{prefect_access.__name__}:create_app", "--host", "127.0.0.1", "--port", str(self.port),
                "--log-level", "error", "--lifespan", "on",
            ],
            env=environment,
        )  # fmt: skip

    def wait(self, limit: float) -> None:
        """Wait until the server answers. Raises: RuntimeError; _Ended."""
        import httpx

        end, restarts = time.monotonic() + limit, 0
        with httpx.Client(trust_env=False, verify=False) as client:  # on loopback: no proxy between us, no certificate
            while time.monotonic() < end:
                code = self.process.poll()
                if code == PORT_TAKEN and restarts < OTHER_PORTS:
                    restarts += 1
                    self.port = _free_port()
                    self.process = self._start()
                elif code is not None:
                    raise _Ended(f"it exited with code {code}")
                with contextlib.suppress(httpx.TransportError):
                    if client.get(f"{self.url}/health").status_code == 200:
                        return
                time.sleep(0.1)
        raise RuntimeError("It does not answer.")

    def stop(self) -> None:
        """End the server."""
        self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


_server: _ServerProcess | None = None  # of this process, for all its runs
_begun: _ServerProcess | None = None  # started ahead, not waited for yet


def begin_embedded_server() -> None:
    """Start the server ahead, while Prefect is not imported yet; `start_embedded_server` then waits for it.

    Only where the environment is as `prepare_prefect` leaves it and no file here configures Prefect: what another
    server, database or password means is left to Prefect's own settings.
    """
    global _begun
    ours = {*prefect_environment(), "PREFECT_HOME"}
    home = os.environ.get("PREFECT_HOME", "")
    configured = [name for name in os.environ if name.startswith("PREFECT_") and name not in ours]
    if _server is not None or _begun is not None or not home or configured or _has_prefect_files(Path(home)):
        return
    if "prefect.settings" in sys.modules:
        return
    _refuse_full_disk(Path(home))
    start_from_tables(Path(home))
    _begun = _ServerProcess(embedded_access(), Path(home))
    atexit.register(stop_embedded_server)


def _has_prefect_files(home: Path) -> bool:
    """True = a profile, or a file of the current folder, may configure Prefect."""
    if (home / "profiles.toml").exists() or Path("prefect.toml").exists():
        return True
    for name in (".env", "pyproject.toml"):
        with contextlib.suppress(OSError):
            if "prefect" in Path(name).read_text(errors="replace").lower():
                return True
    return False


def start_embedded_server(meanwhile: Callable[[], None] | None = None) -> None:
    """Start the server, unless it runs or another one is configured; see `embedded_address`.

    meanwhile: called once it is on its way, before it is waited for; not where there is nothing to wait for.
    In its own session it lives until we end, and on Linux no longer, even if we are killed; Ctrl-C does not reach it,
    so that the run can still report that it was stopped.
    Raises: BackendError if it does not answer in time, ends by itself, or neither it nor another one is allowed.
    """
    global _server, _begun
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
    fault("prefect.starting")
    limit = settings.server.ephemeral.startup_timeout_seconds
    given = settings.to_environment_variables(exclude_unset=True)
    environment = {**os.environ, **given}  # a profile may name another database than that of the home
    start_from_tables(settings.home, environment)
    server = _begun or _ServerProcess(given, settings.home)
    _begun = None
    if meanwhile is not None:
        try:
            meanwhile()
        except BaseException:
            server.stop()
            raise
    try:
        server.wait(limit)
        fault("prefect.started")
        keep_tables(settings.home, environment)
    except KeyboardInterrupt:  # or SIGTERM
        server.stop()
        raise
    except _Ended as error:
        raise BackendError(
            f"Prefect's embedded server did not start: {error}. Its database, {database_of(settings.home)}, has to be "
            "writable; where a newer version of Prefect wrote it, or it is damaged, move it away: it holds Prefect's "
            "pages of earlier runs, neither stages nor metrics. To see the server's own words, set "
            "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL=ERROR"
        ) from error
    except Exception as error:  # RuntimeError, or any client error while the server is starting
        server.stop()
        raise BackendError(
            f"Prefect's embedded server did not start within about {limit} s: {error} Is this machine very busy? Try "
            "again, give it longer with PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS=600, or use a server that "
            "runs already: PREFECT_API_URL=http://127.0.0.1:4200/api"
        ) from error
    _server = server
    atexit.register(stop_embedded_server)


def stop_embedded_server() -> None:
    """End the server that this process has started; also done when the process ends."""
    global _server, _begun
    for server in filter(None, (_server, _begun)):
        server.stop()
    _server = _begun = None
    atexit.unregister(stop_embedded_server)


@contextlib.contextmanager
def embedded_address() -> Iterator[None]:
    """Prefect's setting of the API's address within: that of the started server, if there is one.

    No automation of that server waits for heartbeats, and ending their thread takes a flow up to a second.
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
    with temporary_settings({PREFECT_API_URL: _server.url, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        yield


def other_address() -> str:
    """Address of the API that Prefect's client uses; "" where that is the embedded server, which ends with the run."""
    from prefect.settings import get_current_settings

    url = get_current_settings().api.url or ""
    return "" if _server is not None and url == _server.url else url


def own_session() -> Callable[..., subprocess.Popen[Any]]:
    """`Popen` in a new session; the child gets SIGTERM when the thread that started it ends (Linux)."""
    try:
        prctl = ctypes.CDLL(None).prctl
    except (AttributeError, OSError, TypeError):  # not Linux: children of a killed run survive
        return functools.partial(subprocess.Popen, start_new_session=True)
    return functools.partial(
        subprocess.Popen, start_new_session=True, preexec_fn=functools.partial(prctl, PR_SET_PDEATHSIG, signal.SIGTERM)
    )


def _free_port() -> int:
    with contextlib.closing(socket.socket()) as tried:
        tried.bind(("127.0.0.1", 0))
        port: int = tried.getsockname()[1]
        return port


def _file_size_limit() -> int:
    """Bytes that a file of this process and its children may have; -1 without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return -1 if soft == resource.RLIM_INFINITY else soft


def _refuse_full_disk(home: Path) -> None:
    """Refuse at once where the server could not write its database, for which it would be waited in vain."""
    if 0 <= (limit := _file_size_limit()) < LEAST_BYTES:
        raise BackendError(
            f"{home}: {os.strerror(errno.EFBIG)} for Prefect's database: files may have {limit / 1e6:.1f} MB here, it "
            f"needs {LEAST_BYTES / 1e6:.0f}; {REMEDIES[errno.EFBIG]}"
        )
    if home.is_dir() and (free := shutil.disk_usage(home).free) < LEAST_BYTES:
        raise BackendError(
            f"{home}: {os.strerror(errno.ENOSPC)} for Prefect's database: {free / 1e6:.1f} MB are free, it needs "
            f"{LEAST_BYTES / 1e6:.0f}; {REMEDIES[errno.ENOSPC]}"
        )
