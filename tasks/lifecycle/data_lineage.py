"""Data lineage of models: digests and row counts of their data files, and the rows added since.

Each version of a registered model records the files given to its run as tags:

    data.sources           demonstrations, environment
    data.demonstrations    {"path": ..., "files": {"mine.jsonl": {"sha256": ..., "size": ..., "rows": ...}}}

A file that starts with exactly the bytes of the recorded file was appended to; the rows after them are new.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rl_core.data.files import PARQUET_SUFFIXES, list_data_files
from rl_core.errors import DataError
from rl_core.settings.common import iter_mixed_environments
from rl_core.storage.manifest import digest_file
from tasks.config import PipelineSettings

# Stores truncate or refuse longer tags, so a longer record continues in the next tag.
_TAG_CHARACTERS = 4000
_BLANK_BYTES = b" \t\r\n"
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileRecord:
    """State of one file: SHA-256 and number of its bytes, and its rows (Parquet rows, else non-blank lines)."""

    sha256: str
    size: int
    rows: int


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """Data files of one setting: the named file, or all data files of the folder by relative name."""

    path: str
    files: dict[str, FileRecord]


SourceRecords = dict[str, SourceRecord]  # by source: demonstrations, preferences, environment


@dataclass(frozen=True, slots=True)
class DataChange:
    """File whose current content the model has not seen."""

    source: str
    file: str
    kind: Literal["appended", "rewritten", "new file"]
    rows: int  # number of new rows; all rows if they cannot be told apart

    def __str__(self) -> str:
        location = f"{self.source}: {self.file}"
        if self.kind == "appended":
            return f"{location}: {self.rows} rows appended"
        return f"{location}: {self.kind} of {self.rows} rows"


@dataclass(frozen=True, slots=True)
class NewData:
    """Data added since a record."""

    changes: tuple[DataChange, ...] = ()
    missing_files: tuple[str, ...] = field(default=())  # files that no longer exist

    @property
    def rows(self) -> int:
        """Total number of new rows."""
        return sum(change.rows for change in self.changes)

    @property
    def sources(self) -> frozenset[str]:
        """Sources with new data."""
        return frozenset(change.source for change in self.changes)

    def __str__(self) -> str:
        parts = [str(change) for change in self.changes]
        parts += [f"{name}: no longer exists" for name in self.missing_files]
        return "; ".join(parts) or "nothing new"


def list_data_sources(settings: PipelineSettings) -> dict[str, Path]:
    """List the files or folders from which a pipeline learns, by name; {} if all episodes are generated."""
    data = settings.stages.prepare_data
    paths = {
        "demonstrations": data.demonstrations if data is not None else None,
        "preferences": data.preferences if data is not None else None,
    }
    for index, environment in iter_mixed_environments(settings.environment):
        name = "environment" if index < 0 else f"environments.{index}"
        paths[name] = environment.options.get("path")
    return {name: Path(path) for name, path in paths.items() if isinstance(path, str)}


def inspect_data_sources(settings: PipelineSettings) -> SourceRecords:
    """Return digest, size and rows of every data file of a pipeline. Raises: DataError if one cannot be read."""
    return {name: _inspect_source(path) for name, path in list_data_sources(settings).items()}


def _inspect_source(path: Path) -> SourceRecord:
    try:
        if path.is_dir():
            files = {
                item.relative_to(path).as_posix(): _inspect_file(item)
                for item in list_data_files(path)
            }
            return SourceRecord(str(path), files)
        return SourceRecord(str(path), {path.name: _inspect_file(path)})
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _inspect_file(path: Path) -> FileRecord:
    """Return digest, size and number of rows of a file.

    Text is read in one pass, so that all three refer to the same bytes while the file is appended to.
    """
    if path.suffix in PARQUET_SUFFIXES:
        import pyarrow.parquet

        rows = int(pyarrow.parquet.ParquetFile(path).metadata.num_rows)
        return FileRecord(digest_file(path), path.stat().st_size, rows)
    digest, size, rows = hashlib.sha256(), 0, 0
    with path.open("rb") as file:
        for line in file:
            digest.update(line)
            size += len(line)
            rows += bool(line.strip(_BLANK_BYTES))
    return FileRecord(digest.hexdigest(), size, rows)


def find_new_data(before: SourceRecords | None, now: SourceRecords) -> NewData:
    """Find the data of `now` that `before` does not have. `before` None (unknown): everything is new.

    Files are identified by content, not by name. Files of `now` that may have grown are read.
    """
    changes: list[DataChange] = []
    missing: list[str] = []
    for source, record in now.items():
        old_record = (before or {}).get(source)
        old_files = old_record.files if old_record is not None else {}
        old_digests = {file.sha256 for file in old_files.values()}
        # A single file may have been renamed.
        is_single_file = len(old_files) == len(record.files) == 1
        for name, file in record.files.items():
            if file.sha256 in old_digests:
                continue
            old_file = old_files.get(name)
            if old_file is None and is_single_file:
                old_file = next(iter(old_files.values()))
            change = _classify_change(source, name, file, old_file, _locate_file(record, name))
            if change.rows:
                changes.append(change)
        present = {file.sha256 for file in record.files.values()} | set(record.files)
        if not is_single_file:
            missing += [
                f"{source}: {name}"
                for name, file in old_files.items()
                if name not in present and file.sha256 not in present
            ]
    return NewData(tuple(changes), tuple(missing))


def _locate_file(record: SourceRecord, name: str) -> Path:
    path = Path(record.path)
    return path / name if path.is_dir() else path


def _classify_change(
    source: str, name: str, file: FileRecord, old: FileRecord | None, path: Path
) -> DataChange:
    if old is None:
        return DataChange(source, name, "new file", file.rows)
    has_grown = file.size > old.size and file.rows >= old.rows
    if has_grown and _digest_prefix(path, old.size) == old.sha256:
        # The difference is 0 if only blank lines were added.
        return DataChange(source, name, "appended", file.rows - old.rows)
    return DataChange(source, name, "rewritten", file.rows)


def _digest_prefix(path: Path, size: int) -> str:
    """Return the SHA-256 of a file's first `size` bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while size > 0 and (block := file.read(min(size, _BLOCK_BYTES))):
            digest.update(block)
            size -= len(block)
    return digest.hexdigest()


def format_record_tags(records: SourceRecords) -> dict[str, str]:
    """Format the record as tags of a model version."""
    tags = {"data.sources": ", ".join(records) or "none"}
    for name, record in records.items():
        text = json.dumps(dataclasses.asdict(record), sort_keys=True)
        for part, start in enumerate(range(0, len(text), _TAG_CHARACTERS), 1):
            key = f"data.{name}" if part == 1 else f"data.{name}.{part}"
            tags[key] = text[start : start + _TAG_CHARACTERS]
    return tags


def parse_record_tags(tags: Mapping[str, str]) -> SourceRecords | None:
    """Parse the record from a version's tags; None if there is none, or it is invalid."""
    if "data.sources" not in tags:
        return None
    records: SourceRecords = {}
    for name in tags["data.sources"].split(", "):
        if name == "none":
            continue
        parts = [tags.get(f"data.{name}", "")]
        while f"data.{name}.{len(parts) + 1}" in tags:
            parts.append(tags[f"data.{name}.{len(parts) + 1}"])
        try:
            row = json.loads("".join(parts))
            files = {file: FileRecord(**entry) for file, entry in row["files"].items()}
            records[name] = SourceRecord(row["path"], files)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
    return records
