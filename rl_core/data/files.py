"""Row readers for JSON Lines, CSV and Parquet, with specific errors for other file types and for bad rows."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import math
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_core.errors import DataError

PARQUET_SUFFIXES = (".parquet", ".pq")
MAX_LINE = 64 * 2**20  # bytes; a longer line is no row, and refusing it bounds memory
CSV_SUFFIXES = (".csv", ".tsv")
DATA_SUFFIXES = (".jsonl", *CSV_SUFFIXES, *PARQUET_SUFFIXES)
_BOM = b"\xef\xbb\xbf"
_BLANK = b" \t\r\n"  # JSON white space; U+2028 and the like are text
_HEAD = 4096
MAX_DEPTH = 64  # levels of lists and objects within a row
_MAX_PLACE_CHARACTERS = 80  # characters of a place in a message

_FOREIGN_FILE_TYPES = {  # first bytes of common file types with a wrong extension
    b"version https://git-lfs": "is a Git LFS pointer, not the data; fetch the data with `git lfs pull`",
    b"\x1f\x8b": "is gzip-compressed; unpack it first (`gunzip`)",
    b"PK\x03\x04": "is a zip archive; unpack it first",
    b"BZh": "is bzip2-compressed; unpack it first",
    b"\xfd7zXZ\x00": "is xz-compressed; unpack it first",
    b"\x28\xb5\x2f\xfd": "is zstd-compressed; unpack it first",
    b"\xff\xfe": "is UTF-16 or UTF-32; save it as UTF-8",
    b"\xfe\xff": "is UTF-16; save it as UTF-8",
    b"\x00\x00\xfe\xff": "is UTF-32; save it as UTF-8",
}


class BadRow(Exception):
    """Unusable row; caught and collected by the readers of rl_core.data.records."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}" if field else reason)
        self.field = field
        self.reason = reason


def list_data_files(path: Path, suffixes: tuple[str, ...] = DATA_SUFFIXES) -> list[Path]:
    """List the file itself, or all data files under a folder, sorted by name, without hidden ones."""
    if not path.is_dir():
        return [path]
    candidates = (item for item in path.rglob("*") if item.suffix in suffixes and item.is_file())
    return sorted(
        item
        for item in candidates
        if not any(p.startswith(".") for p in item.relative_to(path).parts)
    )


def describe_value(value: object) -> str:
    """Return JSON type and value for an error message, truncated."""
    if value is None:
        return "null"
    if isinstance(value, str):
        kind = "text"
    elif isinstance(value, bool):
        kind = "a truth value"
    elif isinstance(value, int | float):
        kind = "a number"
    elif isinstance(value, list):
        kind = "a list"
    elif isinstance(value, dict):
        kind = "an object"
    else:
        kind = type(value).__name__
    shown = ascii(value)
    return f"{kind} ({shown if len(shown) <= 40 else shown[:37] + '...'})"


_RIGHT_ANSWERS = ("answer", "final", "target", "solution", "ground_truth")


def read_number(row: Mapping[str, Any], name: str, lowest: float = -sys.float_info.max) -> float:
    """Return a finite number of a row, at least `lowest`. Raises: BadRow."""
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRow(name, f"must be a number, found {describe_value(value)}")
    if not lowest <= value <= sys.float_info.max:
        least = f" and at least {lowest:g}" if lowest >= 0 else ""
        raise BadRow(name, f"must be finite{least}, found {str(value)[:40]}")
    return float(value)


def read_text(row: Mapping[str, Any], name: str, path: str = "", may_be_empty: bool = False) -> str:
    """Return the text of one field. Raises: BadRow naming the field."""
    path = path or name
    if name not in row:
        raise BadRow(path, "is missing")
    value = row[name]
    if not isinstance(value, str):
        raise BadRow(path, f"must be text, found {describe_value(value)}")
    if not may_be_empty and not value.strip():
        raise BadRow(path, "is empty")
    _refuse_surrogate(value, path)
    return value


def refuse_answer_row(row: Mapping[str, Any]) -> None:
    """Refuse a row of a prompt and its right answer, which is no completion to imitate. Raises: BadRow."""
    name = next((name for name in _RIGHT_ANSWERS if name in row), None)
    if name is None or "completion" in row:
        return
    raise BadRow(
        "completion",
        f"is missing: these are prompts with a right answer ('{name}'). To reward answers, name the file in "
        f"environment: {{name: prompts, options: {{path: FILE, verifier: exact}}}}; to imitate them, write jq -c "
        f"'{{prompt, completion: .{name}}}' FILE > NEW.jsonl",
    )


def read_field(row: Mapping[str, Any], name: str) -> Any:
    """Return a column of a row, or a field within one (`reward_model.ground_truth`); None if there is none."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def list_field_names(row: Mapping[str, Any], prefix: str = "") -> list[str]:
    """List the columns of a row and the fields within them, as `read_field` takes them."""
    names = []
    for name, value in row.items():
        names.append(prefix + str(name))
        if isinstance(value, Mapping):
            names += list_field_names(value, f"{prefix}{name}.")
    return names


def compute_file_digest(path: Path) -> str:
    """Compute the SHA-256 of the file, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def refuse_concurrent_change(path: Path) -> Iterator[None]:
    """Guard a block that reads a file: refuse the file if it is written or replaced meanwhile.

    Raises: DataError naming the file.
    """
    before = _read_file_stamp(path)
    try:
        yield
    except DataError as error:  # of a row that was half there, perhaps
        if _read_file_stamp(path) != before:
            raise _build_changed_error(path) from error
        raise
    if _read_file_stamp(path) != before:
        raise _build_changed_error(path)


def _read_file_stamp(path: Path) -> tuple[int, int, int] | None:
    """Return identity, size and time of change; None if there is nothing to read."""
    try:
        stat = path.stat()
    except (OSError, ValueError):
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _build_changed_error(path: Path) -> DataError:
    return DataError(
        f"{path}: was changed while it was read; start again when nothing writes to it"
    )


def read_rows(
    path: Path, columns: Collection[str] | None, *, plain_cells: bool = False
) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """Yield rows of a file with their line number (JSON Lines) or row number (Parquet), from 1.

    Lines are split at line feeds only; blank lines are skipped.
    Args:
        columns: the columns to read; a Parquet file may hold others of any type. None = all.
        plain_cells: of CSV, every cell is text, empty ones too; else those of our columns are read as values and lists.
    Raises: DataError, before the first row, if the file as a whole is invalid.
    """
    head = _read_file_head(path)
    if path.suffix.lower() in PARQUET_SUFFIXES:
        if not head.startswith(b"PAR1"):
            raise DataError(
                f"{path}: is not Parquet despite its name (it does not start with PAR1)"
            )
        return _read_parquet_rows(path, columns)
    if path.suffix.lower() in CSV_SUFFIXES:
        return _read_csv_rows(path, plain_cells)
    _refuse_non_json_lines(path, head)
    return _read_json_rows(path)


def _read_file_head(path: Path) -> bytes:
    """Return the first bytes of a readable file.

    Raises: DataError, also for a known file type with a wrong extension.
    """
    try:
        if path.is_dir():
            raise DataError(f"{path}: is a folder; name one JSONL, CSV or Parquet file in it")
        if path.exists() and not path.is_file():
            raise DataError(f"{path}: is not a regular file")
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        raise DataError(f"{path}: cannot be read ({error})") from error
    if not head:
        raise DataError(f"{path}: is empty (0 bytes)")
    for magic, words in _FOREIGN_FILE_TYPES.items():
        if head.startswith(magic):
            raise DataError(f"{path}: {words}")
    return head


def _refuse_non_json_lines(path: Path, head: bytes) -> None:
    if head.startswith(b"PAR1"):
        raise DataError(f"{path}: is Parquet under another name; rename it to {path.stem}.parquet")
    if head.count(0) * 5 > len(head):
        raise DataError(
            f"{path}: contains NUL bytes, so it is UTF-16, UTF-32 or binary; save it as UTF-8"
        )
    start = head.removeprefix(_BOM).lstrip(_BLANK)
    first_line = start.split(b"\n", 1)[0].strip(_BLANK)
    if start.startswith(b"["):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _HEAD))
            tail = file.read().rstrip(_BLANK)
        if first_line == b"[" or tail.endswith(b"]"):
            line = 1 + head[: head.find(b"[")].count(b"\n")
            raise DataError(
                f"{path}:{line}: here one JSON array begins; JSON Lines needs one object per line, without brackets "
                f"and commas: jq -c '.[]' {path.name} > {path.stem}.jsonl"
            )
    if first_line == b"{":
        raise DataError(
            f"{path}: is one JSON document over many lines; JSON Lines needs one object per line"
        )


def _read_json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    with path.open("rb") as file:  # in binary mode lines end only at \n
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE), b""), start=1):
            if len(line) == MAX_LINE and not line.endswith(b"\n"):
                raise DataError(
                    f"{path}:{number}: the line is longer than {MAX_LINE // 2**20} MiB, so it is no row"
                )
            line = (line.removeprefix(_BOM) if number == 1 else line).strip(_BLANK)
            if not line:
                continue
            try:
                yield number, _parse_json_line(line)
            except BadRow as bad:
                yield number, bad


_LIST_COLUMNS = (
    "messages",
    "conversations",
    "prompt",
    "completion",
    "chosen",
    "rejected",
    "tools",
    "history",
)  # JSON in a cell
_VALUE_COLUMNS = (
    "label",
    "margin",
    "score",
    "seed",
    "tie",
)  # numbers and truth values, which a CSV file has as text
_LONGEST_CELL = 2**27  # characters


def _read_csv_rows(path: Path, plain_cells: bool) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """Yield rows of a CSV file with a header, numbered by the line on which each begins."""
    line, before = 1, csv.field_size_limit(_LONGEST_CELL)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(
                file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True
            )
            names = next(reader, [])
            if not names or len(set(names)) < len(names) or not all(names):
                raise DataError(
                    f"{path}:1: the header needs a name for each column, each once; found {names}"
                )
            line = reader.line_num + 1
            for cells in reader:
                if cells and len(cells) != len(names):
                    problem = f"has {len(cells)} cells, the header {len(names)} columns; quote texts that hold commas"
                    yield line, BadRow("", problem)
                elif cells:
                    row = dict(zip(names, cells, strict=True))
                    yield line, dict(row) if plain_cells else _parse_cells(row)
                line = reader.line_num + 1
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: is not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from None
    except csv.Error as error:
        raise DataError(f"{path}:{line}: is not CSV: {error}") from None
    finally:
        csv.field_size_limit(before)


def _parse_cells(cells: Mapping[str, str]) -> dict[str, Any] | BadRow:
    """Parse the cells of our columns; omit empty ones."""
    row: dict[str, Any] = {}
    for name, cell in cells.items():
        if not cell:
            continue
        row[name] = cell
        is_list = name in _LIST_COLUMNS and cell.lstrip().startswith(("[", "{"))
        if is_list or name in _VALUE_COLUMNS:
            try:
                row[name] = json.loads(cell.lower() if name in _VALUE_COLUMNS else cell)
            except ValueError:
                if name in ("messages", "conversations", "tools", *_VALUE_COLUMNS):
                    return BadRow(
                        name,
                        f"must be JSON in its cell (json.dumps, not str), found {describe_value(cell)}",
                    )
    return row


def _parse_json_line(line: bytes) -> dict[str, Any]:
    """Parse one line as an object. Raises: BadRow."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRow(
            "", f"is not UTF-8: byte {error.start} of the line is 0x{line[error.start]:02x}"
        ) from None
    value = read_json(text)
    if not isinstance(value, dict):
        raise BadRow("", f"must be an object, found {describe_value(value)}")
    return value


def read_json(text: str, path: str = "") -> Any:
    """Parse the JSON value of a text, at `place` of a row, fit to be stored again. Raises: BadRow."""
    try:
        value = json.loads(text, object_pairs_hook=_build_unique_object)
        refuse_unstorable(value, path, surrogates="\\u" in text)
    except json.JSONDecodeError as error:
        raise BadRow(path, f"is not JSON: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise BadRow(path, "is nested too deeply") from None
    except ValueError as error:  # an integer of thousands of digits
        raise BadRow(path, f"is not readable as JSON: {error}") from None
    return value


def _build_unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise BadRow(
            next(name for name in counts if counts[name] > 1), "appears twice in one object"
        )
    return value


def refuse_unstorable(
    value: object,
    path: str,
    depth: int = MAX_DEPTH,
    surrogates: bool = True,
    numbers: bool = True,
) -> None:
    """Raise for values that Python takes and JSON or UTF-8 has not, and for nesting that ends recursive writers.

    NaN and Infinity (and 1e999), unless `numbers` is False; halves of surrogate pairs, unless the caller knows that
    there are none.
    """
    if isinstance(value, str):
        if surrogates:
            _refuse_surrogate(value, path)
        return
    if numbers and isinstance(value, float) and not math.isfinite(value):
        raise BadRow(path, f"{value} is not a valid JSON number")
    if not isinstance(value, (dict, list, Mapping)):
        return
    if depth == 0:
        raise BadRow(
            path[:_MAX_PLACE_CHARACTERS], f"is nested too deeply, more than {MAX_DEPTH} levels"
        )
    if isinstance(value, Mapping):
        for name, item in value.items():
            if surrogates:
                _refuse_surrogate(str(name), path)
            place = f"{path}.{name}" if path else str(name)
            refuse_unstorable(item, place, depth - 1, surrogates, numbers)
    else:
        for index, item in enumerate(value):
            refuse_unstorable(item, f"{path}[{index}]", depth - 1, surrogates, numbers)


def _refuse_surrogate(text: str, place: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"\\u{ord(text[error.start]):04x}"
        raise BadRow(
            place, f"holds half of a surrogate pair ({found} at character {error.start + 1})"
        ) from None


def _read_parquet_rows(
    path: Path, columns: Collection[str] | None
) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{path}: reading Parquet needs pyarrow, which is not installed") from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if twice := [name for name, count in Counter(names).items() if count > 1]:
                raise DataError(
                    f"{path}: has the column '{twice[0]}' {names.count(twice[0])} times; rename one"
                )
            known = [name for name in names if columns is None or name in columns]
            if columns is not None and file.metadata.num_rows and not known:
                raise DataError(f"{path}: has none of the columns {', '.join(sorted(columns))}")
            for batch in file.iter_batches(batch_size=1024, columns=known):
                for row in range(batch.num_rows):
                    number += 1
                    yield number, _read_parquet_row(batch, row)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{path}: cannot be read as Parquet, after {number} rows: {error}"
        ) from error


def _read_parquet_row(batch: Any, row: int) -> dict[str, Any] | BadRow:
    values: dict[str, Any] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            values[name] = column[row].as_py()
        except ValueError as error:
            if not isinstance(error, UnicodeDecodeError):  # a field twice in one object
                return BadRow(name, f"cannot be read as an object: {error}")
            return BadRow(
                name,
                f"is not UTF-8: byte {error.start} of the text is 0x{error.object[error.start]:02x}",
            )
    return values


def iter_table_rows(source: Any) -> Iterable[Any]:
    """Return the rows of a list, a DataFrame or a `datasets.Dataset`. Raises: DataError for anything else."""
    is_frame = hasattr(source, "to_dict") and hasattr(source, "columns")
    if is_frame:
        names = [str(name) for name in source.columns]
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise DataError(f"data: the DataFrame has the column '{twice[0]}' twice; rename one")
        return map(_convert_frame_row, source.to_dict("records"))
    if isinstance(source, Mapping):
        if all(hasattr(part, "column_names") for part in source.values()) and source:
            raise DataError(
                f"data: holds the splits {', '.join(map(str, source))}; pass one, as data['{next(iter(source))}']"
            )
    elif hasattr(source, "column_names") and hasattr(source, "__iter__"):
        return iter(source)
    elif isinstance(source, Sequence):
        return source
    hint = "; pass list(...) of it" if isinstance(source, Iterable) else ""
    if isinstance(source, Mapping):
        hint = "; pass columns as a DataFrame"
    raise DataError(
        "data: expected a JSONL or Parquet file, a list of rows, a pandas DataFrame or a datasets.Dataset, found "
        f"{type(source).__name__}{hint}"
    )


def _convert_frame_row(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Convert the values of NumPy to Python's; a missing value (NaN, NaT, pandas.NA) is left out."""
    values = {str(name): _convert_frame_value(value) for name, value in row.items()}
    return {name: value for name, value in values.items() if not _is_missing(value)}


def _convert_frame_value(value: Any) -> Any:
    if hasattr(value, "tolist") and hasattr(value, "dtype"):  # an array or a scalar of NumPy
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_convert_frame_value(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _convert_frame_value(item) for name, item in value.items()}
    return value


def _is_missing(value: Any) -> bool:
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float) and math.isnan(value)
