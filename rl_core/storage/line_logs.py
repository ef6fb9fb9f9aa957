"""JSON lines with a checksum each, so that a damaged line is found, named and left out, and no other line with it.

    {"step":3,"metrics":{"train/loss":0.5},"crc":"4f1d0c9a"}

`crc` is the CRC-32 (ISO 3309, zlib) of the bytes before `,"crc"`: it finds every burst of up to 32 bits, and any other
change but one in 2^32. It is the last key of a line that any JSON reader reads. Files of older versions have lines
without it, and may go on with lines that have it; from the first of those on, a line without one is damaged.

Logs that grow line by line and are rotated: NAME, NAME.1 (the one before it), ... NAME.<keep>.

Lines are not synced one by one: a crash of the machine may lose the last ones; a killed process loses none that
`append` took, and leaves no torn line but the last.
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
    """One complete line of a file."""

    record: dict[str, Any] | None  # without its checksum; None = damaged or unreadable
    start: int  # byte offsets of the line, behind its line feed at the end
    end: int
    problem: str  # "" = intact

    @property
    def is_intact(self) -> bool:
        """True = it says what was written."""
        return self.record is not None


def encode_checked_line(record: Mapping[str, Any], *, allow_nan: bool = False) -> bytes:
    """The record, which has at least one key, as a JSON line with its checksum and a line feed."""
    assert record, "a line has something to say"
    body = json.dumps(
        record, ensure_ascii=True, separators=(",", ":"), allow_nan=allow_nan
    ).encode()[:-1]
    return body + _CHECKSUM_KEY + b"%08x" % zlib.crc32(body) + b'"}\n'


def has_valid_checksum(line: bytes) -> bool:
    """False = the line has a checksum, and it is another one than that of its bytes."""
    found = _extract_checksum(line)
    return found is None or found == b"%08x" % zlib.crc32(line.rstrip(b"\n")[:-_CHECKSUM_LENGTH])


def has_checksum(line: bytes) -> bool:
    """True = the line ends with a checksum, right or wrong."""
    return _extract_checksum(line) is not None


def parse_checked_line(
    line: bytes, has_checksums: bool = False, loads: Callable[[bytes], Any] = json.loads
) -> tuple[dict[str, Any] | None, str]:
    """A complete line's record, without its checksum, and its problem: (None, why) if it is damaged or no object.

    Args:
        has_checksums: an earlier line of the file has one, so that this one must.
        loads: as json.loads.
    """
    if has_checksums and not has_checksum(line):
        return None, "damaged (it has no checksum, as lines before it have)"
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
    """Complete lines from byte `offset` (a line's beginning) to `end`; a torn last one is left out."""
    if not path.is_file():  # a pipe would be waited for
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
    """The bytes where `line` was read: others, if its writer cut off a torn line and wrote on during the reading.

    Such a line begins with bytes of the torn one and ends with those of the one that replaced it.
    """
    return os.pread(file.fileno(), len(line), start)


def copy_intact_lines(source: Path, target: Path) -> list[CheckedLine]:
    """Write the intact lines of `source` to `target`, which may be the same file; returns the damaged ones.

    A file without damage is copied byte by byte, a torn last line excepted.
    """
    damaged = [line for line in read_checked_lines(source) if not line.is_intact]
    for line in damaged:
        report_damaged_line(source, line)
    if source == target and not damaged:
        return []
    with (
        source.open("rb") as whole,
        replace_file(target, binary=True, point="lines.copied") as kept,
    ):
        bad = {line.start for line in damaged}
        place = 0
        for text in whole:
            if text.endswith(b"\n") and place not in bad:
                kept.write(text)
            place += len(text)
    return damaged


def report_damaged_line(
    path: Path, line: CheckedLine, consequence: str = "its record is lost"
) -> None:
    """Warn, once in a process, of a line that is not intact."""
    _warn_once(str(path), line.start, line.end, line.problem, consequence)


@functools.lru_cache(maxsize=4096)
def _warn_once(path: str, start: int, end: int, problem: str, lost: str) -> None:
    log.warning(
        "%s: the line of bytes %d to %d is %s; it is left out and %s",
        path,
        start,
        end,
        problem,
        lost,
    )


def _extract_checksum(line: bytes) -> bytes | None:
    """The checksum that a line has; None without one."""
    tail = line.rstrip(b"\n")[-_CHECKSUM_LENGTH:]
    return (
        tail[len(_CHECKSUM_KEY) : -2]
        if tail.startswith(_CHECKSUM_KEY) and tail.endswith(b'"}')
        else None
    )


class RotatingLineLog:
    """One log of one writer."""

    def __init__(self, path: Path | str, *, max_bytes: int, keep: int) -> None:
        """max_bytes: size beyond which the log gets the next name. keep: rotated files, the oldest is removed."""
        self.path = Path(path)
        self.max_bytes, self.keep = max_bytes, keep

    def append_lines(self, lines: bytes) -> None:
        """Append whole lines. Raises: CheckpointError where the disk refuses; what it took is cut off again."""
        make_folder(self.path.parent)
        size = self._read_size()
        if size and size + len(lines) > self.max_bytes:
            self._rotate_files()
        elif size and not self._has_final_newline(size):
            lines = b"\n" + lines  # behind a line that a killed writer left unfinished
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
                newer = (
                    self.path.with_name(f"{self.path.name}.{number - 1}")
                    if number > 1
                    else self.path
                )
                if newer.exists():
                    os.replace(newer, older)
            inject_fault("online.rotated")
        except OSError as error:
            raise write_error(self.path, error, "rotated") from error
