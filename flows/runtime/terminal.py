"""Terminal output: text from files and arguments made safe to print, and a status line for commands without stages."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from typing import TextIO

# Control characters, which move the cursor, rename the window or ring (C0 without tab and line feed, DEL, C1); marks
# that reverse the writing direction; surrogates, which no terminal encoding supports.
_CONTROL_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_LINE_INTERVAL_SECONDS = 15.0  # between two lines without a terminal


UNLIMITED_COLUMNS = 100_000  # of a table in a pipe or a file, where nothing is cut


def detect_terminal_columns() -> int | None:
    """Return the columns of the terminal or of COLUMNS; None if standard output is not a terminal."""
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return shutil.get_terminal_size().columns
    return None


def escape_control_characters(text: str) -> str:
    r"""Return the text with control characters as escapes, such as \x1b."""
    return _CONTROL_CHARACTERS.sub(lambda match: ascii(match.group())[1:-1], text)


class StatusLine:
    """Line about the current work: overwritten on a terminal, else printed now and then."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """Configure the stream; None = standard output."""
        self._stream = sys.stdout if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._last_printed_at = time.monotonic()

    def __call__(self, text: str) -> None:
        """Show progress."""
        if self._is_terminal:
            print(f"\r\033[K{text}", end="", flush=True, file=self._stream)
        elif time.monotonic() - self._last_printed_at > _LINE_INTERVAL_SECONDS:
            self._last_printed_at = time.monotonic()
            print(text, flush=True, file=self._stream)

    def print_line(self, text: str) -> None:
        """Print a line that stays."""
        self.clear_line()
        print(text, flush=True, file=self._stream)

    def clear_line(self) -> None:
        """Remove the live line."""
        if self._is_terminal:
            print("\r\033[K", end="", flush=True, file=self._stream)
