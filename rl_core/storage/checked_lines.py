"""JSON lines with a checksum each, so that a damaged line is found, named and left out, and no other line with it.

    {"step":3,"metrics":{"train/loss":0.5},"crc":"4f1d0c9a"}

`crc` is the CRC-32 (ISO 3309, zlib) of the bytes before `,"crc"`: it finds every burst of up to 32 bits, and any other
change but one in 2^32. It is the last key of a line that any JSON reader reads. Files of older versions have lines
without it, and may go on with lines that have it; from the first of those on, a line without one is damaged.
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

from rl_core.storage.single_files import replacing

__all__ = [
    "Line",
    "copy_intact",
    "has_checksum",
    "intact",
    "parse",
    "read_again",
    "read_checked",
    "report_damage",
    "sealed",
]

log = logging.getLogger(__name__)

_KEY = b',"crc":"'
_LENGTH = len(_KEY) + 8 + 2  # ,"crc":"01234567"}


class Line(NamedTuple):
    """One complete line of a file."""

    record: dict[str, Any] | None  # without its checksum; None = damaged or unreadable
    start: int  # byte offsets of the line, behind its line feed at the end
    end: int
    problem: str  # "" = intact

    @property
    def is_intact(self) -> bool:
        """True = it says what was written."""
        return self.record is not None


def sealed(record: Mapping[str, Any], *, allow_nan: bool = False) -> bytes:
    """The record, which has at least one key, as a JSON line with its checksum and a line feed."""
    assert record, "a line has something to say"
    body = json.dumps(record, ensure_ascii=True, separators=(",", ":"), allow_nan=allow_nan).encode()[:-1]
    return body + _KEY + b"%08x" % zlib.crc32(body) + b'"}\n'


def intact(line: bytes) -> bool:
    """False = the line has a checksum, and it is another one than that of its bytes."""
    found = _checksum(line)
    return found is None or found == b"%08x" % zlib.crc32(line.rstrip(b"\n")[:-_LENGTH])


def has_checksum(line: bytes) -> bool:
    """True = the line ends with a checksum, right or wrong."""
    return _checksum(line) is not None


def parse(
    line: bytes, has_checksums: bool = False, loads: Callable[[bytes], Any] = json.loads
) -> tuple[dict[str, Any] | None, str]:
    """A complete line's record, without its checksum, and its problem: (None, why) if it is damaged or no object.

    Args:
        has_checksums: an earlier line of the file has one, so that this one must.
        loads: as json.loads.
    """
    if has_checksums and not has_checksum(line):
        return None, "damaged (it has no checksum, as lines before it have)"
    if not intact(line):
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


def read_checked(path: Path, offset: int = 0, end: int | None = None) -> Iterator[Line]:
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
            record, problem = parse(line, has_checksums)
            if problem:
                line = read_again(file, line, start)
                record, problem = parse(line, has_checksums)
            has_checksums = has_checksums or has_checksum(line)
            yield Line(record, start, offset, problem)


def read_again(file: BinaryIO, line: bytes, start: int) -> bytes:
    """The bytes where `line` was read: others, if its writer cut off a torn line and wrote on during the reading.

    Such a line begins with bytes of the torn one and ends with those of the one that replaced it.
    """
    return os.pread(file.fileno(), len(line), start)


def copy_intact(source: Path, target: Path) -> list[Line]:
    """Write the intact lines of `source` to `target`, which may be the same file; returns the damaged ones.

    A file without damage is copied byte by byte, a torn last line excepted.
    """
    damaged = [line for line in read_checked(source) if not line.is_intact]
    for line in damaged:
        report_damage(source, line)
    if source == target and not damaged:
        return []
    with source.open("rb") as whole, replacing(target, binary=True, point="lines.copied") as kept:
        bad = {line.start for line in damaged}
        place = 0
        for text in whole:
            if text.endswith(b"\n") and place not in bad:
                kept.write(text)
            place += len(text)
    return damaged


def report_damage(path: Path, line: Line, lost: str = "its record is lost") -> None:
    """Warn, once in a process, of a line that is not intact."""
    _warn(str(path), line.start, line.end, line.problem, lost)


@functools.lru_cache(maxsize=4096)
def _warn(path: str, start: int, end: int, problem: str, lost: str) -> None:
    log.warning("%s: the line of bytes %d to %d is %s; it is left out and %s", path, start, end, problem, lost)


def _checksum(line: bytes) -> bytes | None:
    """The checksum that a line has; None without one."""
    tail = line.rstrip(b"\n")[-_LENGTH:]
    return tail[len(_KEY) : -2] if tail.startswith(_KEY) and tail.endswith(b'"}') else None
