"""Stop requests: SIGTERM, SIGINT, or an event set by another thread."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType, TracebackType

logger = logging.getLogger(__name__)


GRACE_SECONDS = 4.0  # after SIGTERM, for the current iteration; a preempted process has few seconds


class IterationAborted(KeyboardInterrupt):
    """Stop that cannot wait for the iteration. Not an Exception: a guard around user code would catch it."""

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.signum = signum


# What sent a signal of this process, for messages: a time limit sends SIGTERM.
signal_causes: dict[int, str] = {}


def _name_cause(signum: int) -> str:
    return signal_causes.get(signum) or signal.Signals(signum).name


class StopRequests:
    """Handler of stop signals: inside its `with` block the first SIGTERM or SIGINT is stored, the second raises.

    SIGTERM precedes a kill, so it raises IterationAborted after GRACE_SECONDS; Ctrl-C waits for the iteration. A second
    signal raises IterationAborted immediately.

    Handlers can only be installed in the main thread. Elsewhere (a task in a worker thread) pass an event that the main
    thread sets. The previous handlers are restored at the end.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, event: threading.Event | None = None) -> None:
        self.event = event
        self._received: int | None = None
        self._previous: dict[int, object] = {}
        self._guard = threading.Lock()
        self._timer: threading.Timer | None = None
        self._is_late = False

    @property
    def signum(self) -> int | None:
        """The signal that requested a stop, None = continue; an event counts as SIGTERM."""
        if self._received is None and self.event is not None and self.event.is_set():
            return int(signal.SIGTERM)
        return self._received

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():
            for signum in self.SIGNALS:
                self._previous[signum] = signal.signal(signum, self._handle_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._guard:  # after this block the timer raises nothing
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None
        for signum, handler in self._previous.items():
            # None = the old handler was not installed from Python and is unknown; the default is the closest.
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]
        self._previous.clear()

    def _handle_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._received is not None:
            cause = f"not done {GRACE_SECONDS:g} s after" if self._is_late else "a second"
            raise IterationAborted(f"{cause} {_name_cause(signum)}", self._received)
        self._received = signum
        if signum == signal.SIGTERM:
            self._timer = threading.Timer(GRACE_SECONDS, self._abort_iteration)
            self._timer.daemon = True
            self._timer.start()
        logger.warning(
            "%s: finishing this iteration, then saving and stopping", _name_cause(signum)
        )

    def _abort_iteration(self) -> None:
        with self._guard:
            if self._timer is not None:
                self._is_late = True
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
