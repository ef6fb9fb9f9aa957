"""Text within the width of the terminal, which would break words; whole in a file or a pipe."""

from __future__ import annotations

import textwrap

from rich.console import Console

__all__ = ["fitted"]

_LEAST = 36  # columns, however narrow the terminal is


def fitted(text: str, console: Console | None = None) -> str:
    """Lines that are too long wrapped between words, with an indent two columns deeper than theirs.

    console: the one that they are printed on; None = standard output.
    """
    terminal = console or Console()
    if not terminal.is_terminal:
        return text
    width = max(_LEAST, terminal.width)
    return "\n".join(line if len(line) <= width else _wrapped(line, width) for line in text.split("\n"))


def _wrapped(line: str, width: int) -> str:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )
