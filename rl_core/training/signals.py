"""Stop requests: SIGTERM, SIGINT, or an event set by another thread."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType, TracebackType

from rl_core.errors import Stopped

__all__ = ["StopRequests"]

logger = logging.getLogger(__name__)


class StopRequests:
    """Within its `with` block, the first SIGTERM or SIGINT is remembered; the second raises Stopped at once.

    Handlers can only be installed in the main thread. Elsewhere (a task in a worker thread) give an event that the main
    thread sets. Previous handlers come back at the end.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, event: threading.Event | None = None) -> None:
        self.event = event
        self._received: int | None = None
        self._previous: dict[int, object] = {}

    @property
    def signum(self) -> int | None:
        """The signal that asked to stop, None = go on; an event counts as SIGTERM."""
        if self._received is None and self.event is not None and self.event.is_set():
            return int(signal.SIGTERM)
        return self._received

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():
            for signum in self.SIGNALS:
                self._previous[signum] = signal.signal(signum, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for signum, handler in self._previous.items():
            # None = the old handler was not installed from Python and cannot be named; the default is the nearest.
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]
        self._previous.clear()

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if self._received is not None:
            name = signal.Signals(signum).name
            raise Stopped(f"{name} arrived a second time: stopped at once, at the last saved checkpoint", signum)
        self._received = signum
        logger.warning("%s: finishing this iteration, then saving and stopping", signal.Signals(signum).name)
