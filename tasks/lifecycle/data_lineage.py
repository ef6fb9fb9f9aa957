"""Data lineage of models: digests and row counts of their data files, and the rows that came since.

Each version of a registered model carries the record of the files that its run was given, as tags:

    data.sources           demonstrations, environment
    data.demonstrations    {"path": ..., "files": {"mine.jsonl": {"sha256": ..., "size": ..., "rows": ...}}}

A file that begins with the very bytes of the recorded one was appended to, and the rows behind them are the new ones.
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
from rl_core.storage.manifest import digest_file
from tasks.config import PipelineSettings

# of one tag; stores cut or refuse longer ones, so a longer record goes on in the next
_TAG_CHARACTERS = 4000
_BLANK_BYTES = b" \t\r\n"
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file as it was: SHA-256 and number of its bytes, and its rows (lines that are not blank)."""

    sha256: str
    size: int
    rows: int


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """Data files of one setting: the file it names, or all data files of the folder, by their names in it."""

    path: str
    files: dict[str, FileRecord]


# by the source's name: demonstrations, preferences, environment
SourceRecords = dict[str, SourceRecord]


@dataclass(frozen=True, slots=True)
class DataChange:
    """One file that the model has not seen as it is now."""

    source: str
    file: str
    kind: Literal["appended", "rewritten", "new file"]
    rows: int  # that are new; all of them where it cannot be told which

    def __str__(self) -> str:
        where = f"{self.source}: {self.file}"
        if self.kind == "appended":
            return f"{where}: {self.rows} rows appended"
        return f"{where}: {self.kind} of {self.rows} rows"


@dataclass(frozen=True, slots=True)
class NewData:
    """Data that came since a record."""

    changes: tuple[DataChange, ...] = ()
    # files that are no longer there: nothing to learn from
    missing_files: tuple[str, ...] = field(default=())

    @property
    def rows(self) -> int:
        """New rows in all."""
        return sum(change.rows for change in self.changes)

    @property
    def sources(self) -> frozenset[str]:
        """Sources with something new."""
        return frozenset(change.source for change in self.changes)

    def __str__(self) -> str:
        return (
            "; ".join([*map(str, self.changes), *(f"{name}: gone" for name in self.missing_files)])
            or "nothing new"
        )


def list_data_sources(settings: PipelineSettings) -> dict[str, Path]:
    """The files (or folders of files) that a pipeline learns from, by name; {} where episodes are generated alone."""
    data = settings.stages.prepare_data
    named = {
        "demonstrations": data.demonstrations if data is not None else None,
        "preferences": data.preferences if data is not None else None,
        "environment": settings.environment.options.get("path"),
    }
    return {name: Path(path) for name, path in named.items() if isinstance(path, str)}


def record_sources(settings: PipelineSettings) -> SourceRecords:
    """The record of a pipeline's data as it is now. Raises: DataError where a file cannot be read."""
    return {name: _record_source(path) for name, path in list_data_sources(settings).items()}


def _record_source(path: Path) -> SourceRecord:
    try:
        if path.is_dir():
            files = {
                item.relative_to(path).as_posix(): _record_file(item)
                for item in list_data_files(path)
            }
            return SourceRecord(str(path), files)
        return SourceRecord(str(path), {path.name: _record_file(path)})
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _record_file(path: Path) -> FileRecord:
    """Lines are read once, so that digest and number of rows belong to the same bytes while someone appends."""
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
    """Data of `now` that `before` does not have. `before` None (unknown): everything is new.

    A file is known by its content, whatever its name. The files of `now` are read where they may have grown.
    """
    changes: list[DataChange] = []
    gone: list[str] = []
    for source, record in now.items():
        old = (before or {}).get(source)
        known = old.files if old is not None else {}
        digests = {file.sha256 for file in known.values()}
        alone = len(known) == len(record.files) == 1  # then the file may have another name now
        for name, file in record.files.items():
            if file.sha256 not in digests:
                former = known.get(name) or (next(iter(known.values())) if alone else None)
                change = _classify_change(source, name, file, former, _locate_file(record, name))
                changes += [change] if change.rows else []
        present = {file.sha256 for file in record.files.values()} | set(record.files)
        if not alone:
            gone += [
                f"{source}: {name}"
                for name, file in known.items()
                if name not in present and file.sha256 not in present
            ]
    return NewData(tuple(changes), tuple(gone))


def _locate_file(record: SourceRecord, name: str) -> Path:
    path = Path(record.path)
    return path / name if path.is_dir() else path


def _classify_change(
    source: str, name: str, file: FileRecord, old: FileRecord | None, path: Path
) -> DataChange:
    if old is None:
        return DataChange(source, name, "new file", file.rows)
    if (
        file.size > old.size
        and file.rows >= old.rows
        and _digest_prefix(path, old.size) == old.sha256
    ):
        # 0 where blank lines came
        return DataChange(source, name, "appended", file.rows - old.rows)
    return DataChange(source, name, "rewritten", file.rows)


def _digest_prefix(path: Path, size: int) -> str:
    """SHA-256 of a file's first `size` bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while size > 0 and (block := file.read(min(size, _BLOCK_BYTES))):
            digest.update(block)
            size -= len(block)
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------------------- tags


def format_record_tags(records: SourceRecords) -> dict[str, str]:
    """The record as tags of a model version."""
    tags = {"data.sources": ", ".join(records) or "none"}
    for name, record in records.items():
        text = json.dumps(dataclasses.asdict(record), sort_keys=True)
        for part, start in enumerate(range(0, len(text), _TAG_CHARACTERS)):
            tags[f"data.{name}" + (f".{part + 1}" if part else "")] = text[
                start : start + _TAG_CHARACTERS
            ]
    return tags


def parse_record_tags(tags: Mapping[str, str]) -> SourceRecords | None:
    """The record that a version's tags hold; None where they hold none, or one that cannot be read."""
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
            found = json.loads("".join(parts))
            files = {file: FileRecord(**entry) for file, entry in found["files"].items()}
            records[name] = SourceRecord(found["path"], files)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
    return records
