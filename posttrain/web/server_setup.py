"""Server processes: ports, process limits, connection limits, and the run of a uvicorn server."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from rl_core.errors import BackendError, SettingsError

LOOPBACK_HOST = "127.0.0.1"
MAX_PORTS_TRIED = 100
# Of the interpreter's lock: threads that need it briefly should not wait the default 5 ms.
SWITCH_INTERVAL_SECONDS = 0.001


def find_free_port(preferred_port: int) -> int:
    """Return the preferred loopback port, or the next free one. Raises: SettingsError, BackendError without one."""
    for port in range(preferred_port, min(65536, preferred_port + MAX_PORTS_TRIED)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
            try:
                probe.bind((LOOPBACK_HOST, port))
                return port
            except PermissionError as error:
                raise SettingsError(
                    f"--port {preferred_port}: {error.strerror}; use one above 1023"
                ) from None
            except OSError:
                continue
    raise BackendError(
        f"no free port on {LOOPBACK_HOST} from {preferred_port} on; name another with --port"
    )


def raise_open_file_limit(num_files: int) -> int:
    """Allow this process `num_files` open files, or as many as the system permits; return the number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = num_files if hard == resource.RLIM_INFINITY else min(num_files, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        return limit
    return num_files if soft == resource.RLIM_INFINITY else soft


def shorten_switch_interval() -> None:
    """Make threads of this process release the interpreter's lock sooner than by default."""
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)


def run_server(server: uvicorn.Server, announce: Callable[[], None]) -> None:
    """Run a server until SIGTERM or Ctrl-C; call `announce` on a thread once it accepts requests."""

    def announce_when_started() -> None:
        while not server.started and not server.should_exit:
            time.sleep(0.05)
        if server.started:
            announce()

    threading.Thread(target=announce_when_started, daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn has shut down and re-raises the signal
        server.run()


def limit_connections(max_connections: int, idle_seconds: float) -> type[asyncio.Protocol]:
    """Build a protocol class for uvicorn's `http` that limits the number and idle time of connections.

    Args:
        max_connections: open connections; further ones are closed at once.
        idle_seconds: time for the head of a request to arrive; twice as long after another request.
    """

    base: Any = AutoHTTPProtocol  # httptools where it is installed, else h11

    class BoundedProtocol(base):
        """A connection that is closed unless requests begin in time."""

        _timer: asyncio.TimerHandle | None = None
        _last_cycle: object = None  # the request that had completed at the last check

        def connection_made(self, transport: asyncio.Transport) -> None:
            """Accept a connection if the limit permits."""
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                transport.abort()
                return
            self._timer = self.loop.call_later(idle_seconds, self._close_if_idle)

        def _close_if_idle(self) -> None:
            """Close the connection if no request has begun since the last check."""
            is_idle = self.cycle is None or self.cycle.response_complete
            if is_idle and self._last_cycle is self.cycle:
                self.transport.abort()
                return
            self._last_cycle = self.cycle if is_idle else self
            self._timer = self.loop.call_later(idle_seconds, self._close_if_idle)

        def connection_lost(self, exc: Exception | None) -> None:
            """Cancel the timer of a closed connection."""
            if self._timer is not None:
                self._timer.cancel()
            super().connection_lost(exc)

    return BoundedProtocol
