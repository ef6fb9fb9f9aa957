"""Incremental reader of growing JSON-lines files: no locks, each byte read once, incomplete last lines deferred."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from rl_core.storage.append_log import has_checksum, parse_checked_line, read_line_again
from rl_core.storage.atomic_files import open_regular_file

# Of one file per refresh: a large journal takes several, so that the page stays responsive.
MAX_READ_BYTES = 16 << 20
MAX_LINE_BYTES = 64 << 20  # longer lines are skipped


class JsonLinesTail:
    """Reader of the lines that were completed since the last read.

    A file that shrank or was replaced is read from the start again (counted in `num_restarts`); a missing file has no
    lines.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0  # end of the last returned line
        self.size = 0  # of the file at the last read
        self.num_restarts = 0
        self.num_bad = 0  # complete lines that were not JSON objects
        self.modified = 0.0  # seconds since the epoch; 0 = never seen
        self._inode = 0
        self._has_checksums = False

    @property
    def fraction(self) -> float:
        """Share of the file that has been read."""
        return min(1.0, self.offset / self.size) if self.size else 1.0

    def read_rows(self, limit: int = MAX_READ_BYTES) -> list[dict[str, Any]]:
        """Read the objects of the lines completed since the last call, at most about `limit` bytes."""
        try:
            status = os.stat(self.path)
            if self._inode and (status.st_ino, status.st_size) == (self._inode, self.offset):
                # True of nearly all files of a folder of many runs, at a tenth of the cost of opening them.
                self.size, self.modified = status.st_size, status.st_mtime
                return []
            with open(self.path, "rb", opener=open_regular_file) as file:
                status = os.fstat(file.fileno())
                is_replaced = self._inode and status.st_ino != self._inode
                if status.st_size < self.offset or is_replaced:
                    self.offset, self._has_checksums = 0, False
                    self.num_restarts += 1
                self._inode, self.size = status.st_ino, status.st_size
                self.modified = status.st_mtime
                if status.st_size == self.offset:
                    return []
                block = os.pread(file.fileno(), limit, self.offset)
                end = block.rfind(b"\n") + 1
                if end or len(block) < limit:
                    return self._parse_lines(file, block[:end])
        except OSError:
            return []
        # One line is longer than the limit.
        return self._skip_block(block) if limit >= MAX_LINE_BYTES else self.read_rows(4 * limit)

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
    """Parse a line four times as fast as json.loads, which parses what orjson refuses (NaN, lone surrogates)."""
    try:
        return orjson.loads(line)
    except ValueError:
        return json.loads(line)


def read_last_rows(path: Path, max_bytes: int = 1 << 20) -> list[dict[str, Any]]:
    """Read the complete JSON objects in the last `max_bytes` of a file, oldest first; [] if it cannot be read."""
    try:
        with open(path, "rb", opener=open_regular_file) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - max_bytes))
            block = file.read(max_bytes)
    except OSError:
        return []
    if size > max_bytes:
        block = block[block.find(b"\n") + 1 :]  # the first line is cut off
    lines = block[: block.rfind(b"\n") + 1].splitlines()
    rows = [parse_checked_line(line)[0] for line in lines]
    return [row for row in rows if row is not None]


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; {} if it is missing or incomplete."""
    try:
        with open(path, "rb", opener=open_regular_file) as file:
            value = json.loads(file.read())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
