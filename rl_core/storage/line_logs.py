"""Append-only logs of JSON lines with one checksum per line, so that a damaged line is detected and only it is skipped.

    {"step":3,"metrics":{"train/loss":0.5},"crc":"4f1d0c9a"}

`crc` is the CRC-32 (ISO 3309, zlib) of the bytes before `,"crc"`: it detects every burst of up to 32 bits, and all
but one in 2^32 of other changes. It is the last key, and any JSON reader can read the line. Files of older versions
have lines without a checksum, which newer lines may follow; after the first line with one, a line without one is
damaged.

Rotated logs are named NAME, NAME.1 (the previous one), ... NAME.<keep>. Lines are not synced individually: a machine
crash may lose the last ones. A killed process loses no line that was appended, and only the last line can be torn.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from rl_core.storage.atomic_files import (
    append_bytes,
    make_folder,
    open_owned_file,
    replace_file,
    write_error,
)
from rl_core.storage.faults import inject_fault

log = logging.getLogger(__name__)

_CHECKSUM_KEY = b',"crc":"'
_CHECKSUM_LENGTH = len(_CHECKSUM_KEY) + 8 + 2  # ,"crc":"01234567"}


class CheckedLine(NamedTuple):
    """Complete line of a file."""

    record: dict[str, Any] | None  # without its checksum; None = damaged or unreadable
    start: int  # byte offset
    end: int  # byte offset after the line feed
    problem: str  # "" = intact

    @property
    def is_intact(self) -> bool:
        """True if the line holds what was written."""
        return self.record is not None


def encode_checked_line(record: Mapping[str, Any], *, allow_nan: bool = False) -> bytes:
    """Return a record, which must have at least one key, as a JSON line with checksum and line feed."""
    assert record, "a record must have at least one key"
    text = json.dumps(record, ensure_ascii=True, separators=(",", ":"), allow_nan=allow_nan)
    body = text.encode()[:-1]
    return body + _CHECKSUM_KEY + b"%08x" % zlib.crc32(body) + b'"}\n'


def has_valid_checksum(line: bytes) -> bool:
    """Return False if the line has a checksum that does not match its bytes; True without a checksum."""
    checksum = _extract_checksum(line)
    if checksum is None:
        return True
    body = line.rstrip(b"\n")[:-_CHECKSUM_LENGTH]
    return checksum == b"%08x" % zlib.crc32(body)


def has_checksum(line: bytes) -> bool:
    """Return whether the line ends with a checksum, right or wrong."""
    return _extract_checksum(line) is not None


def parse_checked_line(
    line: bytes, has_checksums: bool = False, loads: Callable[[bytes], Any] = json.loads
) -> tuple[dict[str, Any] | None, str]:
    """Return a complete line's record without its checksum, and "" or the problem: (None, problem) if unusable.

    Args:
        has_checksums: an earlier line of the file has a checksum, so this line must have one.
        loads: JSON parser.
    """
    if has_checksums and not has_checksum(line):
        return None, "damaged (it has no checksum, but earlier lines have one)"
    if not has_valid_checksum(line):
        return None, "damaged (its checksum does not match its bytes)"
    try:
        record = loads(line)
    except (ValueError, RecursionError) as error:
        return None, f"unreadable ({error})"
    if not isinstance(record, dict):
        return None, "unreadable (not an object)"
    if has_checksum(line):
        del record["crc"]
    return record, ""


def read_checked_lines(
    path: Path, offset: int = 0, end: int | None = None
) -> Iterator[CheckedLine]:
    """Yield the complete lines from byte `offset` (the start of a line) to `end`, without a torn last line."""
    if not path.is_file():  # reading a pipe would block
        return
    with path.open("rb") as file:
        has_checksums = offset > 0 and has_checksum(file.readline())
        file.seek(offset)
        for line in file:
            start, offset = offset, offset + len(line)
            if not line.endswith(b"\n") or (end is not None and offset > end):
                return
            record, problem = parse_checked_line(line, has_checksums)
            if problem:
                line = read_line_again(file, line, start)
                record, problem = parse_checked_line(line, has_checksums)
            has_checksums = has_checksums or has_checksum(line)
            yield CheckedLine(record, start, offset, problem)


def read_line_again(file: BinaryIO, line: bytes, start: int) -> bytes:
    """Read the bytes of a line again, in case its writer truncated a torn line and continued meanwhile.

    Such a line starts with bytes of the torn line and ends with bytes of its replacement.
    """
    return os.pread(file.fileno(), len(line), start)


def copy_intact_lines(source: Path, target: Path) -> list[CheckedLine]:
    """Write the intact lines of `source` to `target`, which may be the same file; return the damaged lines.

    A file without damage is copied byte by byte, except for a torn last line.
    """
    damaged = [line for line in read_checked_lines(source) if not line.is_intact]
    for line in damaged:
        report_damaged_line(source, line)
    if source == target and not damaged:
        return []
    with (
        source.open("rb") as source_file,
        replace_file(target, binary=True, point="lines.copied") as target_file,
    ):
        damaged_starts = {line.start for line in damaged}
        offset = 0
        for text in source_file:
            if text.endswith(b"\n") and offset not in damaged_starts:
                target_file.write(text)
            offset += len(text)
    return damaged


def report_damaged_line(
    path: Path, line: CheckedLine, consequence: str = "its record is lost"
) -> None:
    """Log a warning about a line that is not intact, once per process."""
    _warn_once(str(path), line.start, line.end, line.problem, consequence)


@functools.lru_cache(maxsize=4096)
def _warn_once(path: str, start: int, end: int, problem: str, consequence: str) -> None:
    log.warning(
        "%s: the line of bytes %d to %d is %s; it is skipped and %s",
        path,
        start,
        end,
        problem,
        consequence,
    )


def _extract_checksum(line: bytes) -> bytes | None:
    """Return a line's checksum, or None if it has none."""
    tail = line.rstrip(b"\n")[-_CHECKSUM_LENGTH:]
    if tail.startswith(_CHECKSUM_KEY) and tail.endswith(b'"}'):
        return tail[len(_CHECKSUM_KEY) : -2]
    return None


class RotatingLineLog:
    """Log with a single writer that is rotated by size."""

    def __init__(self, path: Path | str, *, max_bytes: int, keep: int) -> None:
        """Configure the log; nothing is opened.

        Args:
            max_bytes: size above which the log is rotated.
            keep: number of rotated files; the oldest one is removed.
        """
        self.path = Path(path)
        self.max_bytes, self.keep = max_bytes, keep

    def append_lines(self, lines: bytes) -> None:
        """Append complete lines. Raises: CheckpointError for a disk error; a partial write is truncated."""
        make_folder(self.path.parent)
        size = self._read_size()
        if size and size + len(lines) > self.max_bytes:
            self._rotate_files()
        elif size and not self._has_final_newline(size):
            lines = b"\n" + lines  # a killed writer left an unfinished line
        append_bytes(self.path, lines)

    def _read_size(self) -> int:
        try:
            return os.lstat(self.path).st_size
        except FileNotFoundError:
            return 0

    def _has_final_newline(self, size: int) -> bool:
        descriptor = open_owned_file(self.path, os.O_RDONLY)
        try:
            return os.pread(descriptor, 1, size - 1) == b"\n"
        finally:
            os.close(descriptor)

    def _rotate_files(self) -> None:
        try:
            for number in range(self.keep, 0, -1):
                older = self.path.with_name(f"{self.path.name}.{number}")
                newer = self.path
                if number > 1:
                    newer = self.path.with_name(f"{self.path.name}.{number - 1}")
                if newer.exists():
                    os.replace(newer, older)
            inject_fault("online.rotated")
        except OSError as error:
            raise write_error(self.path, error, "rotated") from error
