"""Log of experiences and labels on disk: append-only segments with a checksum in every line.

    <folder>/.lock                    flock of the single writer (the server)
    <folder>/segment-000000000001.jsonl   named after the number of its first record

    {"number": 17, "kind": "experience", "experience": {...}, "crc": "..."}

A record is acknowledged when `append` returns; its bytes are then on the disk. A killed writer may leave a torn last
line, which was never acknowledged; the next writer truncates it. Readers (the worker) follow without a lock.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from rl_core.errors import DataError
from rl_core.online.experience import Experience
from rl_core.online.labels import Label
from rl_core.storage.append_log import (
    AppendLog,
    encode_checked_line,
    read_checked_lines,
    report_damaged_line,
)
from rl_core.storage.atomic_files import make_folder
from rl_core.storage.faults import inject_fault
from rl_core.storage.folders import clear_leftovers
from rl_core.storage.locks import FolderLock

_SEGMENT = re.compile(r"segment-(\d{12})\.jsonl")
RECORD_KINDS = ("experience", "label", "control")


class ExperienceLogRecord(NamedTuple):
    """Record of the log."""

    number: int  # consecutive, from 1
    kind: str  # experience, label or control
    value: dict[str, Any]  # an experience, {"request_id", "label"}, or an order, as plain values
    size: int = 0  # bytes in the log

    def parse_experience(self) -> Experience:
        """Return the experience. Raises: DataError."""
        return Experience.from_json(self.value)

    def parse_label(self) -> tuple[str, Label]:
        """Return (request id, label). Raises: DataError."""
        try:
            return str(self.value["request_id"]), Label.from_json(self.value["label"])
        except (KeyError, TypeError) as error:
            raise DataError(f"label: {error}") from error


def list_segments(folder: Path) -> list[tuple[int, Path]]:
    """Return (number of the first record, path) of every segment, oldest first."""
    if not folder.is_dir():
        return []
    segments = []
    for path in folder.iterdir():
        match = _SEGMENT.fullmatch(path.name)
        if match:
            segments.append((int(match[1]), path))
    return sorted(segments)


def find_oldest_number(folder: Path) -> int | None:
    """Return the first record number of the oldest segment, or None without a segment."""
    segments = list_segments(folder)
    return segments[0][0] if segments else None


class ExperienceLog:
    """Writer of the log; a context manager that holds the folder's lock and repairs what a killed writer left."""

    def __init__(
        self, folder: Path | str, *, segment_bytes: int = 1 << 24, max_bytes: int = 1 << 30
    ) -> None:
        """Configure the writer.

        Args:
            segment_bytes: size at which a segment is closed.
            max_bytes: of all segments; above it, records are refused.
        """
        self.folder = Path(folder)
        self.segment_bytes, self.max_bytes = segment_bytes, max_bytes
        self.num_refused_records = 0  # because the log was full
        self.next_number = 1
        self._path: Path | None = None
        self._sizes: dict[Path, int] = {}
        self._lock = FolderLock(self.folder)

    def __enter__(self) -> ExperienceLog:
        make_folder(self.folder)
        self._lock.__enter__()
        try:
            clear_leftovers(self.folder, locked=True)
            self._recover()
        except BaseException:
            self._lock.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lock.__exit__(kind, error, traceback)

    def append(self, records: Sequence[tuple[str, Mapping[str, Any]]]) -> list[int] | None:
        """Append records with a single sync.

        Args:
            records: (kind, plain values) of each.
        Returns: their numbers once they are durable; None if the log is full, in which case nothing is written and
            `num_refused_records` counts them.
        Raises: DataError for an invalid kind or value; CheckpointError for a disk error (nothing is written).
        """
        assert self._lock.is_held, "append within the `with` block"
        for kind, _ in records:
            if kind not in RECORD_KINDS:
                raise DataError(f"kind: '{kind}' must be one of {', '.join(RECORD_KINDS)}")
        numbers = list(range(self.next_number, self.next_number + len(records)))
        try:
            data = b"".join(
                encode_checked_line({"number": number, "kind": kind, kind: value})
                for number, (kind, value) in zip(numbers, records, strict=True)
            )
        except ValueError as error:
            raise DataError(f"a record holds a value that is not valid JSON: {error}") from error
        self._drop_removed_segments()
        if sum(self._sizes.values()) + len(data) > self.max_bytes:
            self.num_refused_records += len(records)
            return None
        if not numbers:
            return []
        path = self._choose_segment()
        AppendLog(path, synced=True).append_lines(data)
        self._path, self._sizes[path] = path, self._sizes.get(path, 0) + len(data)
        self.next_number = numbers[-1] + 1
        inject_fault("online.appended")
        return numbers

    def append_experience(self, experience: Experience) -> int | None:
        """Append one experience; return its number, or None if the log is full."""
        numbers = self.append([("experience", experience.to_json())])
        return None if numbers is None else numbers[0]

    def append_label(self, request_id: str, label: Label) -> int | None:
        """Append a label for an earlier request; return its number, or None if the log is full."""
        label.check_content()
        numbers = self.append([("label", {"request_id": request_id, "label": label.to_json()})])
        return None if numbers is None else numbers[0]

    def _choose_segment(self) -> Path:
        if self._path is not None and self._sizes.get(self._path, 0) < self.segment_bytes:
            return self._path
        return self.folder / f"segment-{self.next_number:012d}.jsonl"

    def _drop_removed_segments(self) -> None:
        """Stop counting segments that the worker has removed."""
        for path in list(self._sizes):
            if path != self._path and not path.exists():
                del self._sizes[path]

    def _recover(self) -> None:
        """Find the end of the log and truncate a line that a killed writer left unfinished."""
        segments = list_segments(self.folder)
        self._sizes = {path: path.stat().st_size for _, path in segments}
        self._path, self.next_number = None, 1
        for first, path in reversed(segments):
            end, last = 0, first - 1
            for line in AppendLog(path).recover_lines():
                end = line.end
                if line.record is not None:
                    last = max(last, int(line.record["number"]))
                else:
                    last += 1  # its number is not reused
            if end < self._sizes[path]:
                self._sizes[path] = end
                inject_fault("online.cut")
            self.next_number = max(self.next_number, last + 1)
            if self._path is None:
                self._path = path
            if last >= first:
                break


class ExperienceLogReader:
    """Reader that follows the log from a record on; skips damaged lines and counts each once."""

    def __init__(self, folder: Path | str, after: int = 0) -> None:
        """Start reading.

        Args:
            after: number of the last record that is already known.
        """
        self.folder = Path(folder)
        self.last_number = after
        self.num_damaged = 0
        self._path: Path | None = None
        self._offset = 0

    def read_records(self) -> Iterator[ExperienceLogRecord]:
        """Yield the records that are available now, in order."""
        if (self._path is None or not self._path.exists()) and not self._find_next_segment():
            return
        while True:
            assert self._path is not None
            # Looked up before reading, because a segment with a successor no longer grows.
            successor = self._find_successor()
            yield from self._read_segment()
            if successor is None:
                return
            self._path, self._offset = successor, 0

    def _read_segment(self) -> Iterator[ExperienceLogRecord]:
        assert self._path is not None
        for line in read_checked_lines(self._path, self._offset):
            self._offset = line.end
            record = line.record or {}
            kind, number = record.get("kind"), record.get("number")
            if kind not in RECORD_KINDS or not isinstance(number, int):
                self.num_damaged += 1
                report_damaged_line(self._path, line)
                continue
            if number > self.last_number:
                self.last_number = number
                yield ExperienceLogRecord(number, kind, record[kind], line.end - line.start)

    def _find_next_segment(self) -> bool:
        """Open the segment that holds the next record; return False without a segment."""
        segments = list_segments(self.folder)
        if not segments:
            return False
        earlier = [path for first, path in segments if first <= self.last_number + 1]
        self._path = earlier[-1] if earlier else segments[0][1]
        self._offset = 0
        return True

    def _find_successor(self) -> Path | None:
        assert self._path is not None
        later = [path for _, path in list_segments(self.folder) if path.name > self._path.name]
        return later[0] if later else None
