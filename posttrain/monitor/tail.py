"""Incremental reader of growing JSON-lines files: no locks, each byte read once, incomplete last lines deferred."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from rl_core.storage.atomic_files import open_regular_file
from rl_core.storage.line_logs import has_checksum, parse_checked_line, read_line_again

MAX_READ_BYTES = (
    16 << 20
)  # of one file per refresh: a large journal is read over several, so that the page stays responsive
MAX_LINE_BYTES = 64 << 20  # longer lines are skipped


class JsonLinesTail:
    """New complete lines of one file since the last read.

    A file that shrank or was replaced is read from the start again (counted in `restarts`); a missing file yields
    nothing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0  # end of the last returned line
        self.size = 0  # of the file at the last read
        self.num_restarts = 0
        self.num_bad = 0  # complete lines that were no JSON object
        self.modified = 0.0  # seconds since the epoch; 0 = never seen
        self._inode = 0
        self._has_checksums = False

    @property
    def fraction(self) -> float:
        """Share of the file that has been read."""
        return min(1.0, self.offset / self.size) if self.size else 1.0

    def read_rows(self, limit: int = MAX_READ_BYTES) -> list[dict[str, Any]]:
        """Objects of the lines completed since the last call, at most about `limit` bytes."""
        try:
            known = os.stat(self.path)
            if self._inode and (known.st_ino, known.st_size) == (self._inode, self.offset):
                self.size, self.modified = known.st_size, known.st_mtime
                return []  # as nearly all files of a folder of many runs, at a tenth of the cost of opening them
            with open(self.path, "rb", opener=open_regular_file) as file:
                found = os.fstat(file.fileno())
                if found.st_size < self.offset or (self._inode and found.st_ino != self._inode):
                    self.offset, self.num_restarts, self._has_checksums = (
                        0,
                        self.num_restarts + 1,
                        False,
                    )
                self._inode, self.size, self.modified = found.st_ino, found.st_size, found.st_mtime
                if found.st_size == self.offset:
                    return []
                block = os.pread(file.fileno(), limit, self.offset)
                end = block.rfind(b"\n") + 1
                if end or len(block) < limit:
                    return self._parse_lines(file, block[:end])
        except OSError:
            return []
        return (
            self._skip_block(block) if limit >= MAX_LINE_BYTES else self.read_rows(4 * limit)
        )  # one line longer than the limit

    def _skip_block(self, block: bytes) -> list[dict[str, Any]]:
        self.offset += len(block)
        self.num_bad += 1
        return []

    def _parse_lines(self, file: BinaryIO, block: bytes) -> list[dict[str, Any]]:
        rows = []
        for line in block.splitlines(keepends=True):
            row, problem = parse_checked_line(line, self._has_checksums, _load_json)
            if problem:
                line = read_line_again(file, line, self.offset)
                row, _ = parse_checked_line(line, self._has_checksums)
            self._has_checksums = self._has_checksums or has_checksum(line)
            self.offset += len(line)
            if row is not None:
                rows.append(row)
            else:
                self.num_bad += 1
        return rows


def _load_json(line: bytes) -> Any:
    """As json.loads, four times as fast; what the faster parser refuses (NaN, lone surrogates) json reads."""
    try:
        return orjson.loads(line)
    except ValueError:
        return json.loads(line)


def read_last_rows(path: Path, max_bytes: int = 1 << 20) -> list[dict[str, Any]]:
    """Complete JSON objects in the last `limit` bytes of a file, oldest first; [] if it cannot be read."""
    try:
        with open(path, "rb", opener=open_regular_file) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - max_bytes))
            block = file.read(max_bytes)
    except OSError:
        return []
    if size > max_bytes:
        block = block[block.find(b"\n") + 1 :]  # the first line is cut
    rows = [parse_checked_line(line)[0] for line in block[: block.rfind(b"\n") + 1].splitlines()]
    return [row for row in rows if row is not None]


def read_json_object(path: Path) -> dict[str, Any]:
    """JSON object from a file; {} if absent or incomplete."""
    try:
        with open(path, "rb", opener=open_regular_file) as file:
            value = json.loads(file.read())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
