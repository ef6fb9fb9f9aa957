"""Time for supervision, in seconds since 1970, that does not jump when somebody sets the machine's clock."""

from __future__ import annotations

import time

__all__ = ["SteadyClock"]


class SteadyClock:
    """The wall clock when it was made, and from there on the monotonic one.

    Supervision compares moments: with the wall clock, an hour forward would look like a server that did not answer for
    an hour, and an hour back like a restart that is not due yet.
    """

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def __call__(self) -> float:
        """The present moment."""
        return self._offset + time.monotonic()
