"""Standard streams of a command: each open, and able to print any text."""

from __future__ import annotations

import io
import os
import sys

__all__ = ["discard_output", "make_usable"]


def make_usable() -> None:
    """Open what the caller has closed on /dev/null, and print characters that an encoding lacks as escapes.

    The next file that is opened would get the number of a closed stream, and C libraries would print into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def discard_output() -> None:
    """Send the rest of the output nowhere: its reader is gone, or its disk is full."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
