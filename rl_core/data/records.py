"""Demonstrations, preferences, prompts and questions, validated row by row: JSONL, Parquet, or lists."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_core.data.files import BadRow, describe, file_digest, read_rows, read_text, unchanged
from rl_core.data.formats import Kind, columns_to_read, format_of, unknown_columns
from rl_core.data.kept_rows import KeptRows, rows_at
from rl_core.data.repeats import Repeats, find_repeats
from rl_core.data.row_schemas import OPTIONAL, Row, demonstration_row, optional_columns, preference_row, prompt_row
from rl_core.data.row_uses import misfit
from rl_core.errors import DataError, RecordsError, SettingsError
from rl_core.storage.faults import fault

__all__ = [
    "RowProblem",
    "Records",
    "Row",
    "RowSource",
    "check_first_rows",
    "read_demonstrations",
    "read_preferences",
    "read_prompts",
    "read_questions",
    "report",
]

RowSource = str | Path | Sequence[Any]  # a JSONL or Parquet file, or rows in memory
CheckRows = Callable[[Sequence[Row]], Iterable[str]]

_DEMONSTRATION_COLUMNS = columns_to_read("demonstrations")
_PREFERENCE_COLUMNS = columns_to_read("preferences")
_LISTED = 10  # bad rows listed in a message

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RowProblem:
    """One unusable row."""

    file: str
    line: int  # line of a JSONL file, row of a Parquet file; both from 1. 0 = `file` already names the row
    field: str  # "" = the row as a whole
    reason: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.field + ': ' if self.field else ''}{self.reason}"


@dataclass(slots=True)
class Records:
    """Result of reading a file: usable `rows`, and a problem for every other row."""

    rows: Sequence[Row]  # prompts and questions as a list, as they may hold any values
    num_rows: int  # rows read, usable or not
    num_skipped: int  # rows dropped, one per problem
    problems: list[RowProblem]
    digest: str  # SHA-256 of the whole file, regardless of max_rows
    lines: list[int] = field(default_factory=list)  # line or row number of each usable row
    formats: Counter[str] = field(default_factory=Counter)  # rows by format; "" = not recognised
    unread: set[str] = field(default_factory=set)  # columns that the formats do not use
    # Usable rows that copy or contradict an earlier one; of demonstrations and preferences only
    repeats: Repeats = field(default_factory=Repeats)


def read_demonstrations(
    path: RowSource,
    *,
    on_bad_row: str = "stop",
    max_rows: int | None = None,
    check_rows: CheckRows | None = None,
) -> Records:
    """Rows {"messages": [{"role", "content"}, ...]} or {"prompt", "completion"}, all converted to "messages".

    Other formats are recognised by their columns (`data.formats`); plain `text` is one message of the role "text".
    Messages may have OpenAI's further fields (`data.messages.checked_messages`); any other one is refused. Optional
    columns `tools` (schemas), `level` and `kind` (text) and `seed` (integer) are kept; a warning names others.
    Args:
        on_bad_row: "stop" raises after the whole file was checked; "skip" drops, counts and logs bad rows.
        max_rows: rows read at most.
        check_rows: called with all usable rows; gives why each is a bad row all the same, "" where it is none.
    Raises: DataError if the file as a whole is unusable; RecordsError (listing the first ten bad rows) on "stop".
    """
    return _read(path, _DEMONSTRATION_COLUMNS, demonstration_row, on_bad_row, max_rows, check_rows)


def read_preferences(
    path: RowSource,
    *,
    on_bad_row: str = "stop",
    max_rows: int | None = None,
    check_rows: CheckRows | None = None,
) -> Records:
    """Rows {"prompt", "chosen", "rejected"}, text or messages; chosen and rejected differ. Or labelled completions.

    Other formats are recognised by their columns (`data.formats`).
    A pair may have a `margin` (a number, at least 0) by which a reward model is to tell its sides apart, or be a `tie`
    (true: neither side is better). A labelled completion is {"prompt", "completion", "label"}, true = desirable (the
    loss `kto`); a scored one has a `score`, a number, in place of the label (a reward model with the loss `mse`).
    Arguments, optional columns and errors are those of `read_demonstrations`.
    """
    return _read(path, _PREFERENCE_COLUMNS, preference_row, on_bad_row, max_rows, check_rows)


def read_prompts(path: RowSource, *, on_bad_row: str = "stop", max_rows: int | None = None) -> Records:
    """Rows {"prompt": text or a list of messages, ...}, every other column kept; in memory also plain texts.

    Arguments and errors are those of `read_demonstrations`.
    """
    return _read(path, None, prompt_row, on_bad_row, max_rows, None)


def read_questions(
    path: RowSource,
    *,
    on_bad_row: str = "stop",
    max_rows: int | None = None,
    check: Callable[[Row], Row] | None = None,
) -> Records:
    """Rows {"question", "answer", "final"}, all text.

    Other arguments, optional columns and errors are those of `read_demonstrations`.
    Args:
        check: completes a row, or refuses it by raising BadRow(field, reason); a missing `final` is passed as "".
    """

    def question(row: Row) -> Row:
        kept = {name: read_text(row, name) for name in ("question", "answer")}
        kept["final"] = "" if check is not None and row.get("final") is None else read_text(row, "final")
        kept |= optional_columns(row)
        return kept if check is None else check(kept)

    columns = ("question", "answer", "final", *OPTIONAL)
    return _read(path, columns, question, on_bad_row, max_rows, None)


def check_first_rows(
    kind: str, path: str | Path, max_rows: int, on_bad_row: str = "stop", uses: Sequence[str] = ()
) -> int:
    """Check of the first `max_rows` rows of a file of `kind` (demonstrations or preferences) without a tokenizer.

    Args:
        uses: what preferences are for, see `misfit`.
    Returns: the number of rows checked. Raises: as `read_demonstrations`; DataError naming a row that does not fit.
    """
    columns, schema = {
        "demonstrations": (_DEMONSTRATION_COLUMNS, demonstration_row),
        "preferences": (_PREFERENCE_COLUMNS, preference_row),
    }[kind]
    records = _checked(path, columns, schema, on_bad_row, max_rows)
    for line, row in zip(records.lines, records.rows, strict=True):
        if reason := next(filter(None, (misfit(row, use) for use in uses)), ""):
            raise DataError(f"{path}:{line}: {reason}")
    return records.num_rows


def _read(
    source: RowSource,
    columns: tuple[str, ...] | None,
    schema: Callable[[Row], Row],
    on_bad_row: str,
    max_rows: int | None,
    check_rows: CheckRows | None,
) -> Records:
    with unchanged(Path(source)) if isinstance(source, str | Path) else contextlib.nullcontext():
        records = _checked(source, columns, schema, on_bad_row, max_rows, check_rows)
        fault("data.read")
        records.digest = _digest(source, records.rows)
    if schema in (demonstration_row, preference_row):
        records.repeats = find_repeats(records.rows)
        name = str(source) if isinstance(source, str | Path) else "data"
        records.repeats.say(name, len(records.rows), records.lines)
    return records


def _checked(
    source: RowSource,
    columns: tuple[str, ...] | None,
    schema: Callable[[Row], Row],
    on_bad_row: str,
    max_rows: int | None,
    check_rows: CheckRows | None = None,
) -> Records:
    """Rows and problems, reported; without the digest."""
    if on_bad_row not in ("stop", "skip"):
        raise SettingsError(f"on_bad_row: '{on_bad_row}' must be 'stop' or 'skip'")
    name = str(source) if isinstance(source, str | Path) else "data"
    kind = _KINDS.get(schema)
    rows: KeptRows | list[Row] = KeptRows() if kind else []
    records = Records(rows, num_rows=0, num_skipped=0, problems=[], digest="")
    found: list[tuple[int, RowProblem]] = []  # with the number of the row
    numbers, in_memory = array("q"), not isinstance(source, str | Path)
    for file, line, raw in _raw_rows(source, columns):
        if max_rows is not None and records.num_rows >= max_rows:
            break
        records.num_rows += 1
        if kind is not None:
            _note_format(records, raw, kind)
        try:
            if isinstance(raw, BadRow):
                raise raw
            row = schema(raw)
        except BadRow as bad:
            found.append((records.num_rows, RowProblem(file, line, bad.field, bad.reason)))
            continue
        numbers.append(records.num_rows)
        rows.append(row)
        records.lines.append(line)
    if not records.num_rows:
        raise DataError(f"{name}: holds no row")
    if records.unread:
        say = _say_unread.__wrapped__ if in_memory else _say_unread
        say(name, ", ".join(sorted(records.unread)))
    if check_rows is not None and records.rows:
        found += _refused(records, list(check_rows(records.rows)), numbers, "" if in_memory else name)
    records.problems = [problem for _, problem in sorted(found, key=lambda each: each[0])]
    records.num_skipped = len(records.problems)
    report(name, records.problems, records.num_rows, on_bad_row)
    return records


@functools.lru_cache(maxsize=1024)  # a file is checked before a run, and read within it
def _say_unread(name: str, columns: str) -> None:
    _logger.warning("%s: columns that are not read: %s", name, columns)


def _note_format(records: Records, raw: Row | BadRow, kind: Kind) -> None:
    form = format_of(raw, kind) if not isinstance(raw, BadRow) else None
    records.formats[form.name if form else ""] += 1
    if form and not isinstance(raw, BadRow):
        records.unread |= unknown_columns(raw, form, kind)


def _raw_rows(source: RowSource, columns: tuple[str, ...] | None) -> Iterator[tuple[str, int, Row | BadRow]]:
    """(file, line, row) of every row; rows in memory are named data[0], data[1], ..., with line 0."""
    if isinstance(source, str | Path):
        for line, raw in read_rows(Path(source), columns):
            yield str(source), line, raw
        return
    if isinstance(source, Mapping) or not isinstance(source, Sequence):
        raise DataError(f"data: expected a JSONL or Parquet file or a list of rows, found {type(source).__name__}")
    for index, row in enumerate(source):
        if isinstance(row, str):
            row = {"prompt": row}
        bad = BadRow("", f"must be an object, found {describe(row)}")
        yield f"data[{index}]", 0, dict(row) if isinstance(row, Mapping) else bad


def _digest(source: RowSource, rows: Sequence[Row]) -> str:
    """SHA-256 of a file's bytes, or of rows in memory as JSON."""
    if isinstance(source, str | Path):
        return file_digest(Path(source))
    return hashlib.sha256(json.dumps(rows, sort_keys=True, default=str).encode()).hexdigest()


def report(source: str, problems: Sequence[RowProblem], num_rows: int, on_bad_row: str) -> None:
    """Raise or log, by `on_bad_row`, if some of the `num_rows` rows of `source` are unusable.

    Raises: RecordsError listing the first ten problems, on "stop" or if no row would be left.
    """
    if not problems:
        return
    count = f"{source}: {len(problems)} of {num_rows} rows cannot be used"
    listed = "".join(f"\n  {problem}" for problem in problems[:_LISTED])
    if len(problems) > _LISTED:
        listed += f"\n  and {len(problems) - _LISTED} more"
    if on_bad_row == "stop":
        raise RecordsError(f"{count}:{listed}\nFix them, or skip them with on_bad_row: skip")
    if len(problems) == num_rows:
        raise RecordsError(f"{count}, so none is left:{listed}")
    _logger.warning("%s and are skipped:%s", count, listed)


def _refused(
    records: Records, reasons: Sequence[str], numbers: Sequence[int], file: str
) -> Iterator[tuple[int, RowProblem]]:
    """Leave out the rows that have a reason; gives the number and problem of each. `file`: "" = rows in memory."""
    for number, line, reason in zip(numbers, records.lines, reasons, strict=True):
        if reason:
            yield number, RowProblem(file or f"data[{number - 1}]", line, "", reason)
    if not any(reasons):
        return
    kept = [place for place, reason in enumerate(reasons) if not reason]
    records.rows = rows_at(records.rows, kept)
    records.lines = [records.lines[place] for place in kept]


_KINDS: dict[Callable[[Row], Row], Kind] = {demonstration_row: "demonstrations", preference_row: "preferences"}
