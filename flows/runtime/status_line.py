"""Progress of a command without stages: one line that is written over on a terminal, or a line now and then."""

from __future__ import annotations

import sys
import time
from typing import TextIO

__all__ = ["StatusLine"]

_EVERY_S = 15.0  # between two lines where there is no terminal


class StatusLine:
    """One line about what is being done."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """stream: None = standard output."""
        self._stream = sys.stdout if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._said_at = time.monotonic()

    def __call__(self, text: str) -> None:
        """Show progress."""
        if self._is_terminal:
            print(f"\r\033[K{text}", end="", flush=True, file=self._stream)
        elif time.monotonic() - self._said_at > _EVERY_S:
            self._said_at = time.monotonic()
            print(text, flush=True, file=self._stream)

    def line(self, text: str) -> None:
        """Print a line that stays."""
        self.clear()
        print(text, flush=True, file=self._stream)

    def clear(self) -> None:
        """Remove the live line."""
        if self._is_terminal:
            print("\r\033[K", end="", flush=True, file=self._stream)
