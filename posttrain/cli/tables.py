"""Tables for the terminal, without borders (in a pipe or a file nothing is cut), and data for programs."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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


def print_json(record: Any) -> None:
    """Print a record as JSON: the form of every `--json`.

    Numbers that JSON lacks (nan, inf) are null, paths and dates are text, and all characters are ASCII, so that any
    terminal encoding carries them.
    """
    print(json.dumps(convert_to_json(record), indent=1, allow_nan=False))


def convert_to_json(value: Any) -> Any:
    """Convert a record to values that JSON has."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {str(key): convert_to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [convert_to_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if callable(getattr(value, "item", None)):  # a number of numpy or torch
        return convert_to_json(value.item())
    return str(value)  # a path, a date


def print_csv(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as CSV: the form of every `--csv`. Nested fields are columns such as metrics.train/loss."""
    flat = [dict(_flatten_row(convert_to_json(row), "")) for row in rows]
    columns = list(dict.fromkeys(key for row in flat for key in row))
    if not columns:
        return
    writer = csv.DictWriter(sys.stdout, columns, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(flat)


def _flatten_row(row: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from _flatten_row(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            yield f"{prefix}{key}", json.dumps(value)
        else:
            yield f"{prefix}{key}", value


def print_requested_data(
    arguments: argparse.Namespace, record: Any, rows: Sequence[Mapping[str, Any]] | None = None
) -> bool:
    """Print data if `--json` or `--csv` requests it; return whether one of them does.

    Args:
        rows: of the table; None = the record is the list of rows.
    """
    if arguments.json:
        print_json(record)
    elif getattr(arguments, "csv", False):
        print_csv(record if rows is None else rows)
    else:
        return False
    return True


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

    In a terminal that is too narrow, the link of the newest run moves below the table. Then settings and results are
    cut. Settings and then the start time are dropped if they leave too little of the results.
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
        for name in _TRUNCATED_COLUMNS:
            for other in ("settings", "started"):
                remaining = widths.get("result", 0) - count_missing_columns()
                needed = min(_MIN_RESULT_WIDTH, widths.get("result", 0))
                if name == "result" and remaining < needed:
                    widths.pop(other, None)  # a dozen characters of it say less than the result
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
