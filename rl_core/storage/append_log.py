"""Append logs: files of lines that only grow, with a single writer, and the lines themselves.

    AppendLog            opened for each append; options: fsync, checksums, rotation by size
    LockedAppendLog      open and locked from construction to `close`; synced on request
    read_checked_lines   every complete line of a log, intact or damaged; on request it reports damaged ones
    read_records         the records of the intact lines; damaged ones are reported and skipped
    list_log_files       the files of a rotated log: NAME.<keep>, ... NAME.1, NAME

An append writes all of its lines or none. A killed process loses no line that was appended; only the last line can be
torn, and it was never acknowledged. Without `synced`, a machine crash may lose the last lines.

A record is a JSON line with a checksum, so that a damaged line is detected and only it is skipped:

    {"step":3,"metrics":{"train/loss":0.5},"crc":"4f1d0c9a"}

`crc` is the CRC-32 (ISO 3309, zlib) of the bytes before `,"crc"`: it detects every burst of up to 32 bits, and all
but one in 2^32 of other changes. It is the last key, and any JSON reader can read the line. Files of older versions
have lines without a checksum, which newer lines may follow; after the first line with one, a line without one is
damaged.

Logs that work differently, and why: `faults.py` logs from many processes (O_APPEND); `write_ahead_log.py` syncs a file
of SQLite; `posttrain/monitor/tail.py` reads a bounded number of bytes per refresh of a page; `rl_core/readers.py`,
`analysis/training_curves.py` and `analysis/trajectories.py` also read files of other programs, whose errors they
report or count by line.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import logging
import math
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from rl_core.errors import FolderBusy
from rl_core.storage.atomic_files import (
    fsync_path,
    make_folder,
    open_owned_file,
    replace_file,
    write_error,
)
from rl_core.storage.faults import inject_fault

log = logging.getLogger(__name__)

_CHECKSUM_KEY = b',"crc":"'
_CHECKSUM_LENGTH = len(_CHECKSUM_KEY) + 8 + 2  # ,"crc":"01234567"}
_LOCK_ATTEMPTS, _LOCK_RETRY_S = 5, 0.02
RECORD_LOST = "its record is lost"
_BLOCK_BYTES = 1 << 16  # read at a time in search of the last line end


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
    path: Path, offset: int = 0, end: int | None = None, *, consequence: str | None = None
) -> Iterator[CheckedLine]:
    """Yield the complete lines from byte `offset` (the start of a line) to `end`, without a torn last line.

    Args:
        consequence: of a damaged line, for its report; None = damaged lines are not reported.
    """
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
            checked = CheckedLine(record, start, offset, problem)
            if problem and consequence is not None:
                report_damaged_line(path, checked, consequence)
            yield checked


def read_records(path: Path, *, consequence: str = RECORD_LOST) -> Iterator[dict[str, Any]]:
    """Yield the records of the intact lines; report and skip damaged lines, skip a torn last one."""
    for line in read_checked_lines(path, consequence=consequence):
        if line.record is not None:
            yield line.record


def read_line_again(file: BinaryIO, line: bytes, start: int) -> bytes:
    """Read the bytes of a line again, in case its writer truncated a torn line and continued meanwhile.

    Such a line starts with bytes of the torn line and ends with bytes of its replacement.
    """
    return os.pread(file.fileno(), len(line), start)


def copy_intact_lines(source: Path, target: Path) -> list[CheckedLine]:
    """Write the intact lines of `source` to `target`, which may be the same file; return the damaged lines.

    A file without damage is copied byte by byte, except for a torn last line.
    """
    lines = read_checked_lines(source, consequence=RECORD_LOST)
    damaged = [line for line in lines if not line.is_intact]
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


def report_damaged_line(path: Path, line: CheckedLine, consequence: str = RECORD_LOST) -> None:
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


class AppendLog:
    """Log that is opened for each append, so that nothing has to be closed. Its methods are thread-safe."""

    def __init__(
        self,
        path: Path | str,
        *,
        synced: bool = False,
        checksums: bool = True,
        allow_nan: bool = False,
        max_bytes: int = 0,
        keep: int = 0,
        consequence: str = RECORD_LOST,
    ) -> None:
        """Configure the log; nothing is opened or created.

        Args:
            synced: fsync every append; False = a machine crash may lose the last lines.
            checksums: False = records are JSON lines without a checksum.
            allow_nan: records may hold NaN and infinities, which are not JSON.
            max_bytes: size above which the log is rotated; 0 = never.
            keep: number of rotated files; the oldest one is removed.
            consequence: of a damaged line, for its report.
        """
        self.path = Path(path)
        self._synced, self._checksums, self._allow_nan = synced, checksums, allow_nan
        self._max_bytes, self._keep = max_bytes, keep
        self._consequence = consequence
        self._thread_lock = threading.RLock()
        self._is_appending = False
        self._waiting_lines: list[bytes] = []  # of signal handlers that interrupted an append

    def append_record(self, record: Mapping[str, Any]) -> None:
        """Append one record, which must have at least one key. Raises: as `append_records`."""
        self.append_records([record])

    def append_records(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records with one write and one sync.

        Raises: CheckpointError for a disk error, in which case nothing is appended; ValueError for NaN and infinities
            unless they are allowed.
        """
        self.append_lines(b"".join(map(self._encode_record, records)))

    def _encode_record(self, record: Mapping[str, Any]) -> bytes:
        if self._checksums:
            return encode_checked_line(record, allow_nan=self._allow_nan)
        return (json.dumps(record, allow_nan=self._allow_nan) + "\n").encode()

    def append_lines(self, lines: bytes) -> None:
        """Append complete lines, all or nothing; create the file if absent.

        A torn line that a killed writer left is ended first, so that it damages no other line. If a signal handler
        appends while it interrupts an append, its lines are written after that append.
        Raises: CheckpointError for a disk error; a partial write is truncated.
        """
        with self._thread_lock:
            self._waiting_lines.append(lines)
            if self._is_appending:
                return
            self._is_appending = True
            try:
                while self._waiting_lines:
                    self._write_lines(self._waiting_lines.pop(0))
            except BaseException:
                self._waiting_lines.clear()
                raise
            finally:
                self._is_appending = False

    def _write_lines(self, lines: bytes) -> None:
        if self._max_bytes:
            self._rotate_if_full(len(lines))
        try:
            is_new = not os.path.lexists(self.path)
            descriptor = open_owned_file(self.path, os.O_RDWR | os.O_CREAT)
            try:
                size = os.fstat(descriptor).st_size
                if size and os.pread(descriptor, 1, size - 1) != b"\n":
                    lines = b"\n" + lines
                with _truncate_on_error(descriptor, size):
                    _write_all_bytes(descriptor, lines, size)
                    if self._synced:
                        os.fsync(descriptor)
                    if self._synced and is_new:
                        fsync_path(self.path.parent)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise write_error(self.path, error) from error

    def _rotate_if_full(self, num_new_bytes: int) -> None:
        try:
            size = os.lstat(self.path).st_size
        except FileNotFoundError:
            return
        if not size or size + num_new_bytes <= self._max_bytes:
            return
        try:
            for number in range(self._keep, 0, -1):
                older = self.path.with_name(f"{self.path.name}.{number}")
                newer = self.path
                if number > 1:
                    newer = self.path.with_name(f"{self.path.name}.{number - 1}")
                if newer.exists():
                    os.replace(newer, older)
            inject_fault("online.rotated")
        except OSError as error:
            raise write_error(self.path, error, "rotated") from error

    def recover_lines(
        self, is_stale: Callable[[dict[str, Any]], bool] | None = None
    ) -> Iterator[CheckedLine]:
        """Yield the lines that remain; after the last one truncate the file behind it.

        What is truncated: a torn last line, and everything from the first record on for which `is_stale` is true, as
        a resumed run writes it again. A damaged line is reported and remains: readers skip it.
        Raises: CheckpointError.
        """
        end = 0
        for line in read_checked_lines(self.path, consequence=self._consequence):
            if line.record is not None and is_stale is not None and is_stale(line.record):
                break
            end = line.end
            yield line
        if not self.path.is_file() or end >= self.path.stat().st_size:
            return
        try:
            descriptor = open_owned_file(self.path, os.O_RDWR)
            try:
                os.ftruncate(descriptor, end)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise write_error(self.path, error) from error

    def truncate_tail(self, is_stale: Callable[[dict[str, Any]], bool] | None = None) -> int:
        """Truncate as `recover_lines`, and return the number of lines that remain. Raises: CheckpointError."""
        return sum(1 for _ in self.recover_lines(is_stale))


class LockedAppendLog(AppendLog):
    """Log that one process holds open and locked until `close`; after a failed append it continues at the same byte."""

    def __init__(self, path: Path | str, *, allow_nan: bool = False) -> None:
        """Open the log, created durably if absent, and truncate a torn last line.

        Raises: FolderBusy while another process has it open; CheckpointError for a disk error.
        """
        super().__init__(path, allow_nan=allow_nan)
        make_folder(self.path.parent)
        is_new = not self.path.exists()
        try:
            self._descriptor = open_owned_file(self.path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise write_error(self.path, error) from error
        if not _acquire_file_lock(self._descriptor):
            os.close(self._descriptor)
            raise FolderBusy(
                f"{self.path} is being written by another run; wait for it, or use another folder"
            )
        try:
            if is_new:
                fsync_path(self.path.parent)
            self._end = _truncate_torn_line(self._descriptor, self.path)
        except OSError as error:
            os.close(self._descriptor)
            raise write_error(self.path, error) from error

    @property
    def end(self) -> int:
        """Byte offset after the last complete line."""
        return self._end

    @property
    def is_open(self) -> bool:
        """True until `close`."""
        return self._descriptor >= 0

    def _write_lines(self, lines: bytes) -> None:
        # If truncating a partial write fails, the next append overwrites it.
        start = self._end
        try:
            with _truncate_on_error(self._descriptor, start):
                _write_all_bytes(self._descriptor, lines, start)
                self._end = start + len(lines)
        except BaseException as error:
            self._end = start
            if isinstance(error, OSError):
                raise write_error(self.path, error) from error
            raise

    def sync_lines(self) -> None:
        """Flush all lines to the disk. Raises: CheckpointError."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise write_error(self.path, error, "synced") from error

    def close(self) -> None:
        """Release the file, without a sync. A second call does nothing."""
        with self._thread_lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1


def list_log_files(path: Path) -> list[Path]:
    """List the existing files of a rotated log, oldest first."""
    numbered = []
    for rotated in path.parent.glob(f"{path.name}.*"):
        number = rotated.name.removeprefix(f"{path.name}.")
        if number.isdecimal():
            numbered.append((int(number), rotated))
    paths = [rotated for _, rotated in sorted(numbered, reverse=True)]
    return [*paths, path] if path.is_file() else paths


def extract_number(record: Mapping[str, Any], name: str) -> float:
    """Return a number of a record; minus infinity if the field is absent or no number."""
    value = record.get(name)
    return value if isinstance(value, int | float) else -math.inf


def _acquire_file_lock(descriptor: int) -> bool:
    """Lock a file, retrying briefly: crash detection holds the lock for a moment while it checks."""
    for attempts_left in reversed(range(_LOCK_ATTEMPTS)):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if attempts_left:
                time.sleep(_LOCK_RETRY_S)
    return False


def _truncate_torn_line(descriptor: int, path: Path) -> int:
    """Truncate everything after the last newline; return the remaining size in bytes."""
    size = end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - _BLOCK_BYTES)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        log.warning("%s: cut off %d bytes of a torn last line", path, size - end)
        os.ftruncate(descriptor, end)
    return end


@contextlib.contextmanager
def _truncate_on_error(descriptor: int, size: int) -> Iterator[None]:
    """Truncate a file to `size` bytes if the block raises, also by a signal: a torn line must not end up mid-file."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # shrinking needs no disk space
            os.ftruncate(descriptor, size)
        raise


def _write_all_bytes(descriptor: int, data: bytes, offset: int) -> None:
    """Write at a byte offset. After a partial write, try again: the next call raises the disk's reason."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
