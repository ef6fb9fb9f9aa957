"""HTTP connections that may neither idle nor crowd: uvicorn's protocol with a limit of time and of their number."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["bounded_connections"]


def bounded_connections(most: int, idle_seconds: float) -> type[H11Protocol]:
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
            if len(self.connections) > most:
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
