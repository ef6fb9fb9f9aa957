"""Limits of a process that serves many connections from few threads.

The token of a local server's folder.

HTTP connections that may neither idle nor crowd: uvicorn's protocol with a limit of time and of their number.
"""

from __future__ import annotations

import asyncio
import resource
import secrets
import sys
from pathlib import Path

from uvicorn.protocols.http.h11_impl import H11Protocol

from rl_core.errors import BackendError
from rl_core.storage.atomic_files import create_file_once, make_folder, open_owned_file

SWITCH_INTERVAL_SECONDS = (
    0.001  # of the interpreter's lock: threads that need it briefly should not wait 5 ms for it
)


def raise_open_file_limit(num_files: int) -> None:
    """Allow this process so many open files, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = num_files if hard == resource.RLIM_INFINITY else min(num_files, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def shorten_switch_interval() -> None:
    """Have threads of this process hand on the interpreter's lock sooner than by default."""
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)


def load_or_create_token(folder: Path) -> str:
    """The token of a server's folder, made when it is first asked for; readable by its owner alone.

    Raises: BackendError where the file is another user's.
    """
    path = folder / "token"
    make_folder(folder)
    create_file_once(path, f"{secrets.token_urlsafe(32)}\n", mode=0o600)
    try:
        with open(path, opener=open_owned_file) as file:
            return file.read().strip()
    except PermissionError:
        raise BackendError(
            f"{path}: cannot be read: the server was started by somebody else"
        ) from None


def limit_connections(max_connections: int, idle_seconds: float) -> type[H11Protocol]:
    """A protocol class for uvicorn's `http`.

    Args:
        most: open connections; further ones are closed at once.
        idle_seconds: time for a request's head to arrive; twice as long after another request.
    """

    class BoundedProtocol(H11Protocol):
        """A connection that is closed unless requests begin in time."""

        _timer: asyncio.TimerHandle | None = None
        _last: object = None  # the request that was over at the last look

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """Take a connection, if there is room."""
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                transport.abort()
                return
            self._timer = self.loop.call_later(idle_seconds, self._look)

        def _look(self) -> None:
            """Close the connection if no request has begun since the last look."""
            is_idle = self.cycle is None or self.cycle.response_complete
            if is_idle and self._last is self.cycle:
                self.transport.abort()
                return
            self._last = self.cycle if is_idle else self
            self._timer = self.loop.call_later(idle_seconds, self._look)

        def connection_lost(self, exc: Exception | None) -> None:
            """Let go of a connection."""
            if self._timer is not None:
                self._timer.cancel()
            super().connection_lost(exc)

    return BoundedProtocol
