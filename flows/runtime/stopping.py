"""SIGTERM outside a training loop (which saves and stops by itself): unwinds the stack like Ctrl-C."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import NoReturn

__all__ = ["Terminated", "asked", "unwind_on_sigterm"]

# Set by the first SIGTERM. Its exception may be swallowed by a destructor, a callback from C or a bare `except`, all
# frequent in imports; then the next stage, or the next iteration of a loop, stops.
asked = threading.Event()


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived. Not an Exception, as KeyboardInterrupt: imports and start-up code would catch it."""


def unwind_on_sigterm() -> None:
    """Install a handler: SIGTERM raises Terminated in the main thread."""
    asked.clear()

    def stop(signum: int, frame: FrameType | None) -> NoReturn:
        asked.set()
        raise Terminated

    try:
        signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread, where signals cannot be handled
        return
