"""The table of runs, in the width of the terminal; whole where the output is no terminal."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

from flows.runtime.terminal import escape_control_characters

_COLUMN_GAP = "  "
_TRUNCATED_COLUMNS = ("settings", "result")  # columns that may be cut, the first one first
_MIN_COLUMN_WIDTH = 12  # characters of a column that was cut
_MIN_RESULT_WIDTH = (
    34  # characters of a result: success of a model with its interval, and the name of the next
)
_DROPPED_COLUMNS = (
    "settings",
    "took",
)  # where the names of the runs alone take most of the width, the first one first

Row = dict[str, str]


def format_runs_table(rows: Sequence[Row], width: int | None = None) -> str:
    """Rows with equal keys as aligned text.

    In a terminal too narrow for it, links go below the table (that of the newest run alone), then goes the time of the
    start, which stands in a run's name; then settings and results are cut, and where that is not enough left out:
    settings where they leave too little of the results.
    Args:
        width: columns; None = the terminal's, or no limit where standard output is none.
    """
    cells = [
        {name: escape_control_characters(str(text)) for name, text in row.items()} for row in rows
    ]
    names = [
        name for name in rows[0] if any(row.get(name) for row in cells) or name in ("run", "status")
    ]
    width = detect_terminal_columns() if width is None else width
    below = []
    if width is not None:
        if _measure_table(names, cells) > width and "page" in names:
            names.remove("page")
            below = ["", f"page of the newest: {cells[0]['page']}"]
        if _measure_table(names, cells) > width and "started" in names:
            names.remove("started")
        for name in _TRUNCATED_COLUMNS:
            if name == "result" in names and "settings" in names:
                left = _measure_column(name, cells) - (_measure_table(names, cells) - width)
                if left < min(_MIN_RESULT_WIDTH, _measure_column(name, cells)):
                    names.remove(
                        "settings"
                    )  # a dozen characters of it say less than the result does
            if name in names and (over := _measure_table(names, cells) - width) > 0:
                cells = [
                    {
                        **row,
                        name: _truncate_cell(
                            row[name], max(_MIN_COLUMN_WIDTH, _measure_column(name, cells) - over)
                        ),
                    }
                    for row in cells
                ]
        for name in _DROPPED_COLUMNS:
            if name in names and _measure_table(names, cells) > width:
                names.remove(name)
    widths = [_measure_column(name, cells) for name in names]
    lines = [names, *([row.get(name, "") for name in names] for row in cells)]
    return "\n".join([*(_format_table_line(line, widths) for line in lines), *below])


def _format_table_line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return _COLUMN_GAP.join(
        cell.ljust(width) for cell, width in zip(cells, widths, strict=True)
    ).rstrip()


def detect_terminal_columns() -> int | None:
    """Columns of the terminal, or those that COLUMNS says; None where standard output is none."""
    return (
        shutil.get_terminal_size().columns
        if sys.stdout.isatty() or "COLUMNS" in os.environ
        else None
    )


def _measure_column(name: str, cells: Sequence[Row]) -> int:
    return max(len(name), *(len(row.get(name, "")) for row in cells))


def _measure_table(names: Sequence[str], cells: Sequence[Row]) -> int:
    return sum(_measure_column(name, cells) for name in names) + len(_COLUMN_GAP) * (len(names) - 1)


def _truncate_cell(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1].rstrip() + "…"
