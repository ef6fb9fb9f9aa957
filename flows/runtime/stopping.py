"""SIGTERM outside a training loop, which saves and stops by itself: unwinds like Ctrl-C and closes what is open."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import NoReturn

__all__ = ["Terminated", "asked", "unwind_on_sigterm"]

# Set by the first SIGTERM. Not every one ends what it interrupts: a destructor, a callback from C or a bare `except`
# may swallow the exception, and imports are full of those. Then the next stage, or a loop's next iteration, stops.
asked = threading.Event()


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived. As Ctrl-C it is no Exception: imports and start-ups catch those, and would go on."""


def unwind_on_sigterm() -> None:
    """From now on SIGTERM raises Terminated wherever the main thread is."""
    asked.clear()

    def stop(signum: int, frame: FrameType | None) -> NoReturn:
        asked.set()
        raise Terminated

    try:
        signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread: whoever started it handles signals
        return
