"""Tables for the terminal, without borders. In a pipe or a file nothing is cut."""

from __future__ import annotations

import io
from collections.abc import Sequence

from flows.runtime.terminal import (
    UNLIMITED_COLUMNS,
    detect_terminal_columns,
    escape_control_characters,
)

_GAP_COLUMNS = 2
_TRUNCATED_COLUMNS = ("settings", "result")  # may be cut, in this order
_DROPPED_COLUMNS = ("settings", "took")  # dropped if run names alone fill the width, in this order
_MIN_COLUMN_WIDTH = 12  # of a cut column
_MIN_RESULT_WIDTH = 34  # success of a model with its interval, and the name of the next model

RunRow = dict[str, str]


def format_table(
    header: Sequence[str] | None,
    rows: Sequence[Sequence[str]],
    *,
    max_widths: Sequence[int] | None = None,
    width: int | None = None,
) -> str:
    """Format rows as aligned columns.

    Args:
        header: titles of the columns; None = no line of titles.
        rows: cells, printed literally.
        max_widths: width of each column beyond which its cells are cut; None = cells are never cut.
        width: width of the table, in which its last column is wrapped between words; None = no limit.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=None, pad_edge=False, padding=(0, _GAP_COLUMNS, 0, 0), show_header=header is not None
    )
    num_columns = len(header if header is not None else rows[0])
    for index in range(num_columns):
        is_wrapped = width is not None and index == num_columns - 1
        table.add_column(
            Text(header[index]) if header is not None else "",
            max_width=max_widths[index] if max_widths is not None else None,
            no_wrap=not is_wrapped,
            overflow="fold" if is_wrapped else "ellipsis",
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console(
        file=io.StringIO(),
        width=width or UNLIMITED_COLUMNS,
        color_system=None,
        legacy_windows=False,
    )
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def format_runs_table(rows: Sequence[RunRow], width: int | None = None) -> str:
    """Format the table of runs.

    In a terminal that is too narrow, the link of the newest run moves below the table, and the start time is dropped,
    because a run's name contains it. Then settings and results are cut. Settings are dropped if they leave too little
    of the results.
    Args:
        rows: cells by column, all with the same keys.
        width: columns; None = those of the terminal, or no limit if standard output is not a terminal.
    """
    from rich.cells import cell_len

    cells = [
        {name: escape_control_characters(str(text)) for name, text in row.items()} for row in rows
    ]
    widths = {
        name: max(cell_len(text) for text in (name, *(row.get(name, "") for row in cells)))
        for name in rows[0]
        if name in ("run", "status") or any(row.get(name) for row in cells)
    }

    def count_missing_columns() -> int:
        assert width is not None
        return sum(widths.values()) + _GAP_COLUMNS * (len(widths) - 1) - width

    footer = ""
    width = detect_terminal_columns() if width is None else width
    if width is not None:
        if count_missing_columns() > 0 and widths.pop("page", None) is not None:
            footer = f"\n\npage of the newest: {cells[0]['page']}"
        if count_missing_columns() > 0:
            widths.pop("started", None)
        for name in _TRUNCATED_COLUMNS:
            if name == "result" and name in widths and "settings" in widths:
                remaining = widths[name] - count_missing_columns()
                if remaining < min(_MIN_RESULT_WIDTH, widths[name]):
                    del widths["settings"]  # a dozen characters of it say less than the result
            if name in widths and count_missing_columns() > 0:
                shortened = max(_MIN_COLUMN_WIDTH, widths[name] - count_missing_columns())
                widths[name] = min(widths[name], shortened)
        for name in _DROPPED_COLUMNS:
            if count_missing_columns() > 0:
                widths.pop(name, None)
    table = format_table(
        list(widths),
        [[row.get(name, "") for name in widths] for row in cells],
        max_widths=list(widths.values()),
    )
    return table + footer
