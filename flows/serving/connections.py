"""HTTP connections that may neither idle nor crowd: uvicorn's protocol with a limit of time and of their number."""

from __future__ import annotations

import asyncio
import resource

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["bounded_connections", "raise_file_limit"]


def bounded_connections(most: int, idle_seconds: float) -> type[H11Protocol]:
    """A protocol class for uvicorn's `http`.

    Args:
        most: open connections; further ones are closed at once.
        idle_seconds: time for the first request's head to arrive. (Later ones: uvicorn's `timeout_keep_alive`.)
    """

    class BoundedProtocol(H11Protocol):
        """A connection that is closed unless a request begins in time."""

        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """Take a connection, if there is room."""
            super().connection_made(transport)
            if len(self.connections) > most:
                transport.abort()
                return
            self._deadline = self.loop.call_later(idle_seconds, self._close_idle)

        def _close_idle(self) -> None:
            if self.cycle is None:
                self.transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            """Let go of a connection."""
            if self._deadline is not None:
                self._deadline.cancel()
            super().connection_lost(exc)

    return BoundedProtocol


def raise_file_limit(wanted: int) -> None:
    """Allow this process so many open files, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
