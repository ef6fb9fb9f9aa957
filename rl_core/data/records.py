"""Demonstrations, preferences, prompts and questions, validated row by row: JSONL, Parquet, or lists.

Rows with prompts from files: JSON Lines, a JSON array, Parquet, CSV, a folder of them, or a hub data set.
"""

from __future__ import annotations

import bisect
import contextlib
import fnmatch
import functools
import hashlib
import json
import logging
import re
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rl_core.data.files import (
    CSV_SUFFIXES,
    DATA_SUFFIXES,
    BadRow,
    compute_file_digest,
    describe_value,
    iter_table_rows,
    list_data_files,
    list_field_names,
    read_field,
    read_rows,
    read_text,
    refuse_concurrent_change,
)
from rl_core.data.formats import (
    OPTIONAL_COLUMNS,
    Row,
    RowKind,
    detect_format,
    find_unknown_columns,
    list_format_columns,
    read_optional_columns,
    validate_demonstration,
    validate_preference,
    validate_prompt,
)
from rl_core.data.messages import load_row_images
from rl_core.data.row_sequences import CompressedRows, select_rows
from rl_core.data.row_uses import explain_misfit
from rl_core.data.splits import RepeatedRows, find_repeats
from rl_core.errors import DataError, RecordsError, SettingsError, suggest_name
from rl_core.storage.faults import inject_fault

# A JSONL or Parquet file, or rows in memory: a list of rows, texts or conversations, a pandas DataFrame, or a
# `datasets.Dataset` (both by what they can do: neither package is needed).
RowSource = str | Path | Sequence[Any] | Any
CheckRows = Callable[[Sequence[Row]], Iterable[str]]

_DEMONSTRATION_COLUMNS = list_format_columns("demonstrations")
_PREFERENCE_COLUMNS = list_format_columns("preferences")
SKIP_ADVICE = "Fix them, or skip them with on_bad_row: skip"
_MAX_LISTED_PROBLEMS = 10  # bad rows listed in a message; rows with equal problems are one
_MAX_LISTED_PLACES = 5  # of further rows with the same problem

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RowProblem:
    """One unusable row."""

    file: str
    line: int  # line of a JSONL file, row of a Parquet file; both from 1. 0 = `file` already names the row
    field: str  # "" = the entire row
    reason: str

    @property
    def place(self) -> str:
        """File and line."""
        return f"{self.file}:{self.line}" if self.line else self.file

    def __str__(self) -> str:
        return f"{self.place}: {self.field + ': ' if self.field else ''}{self.reason}"


@dataclass(slots=True)
class Records:
    """Result of reading a file: usable `rows`, and a problem for every other row."""

    rows: Sequence[Row]  # prompts and questions as a list, as they may hold any values
    num_rows: int  # rows read, usable or not
    num_skipped: int  # rows dropped, one per problem
    problems: list[RowProblem]
    digest: str  # SHA-256 of the file, regardless of max_rows
    lines: list[int] = field(default_factory=list)  # line or row number of each usable row
    numbers: Sequence[int] = ()  # of each usable row among those read, from 1
    formats: Counter[str] = field(default_factory=Counter)  # rows by format; "" = not recognised
    unread_columns: set[str] = field(default_factory=set)  # columns that the formats do not use
    # Usable rows that copy or contradict an earlier one; of demonstrations and preferences only
    repeats: RepeatedRows = field(default_factory=RepeatedRows)


def read_demonstrations(
    path: RowSource,
    *,
    on_bad_row: str = "stop",
    max_rows: int | None = None,
    check_rows: CheckRows | None = None,
) -> Records:
    """Read rows {"messages": [{"role", "content"}, ...]} or {"prompt", "completion"}, all converted to "messages".

    Other formats are recognised by their columns (`data.formats`); plain `text` is one message of the role "text".
    Messages may have OpenAI's further fields (`data.messages.validate_messages`); any other one is refused. Optional
    columns `tools` (schemas), `level` and `kind` (text) and `seed` (integer) are kept; a warning names others.
    Args:
        on_bad_row: "stop" raises after the whole file was checked; "skip" drops, counts and logs bad rows.
        max_rows: rows read at most.
        check_rows: called with all usable rows; returns why each is a bad row nevertheless, "" if it is usable.
    Raises: DataError if the file as a whole is unusable; RecordsError (listing the first ten bad rows) on "stop".
    """
    return _read_records(
        path, _DEMONSTRATION_COLUMNS, validate_demonstration, on_bad_row, max_rows, check_rows
    )


def read_preferences(
    path: RowSource,
    *,
    on_bad_row: str = "stop",
    max_rows: int | None = None,
    check_rows: CheckRows | None = None,
) -> Records:
    """Read rows {"prompt", "chosen", "rejected"}, text or messages, whose sides differ; or labelled completions.

    Other formats are recognised by their columns (`data.formats`).
    A pair may have a `margin` (a number, at least 0) by which a reward model is to tell its sides apart, or be a `tie`
    (true: neither side is better). A labelled completion is {"prompt", "completion", "label"}, true = desirable (the
    loss `kto`); a scored one has a `score`, a number, in place of the label (a reward model with the loss `mse`).
    Arguments, optional columns and errors are those of `read_demonstrations`.
    """
    return _read_records(
        path, _PREFERENCE_COLUMNS, validate_preference, on_bad_row, max_rows, check_rows
    )


def read_prompts(
    path: RowSource,
    *,
    on_bad_row: str = "stop",
    max_rows: int | None = None,
    folder: Path | None = None,
) -> Records:
    """Read rows {"prompt": text or a list of messages, ...} with every other column; in memory also plain texts.

    Other arguments and errors are those of `read_demonstrations`.
    Args:
        folder: of the images that rows in memory name; None = the current one.
    """
    return _read_records(path, None, validate_prompt, on_bad_row, max_rows, None, folder)


def read_questions(
    path: RowSource,
    *,
    on_bad_row: str = "stop",
    max_rows: int | None = None,
    check: Callable[[Row], Row] | None = None,
) -> Records:
    """Read rows {"question", "answer", "final"}, all text.

    Other arguments, optional columns and errors are those of `read_demonstrations`.
    Args:
        check: completes a row, or refuses it by raising BadRow(field, reason); a missing `final` is passed as "".
    """

    def question(row: Row) -> Row:
        kept = {name: read_text(row, name) for name in ("question", "answer")}
        kept["final"] = (
            "" if check is not None and row.get("final") is None else read_text(row, "final")
        )
        kept |= read_optional_columns(row)
        return kept if check is None else check(kept)

    columns = ("question", "answer", "final", *OPTIONAL_COLUMNS)
    return _read_records(path, columns, question, on_bad_row, max_rows, None)


def check_first_rows(
    kind: str, path: str | Path, max_rows: int, on_bad_row: str = "stop", uses: Sequence[str] = ()
) -> int:
    """Check of the first `max_rows` rows of a file of `kind` (demonstrations or preferences) without a tokenizer.

    Args:
        uses: what preferences are for, see `misfit`.
    Returns: the number of rows checked. Raises: as `read_demonstrations`; DataError naming a row that does not fit.
    """
    columns, schema = {
        "demonstrations": (_DEMONSTRATION_COLUMNS, validate_demonstration),
        "preferences": (_PREFERENCE_COLUMNS, validate_preference),
    }[kind]
    records = _read_checked_rows(path, columns, schema, on_bad_row, max_rows)
    for line, row in zip(records.lines, records.rows, strict=True):
        if reason := next(filter(None, (explain_misfit(row, use) for use in uses)), ""):
            raise DataError(f"{path}:{line}: {reason}")
    return records.num_rows


def _read_records(
    source: RowSource,
    columns: tuple[str, ...] | None,
    schema: Callable[[Row], Row],
    on_bad_row: str,
    max_rows: int | None,
    check_rows: CheckRows | None,
    folder: Path | None = None,
) -> Records:
    with (
        refuse_concurrent_change(Path(source))
        if isinstance(source, str | Path)
        else contextlib.nullcontext()
    ):
        records = _read_checked_rows(
            source, columns, schema, on_bad_row, max_rows, check_rows, folder
        )
        inject_fault("data.read")
        records.digest = _compute_source_digest(source, records.rows)
    if schema in (validate_demonstration, validate_preference):
        records.repeats = find_repeats(records.rows)
        name = str(source) if isinstance(source, str | Path) else "data"
        records.repeats.warn_about_repeats(name, len(records.rows), records.lines)
    return records


def _read_checked_rows(
    source: RowSource,
    columns: tuple[str, ...] | None,
    schema: Callable[[Row], Row],
    on_bad_row: str,
    max_rows: int | None,
    check_rows: CheckRows | None = None,
    folder: Path | None = None,
) -> Records:
    """Read rows and problems, reported; without the digest."""
    if on_bad_row not in ("stop", "skip"):
        raise SettingsError(f"on_bad_row: '{on_bad_row}' must be 'stop' or 'skip'")
    name = str(source) if isinstance(source, str | Path) else "data"
    kind = _KINDS_BY_VALIDATOR.get(schema)
    rows: CompressedRows | list[Row] = CompressedRows() if kind else []
    records = Records(rows, num_rows=0, num_skipped=0, problems=[], digest="")
    problems: list[tuple[int, RowProblem]] = []  # with the number of the row
    numbers, in_memory = array("q"), not isinstance(source, str | Path)
    folder = Path(source).parent if isinstance(source, str | Path) else folder
    list_column = "messages" if schema is validate_demonstration else "prompt"
    for file, line, raw in _iter_raw_rows(source, columns, list_column):
        if max_rows is not None and records.num_rows >= max_rows:
            break
        records.num_rows += 1
        if kind is not None:
            _count_format(records, raw, kind)
        try:
            if isinstance(raw, BadRow):
                raise raw
            if schema in (validate_demonstration, validate_prompt):
                raw = load_row_images(raw, folder, may_be_unused=schema is validate_prompt)
            row = schema(raw)
        except BadRow as bad:
            problems.append((records.num_rows, RowProblem(file, line, bad.field, bad.reason)))
            continue
        numbers.append(records.num_rows)
        rows.append(row)
        records.lines.append(line)
    records.numbers = numbers
    if not records.num_rows:
        raise DataError(f"{name}: holds no row")
    if records.unread_columns:
        say = _warn_about_unread_columns.__wrapped__ if in_memory else _warn_about_unread_columns
        say(name, ", ".join(sorted(records.unread_columns)))
    if check_rows is not None and records.rows:
        problems += _drop_refused_rows(
            records, list(check_rows(records.rows)), numbers, "" if in_memory else name
        )
    records.problems = [problem for _, problem in sorted(problems, key=lambda each: each[0])]
    records.num_skipped = len(records.problems)
    report_row_problems(name, records.problems, records.num_rows, on_bad_row)
    return records


@functools.lru_cache(maxsize=1024)  # a file is checked before a run, and read within it
def _warn_about_unread_columns(name: str, columns: str) -> None:
    _logger.warning("%s: columns that are not read: %s", name, columns)


def _count_format(records: Records, raw: Row | BadRow, kind: RowKind) -> None:
    form = detect_format(raw, kind) if not isinstance(raw, BadRow) else None
    records.formats[form.name if form else ""] += 1
    if form and not isinstance(raw, BadRow):
        records.unread_columns |= find_unknown_columns(raw, form, kind)


def _iter_raw_rows(
    source: RowSource, columns: tuple[str, ...] | None, list_column: str = "prompt"
) -> Iterator[tuple[str, int, Row | BadRow]]:
    """Yield (file, line, row) of every row; rows in memory are named data[0], data[1], ..., with line 0.

    Args:
        list_column: of a row that is a list of messages.
    """
    if isinstance(source, str | Path):
        for line, raw in read_rows(Path(source), columns):
            yield str(source), line, raw
        return
    for index, row in enumerate(iter_table_rows(source)):
        if isinstance(row, str):
            row = {"prompt": row}
        elif isinstance(row, list):
            row = {list_column: row}
        bad = BadRow("", f"must be an object, found {describe_value(row)}")
        yield f"data[{index}]", 0, dict(row) if isinstance(row, Mapping) else bad


def _compute_source_digest(source: RowSource, rows: Sequence[Row]) -> str:
    """Compute the SHA-256 of a file's bytes, or of rows in memory as JSON."""
    if isinstance(source, str | Path):
        return compute_file_digest(Path(source))
    return hashlib.sha256(json.dumps(rows, sort_keys=True, default=str).encode()).hexdigest()


def report_row_problems(
    source: str,
    problems: Sequence[RowProblem],
    num_rows: int,
    on_bad_row: str,
    advice: str = SKIP_ADVICE,
) -> None:
    """Raise or log, by `on_bad_row`, if some of the `num_rows` rows of `source` are unusable.

    Raises: RecordsError listing the first ten problems, on "stop" or if no row would be left.
    """
    if not problems:
        return
    count = f"{source}: {len(problems)} of {num_rows} rows cannot be used"
    groups: dict[tuple[str, str], list[RowProblem]] = {}
    for problem in problems:
        groups.setdefault((problem.field, problem.reason), []).append(problem)
    listed = "".join(
        f"\n  {_format_equal_problems(group)}"
        for group in list(groups.values())[:_MAX_LISTED_PROBLEMS]
    )
    if unlisted := sum(map(len, list(groups.values())[_MAX_LISTED_PROBLEMS:])):
        listed += f"\n  and {unlisted} more"
    if on_bad_row == "stop":
        raise RecordsError(f"{count}:{listed}\n{advice}")
    if len(problems) == num_rows:
        raise RecordsError(f"{count}, so none is left:{listed}")
    _logger.warning("%s and are skipped:%s", count, listed)


def _format_equal_problems(problems: Sequence[RowProblem]) -> str:
    """Format problems with the same field and reason: the first one with the lines of the others."""
    first, *others = problems
    if not others:
        return str(first)
    places = [
        str(problem.line) if problem.line and problem.file == first.file else problem.place
        for problem in others[:_MAX_LISTED_PLACES]
    ]
    more = f" and {len(others) - len(places)} more" if len(others) > len(places) else ""
    return f"{first} ({len(problems)} rows; also {', '.join(places)}{more})"


def _drop_refused_rows(
    records: Records, reasons: Sequence[str], numbers: Sequence[int], file: str
) -> Iterator[tuple[int, RowProblem]]:
    """Drop rows that have a reason; return number and problem of each. `file`: "" = rows in memory."""
    for number, line, reason in zip(numbers, records.lines, reasons, strict=True):
        if reason:
            yield number, RowProblem(file or f"data[{number - 1}]", line, "", reason)
    if not any(reasons):
        return
    usable = [place for place, reason in enumerate(reasons) if not reason]
    records.rows = select_rows(records.rows, usable)
    records.lines = [records.lines[place] for place in usable]
    records.numbers = array("q", (numbers[place] for place in usable))


_KINDS_BY_VALIDATOR: dict[Callable[[Row], Row], RowKind] = {
    validate_demonstration: "demonstrations",
    validate_preference: "preferences",
}


TABLE_SUFFIXES = (*DATA_SUFFIXES, ".json")
_REVISION = re.compile(r"[0-9a-f]{40}")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass
class PromptRows:
    """Usable rows, and what was read."""

    rows: list[Row] = field(default_factory=list)
    num_rows: int = 0
    num_skipped: int = 0
    files: list[str] = field(default_factory=list)
    digest: str = ""
    numbers: array[int] = field(default_factory=lambda: array("q"))  # of each row, from 1
    starts: list[tuple[int, str]] = field(default_factory=list)  # first row of each file
    # What verifiers said of the rows, by verifier; rows are cached, so each is asked once.
    refused: dict[str, list[tuple[int, str]]] = field(default_factory=dict)

    def describe_place(self, index: int) -> str:
        """Return file and number of a row: the line of a JSONL file, else the row."""
        name = [file for first, file in self.starts if first <= index][-1]
        return f"{name}{self.numbers[index]}"

    def drop_rows(self, dropped: Collection[int]) -> PromptRows:
        """Return a copy without some rows, which count as skipped."""
        usable = [index for index in range(len(self.rows)) if index not in dropped]
        starts = [(bisect.bisect_left(usable, first), file) for first, file in self.starts]
        return replace(
            self,
            rows=[self.rows[index] for index in usable],
            numbers=array("q", (self.numbers[index] for index in usable)),
            starts=starts,
            num_skipped=self.num_skipped + len(dropped),
            refused={},
        )


def read_prompt_rows(
    path: str | Path,
    *,
    prompt: str = "prompt",
    files: str | None = None,
    revision: str | None = None,
    on_bad_row: str = "stop",
    max_rows: int | None = None,
) -> PromptRows:
    """Read rows of all data files at a path, each with a `prompt` and every other column.

    Args:
        path: a file, a folder of files with the same columns, or with `revision` a hub data set 'owner/name'.
        prompt: column of the prompt, text or a list of messages.
        files: pattern of the files of a folder or data set that are read, as 'data/train-*.parquet'.
        revision: commit of the hub data set, 40 hex digits, so that the same settings are the same rows.
    Raises: DataError, RecordsError, SettingsError naming options.path, options.revision or options.prompt.
    """
    place = Path(path).expanduser()
    if revision is not None:
        place = _download_hub_data_set(str(path), revision, files)
    elif not place.exists():
        hint = ""
        if _HUB_NAME.fullmatch(str(path)):
            hint = "; a data set of the hub needs options.revision, the 40 hex digits of a commit"
        raise SettingsError(f"options.path: no such file or folder: {place}{hint}")
    prompt_rows, digests = PromptRows(), []
    for file in list_table_files(place, files):
        left = None if max_rows is None else max_rows - prompt_rows.num_rows
        if left == 0:
            break
        records = read_prompts(
            _load_prompt_column(file, prompt),
            on_bad_row=on_bad_row,
            max_rows=left,
            folder=file.parent,
        )
        has_lines = bool(records.lines and records.lines[0]) and file.suffix == ".jsonl"
        prompt_rows.starts.append(
            (len(prompt_rows.rows), f"{file}{':' if has_lines else ': row '}")
        )
        prompt_rows.numbers.extend(records.lines if has_lines else records.numbers)
        prompt_rows.rows += records.rows
        prompt_rows.num_rows += records.num_rows
        prompt_rows.num_skipped += records.num_skipped
        prompt_rows.files.append(str(file))
        digests.append(compute_file_digest(file))
    prompt_rows.digest = (
        digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()
    )
    return prompt_rows


def list_table_files(place: Path, pattern: str | None = None) -> list[Path]:
    """List the file itself, or the data files of a folder, sorted, without hidden ones. Raises: SettingsError."""
    if not place.is_dir():
        return [place]
    shown = list_data_files(place, TABLE_SUFFIXES)
    inside = {path: path.relative_to(place) for path in shown}
    wanted = [
        path for path in shown if pattern is None or fnmatch.fnmatch(str(inside[path]), pattern)
    ]
    if not wanted:
        names = ", ".join(sorted(str(inside[path]) for path in shown)[:10])
        text = (
            f"options.files: '{pattern}' is none of {names}"
            if shown
            else f"options.path: {place} holds no data file"
        )
        raise SettingsError(f"{text} ({', '.join(TABLE_SUFFIXES)})")
    kinds = sorted({_strip_shard_suffix(inside[path]) for path in wanted})
    if pattern is None and len(kinds) > 1:
        raise SettingsError(
            f"options.files: {place} holds files of several kinds ({', '.join(kinds[:10])}); name those to read, as "
            f"'{kinds[0]}*'"
        )
    return wanted


def _strip_shard_suffix(name: Path) -> str:
    """Return a file's name without its shard: train-00000-of-00002.parquet -> train."""
    return str(name.with_name(re.split(r"[-_.]?\d|\.", name.name)[0]))


def _load_prompt_column(file: Path, prompt: str) -> Path | list[Row]:
    """Return the file, or its rows if they have to be changed before they are checked."""
    if file.suffix == ".json":
        rows = list(_read_array_rows(file))
    elif prompt == "prompt" and file.suffix.lower() not in CSV_SUFFIXES:
        _check_prompt_column(file, _read_first_row(file), prompt)
        return file
    else:
        rows = []
        for line, row in read_rows(file, None, plain_cells=True):
            if isinstance(row, BadRow):
                raise DataError(f"{file}:{line}: {row}")
            rows.append(row)
    _check_prompt_column(file, rows[0] if rows else None, prompt)
    if prompt == "prompt":
        return rows
    return [{**row, "prompt": read_field(row, prompt)} for row in rows]


def _read_first_row(file: Path) -> Row | None:
    row = next((row for _, row in read_rows(file, None)), None)
    return None if isinstance(row, BadRow) else row


def _check_prompt_column(file: Path, row: Row | None, prompt: str) -> None:
    if row is None or prompt in row or read_field(row, prompt) is not None:
        return
    columns = list_field_names(row)
    likely = next(
        (
            name
            for name in ("question", "problem", "instruction", "query", "messages")
            if name in row
        ),
        None,
    )
    hint = f"set options.prompt: {likely}" if likely else suggest_name(prompt, columns)
    raise SettingsError(
        f"options.prompt: {file} has no column '{prompt}'; its first row has {', '.join(columns) or 'none'}; {hint}"
    )


def _read_array_rows(file: Path) -> Sequence[Row]:
    """Read the rows of one JSON array. Raises: DataError."""
    try:
        rows = json.loads(file.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: is not UTF-8 (byte {error.start}); save it as UTF-8") from error
    except (ValueError, RecursionError, OSError) as error:
        raise DataError(
            f"{file}: is not one JSON array ({error}); a file of one object a line is .jsonl"
        ) from error
    if not isinstance(rows, list):
        raise DataError(f"{file}: holds one {type(rows).__name__}, expected an array of objects")
    return rows


def _download_hub_data_set(name: str, revision: str, files: str | None) -> Path:
    """Return the folder of a hub data set at a commit, cached if possible. Raises: SettingsError, DataError."""
    if not _REVISION.fullmatch(revision):
        raise SettingsError(
            f"options.revision: '{revision}' is no commit (40 hex digits); a branch may change between two runs"
        )
    if not _HUB_NAME.fullmatch(name):
        raise SettingsError(
            f"options.path: '{name}' is no data set of the hub (owner/name), which revision asks for"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = [files] if files else [f"**{suffix}" for suffix in TABLE_SUFFIXES]
    try:
        return Path(
            snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=patterns)
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = (
            str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
        )
        raise DataError(
            f"options.path: the data set {name} at {revision[:8]} could not be fetched and is not in the local cache "
            f"({type(error).__name__}: {reason}); without a network, download it elsewhere and name the folder"
        ) from error
