"""The table of runs, in the width of the terminal; whole where the output is no terminal."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

from flows.runtime.visible import visible

__all__ = ["fitting_table", "terminal_columns"]

_GAP = "  "
_CUT = ("settings", "result")  # columns that may be cut, the first one first
_LEAST = 12  # characters of a column that was cut
_READABLE = 34  # characters of a result: success of a model with its interval, and the name of the next
_LEFT_OUT = ("settings", "took")  # where the names of the runs alone take most of the width, the first one first

Row = dict[str, str]


def fitting_table(rows: Sequence[Row], width: int | None = None) -> str:
    """Rows with equal keys as aligned text.

    In a terminal too narrow for it, links go below the table (that of the newest run alone), then goes the time of the
    start, which stands in a run's name; then settings and results are cut, and where that is not enough left out:
    settings where they leave too little of the results.
    Args:
        width: columns; None = the terminal's, or no limit where standard output is none.
    """
    cells = [{name: visible(str(text)) for name, text in row.items()} for row in rows]
    names = [name for name in rows[0] if any(row.get(name) for row in cells) or name in ("run", "status")]
    width = terminal_columns() if width is None else width
    below = []
    if width is not None:
        if _total(names, cells) > width and "page" in names:
            names.remove("page")
            below = ["", f"page of the newest: {cells[0]['page']}"]
        if _total(names, cells) > width and "started" in names:
            names.remove("started")
        for name in _CUT:
            if name == "result" in names and "settings" in names:
                left = _width(name, cells) - (_total(names, cells) - width)
                if left < min(_READABLE, _width(name, cells)):
                    names.remove("settings")  # a dozen characters of it say less than the result does
            if name in names and (over := _total(names, cells) - width) > 0:
                cells = [{**row, name: _cut(row[name], max(_LEAST, _width(name, cells) - over))} for row in cells]
        for name in _LEFT_OUT:
            if name in names and _total(names, cells) > width:
                names.remove(name)
    widths = [_width(name, cells) for name in names]
    lines = [names, *([row.get(name, "") for name in names] for row in cells)]
    return "\n".join([*(_line(line, widths) for line in lines), *below])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return _GAP.join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def terminal_columns() -> int | None:
    """Columns of the terminal, or those that COLUMNS says; None where standard output is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() or "COLUMNS" in os.environ else None


def _width(name: str, cells: Sequence[Row]) -> int:
    return max(len(name), *(len(row.get(name, "")) for row in cells))


def _total(names: Sequence[str], cells: Sequence[Row]) -> int:
    return sum(_width(name, cells) for name in names) + len(_GAP) * (len(names) - 1)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1].rstrip() + "…"
