"""Rows with prompts from files: JSON Lines, a JSON array, Parquet, CSV, a folder of them, or a hub data set."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rl_core.data.files import CSV_SUFFIXES, DATA_SUFFIXES, BadRow, data_files, file_digest, read_rows
from rl_core.data.records import Row, read_prompts
from rl_core.errors import DataError, SettingsError, nearest

__all__ = ["TABLE_SUFFIXES", "PromptRows", "read_prompt_rows", "table_files"]

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


def read_prompt_rows(
    path: str | Path,
    *,
    prompt: str = "prompt",
    files: str | None = None,
    revision: str | None = None,
    on_bad_row: str = "stop",
    max_rows: int | None = None,
) -> PromptRows:
    """Rows of all data files at a path, each with a `prompt`; every other column is kept.

    Args:
        path: a file, a folder of files with the same columns, or with `revision` a hub data set 'owner/name'.
        prompt: column of the prompt, text or a list of messages.
        files: pattern of the files of a folder or data set that are read, as 'data/train-*.parquet'.
        revision: commit of the hub data set, 40 hex digits, so that the same settings are the same rows.
    Raises: DataError, RecordsError, SettingsError naming options.path, options.revision or options.prompt.
    """
    place = Path(path).expanduser()
    if revision is not None:
        place = _downloaded(str(path), revision, files)
    elif not place.exists():
        hint = ""
        if _HUB_NAME.fullmatch(str(path)):
            hint = "; a data set of the hub needs options.revision, the 40 hex digits of a commit"
        raise SettingsError(f"options.path: no such file or folder: {place}{hint}")
    found, digests = PromptRows(), []
    for file in table_files(place, files):
        left = None if max_rows is None else max_rows - found.num_rows
        if left == 0:
            break
        records = read_prompts(_with_prompt(file, prompt), on_bad_row=on_bad_row, max_rows=left)
        found.rows += records.rows
        found.num_rows += records.num_rows
        found.num_skipped += records.num_skipped
        found.files.append(str(file))
        digests.append(file_digest(file))
    found.digest = digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()
    return found


def table_files(place: Path, pattern: str | None = None) -> list[Path]:
    """The file itself, or the data files of a folder, sorted by name, without hidden ones. Raises: SettingsError."""
    if not place.is_dir():
        return [place]
    shown = data_files(place, TABLE_SUFFIXES)
    inside = {path: path.relative_to(place) for path in shown}
    wanted = [path for path in shown if pattern is None or fnmatch.fnmatch(str(inside[path]), pattern)]
    if not wanted:
        names = ", ".join(sorted(str(inside[path]) for path in shown)[:10])
        text = (
            f"options.files: '{pattern}' is none of {names}" if shown else f"options.path: {place} holds no data file"
        )
        raise SettingsError(f"{text} ({', '.join(TABLE_SUFFIXES)})")
    kinds = sorted({_kind(inside[path]) for path in wanted})
    if pattern is None and len(kinds) > 1:
        raise SettingsError(
            f"options.files: {place} holds files of several kinds ({', '.join(kinds[:10])}); name those to read, as "
            f"'{kinds[0]}*'"
        )
    return wanted


def _kind(name: Path) -> str:
    """Name of a file without its shard: train-00000-of-00002.parquet -> train."""
    return str(name.with_name(re.split(r"[-_.]?\d|\.", name.name)[0]))


def _with_prompt(file: Path, prompt: str) -> Path | list[Row]:
    """The file, or its rows where they have to be changed before they are checked."""
    if file.suffix == ".json":
        rows = list(_array_rows(file))
    elif prompt == "prompt" and file.suffix.lower() not in CSV_SUFFIXES:
        _check_column(file, _first_row(file), prompt)
        return file
    else:
        rows = []
        for line, row in read_rows(file, None, plain_cells=True):
            if isinstance(row, BadRow):
                raise DataError(f"{file}:{line}: {row}")
            rows.append(row)
    _check_column(file, rows[0] if rows else None, prompt)
    return [{**row, "prompt": row.get(prompt)} for row in rows] if prompt != "prompt" else rows


def _first_row(file: Path) -> Row | None:
    row = next((row for _, row in read_rows(file, None)), None)
    return None if isinstance(row, BadRow) else row


def _check_column(file: Path, row: Row | None, prompt: str) -> None:
    if row is None or prompt in row:
        return
    columns = list(row)
    likely = next((name for name in ("question", "problem", "instruction", "query", "messages") if name in row), None)
    hint = f"set options.prompt: {likely}" if likely else nearest(prompt, columns)
    raise SettingsError(
        f"options.prompt: {file} has no column '{prompt}'; its first row has {', '.join(columns) or 'none'}; {hint}"
    )


def _array_rows(file: Path) -> Sequence[Row]:
    """Rows of one JSON array. Raises: DataError."""
    try:
        rows = json.loads(file.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: is not UTF-8 (byte {error.start}); save it as UTF-8") from error
    except (ValueError, RecursionError, OSError) as error:
        raise DataError(f"{file}: is not one JSON array ({error}); a file of one object a line is .jsonl") from error
    if not isinstance(rows, list):
        raise DataError(f"{file}: holds one {type(rows).__name__}, expected an array of objects")
    return rows


def _downloaded(name: str, revision: str, files: str | None) -> Path:
    """Folder of a hub data set at a commit, from the local cache where it is. Raises: SettingsError, DataError."""
    if not _REVISION.fullmatch(revision):
        raise SettingsError(
            f"options.revision: '{revision}' is no commit (40 hex digits); a branch may change between two runs"
        )
    if not _HUB_NAME.fullmatch(name):
        raise SettingsError(f"options.path: '{name}' is no data set of the hub (owner/name), which revision asks for")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = [files] if files else [f"**{suffix}" for suffix in TABLE_SUFFIXES]
    try:
        return Path(snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
        raise DataError(
            f"options.path: the data set {name} at {revision[:8]} could not be fetched and is not in the local cache "
            f"({type(error).__name__}: {reason}); without a network, download it elsewhere and name the folder"
        ) from error
