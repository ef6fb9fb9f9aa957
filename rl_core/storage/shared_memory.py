"""Named segments of shared memory: files of /dev/shm that name their owner and are never left behind.

    /dev/shm/posttrain-<uid>-<pid>-<random>-<number>

The owner holds a lock (flock) on each of its segments. The kernel frees it when the process dies, in whatever way: a
segment whose lock can be had has no owner any more, and the reaper removes it, whatever process has its number now.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import re
import secrets
import stat
from pathlib import Path
from types import TracebackType

from rl_core.errors import CheckpointError, CorruptError
from rl_core.storage.faults import fault

__all__ = ["SHARED_MEMORY", "SharedSegment", "attach_segment", "new_token", "own_segments", "reap_segments"]

SHARED_MEMORY = Path("/dev/shm")
_NAME = re.compile(r"posttrain-(\d+)-(\d+)-([0-9a-f]{8})-(\d+)")
_numbers = itertools.count()
_REMEDY = {errno.ENOSPC: "; the shared memory is full: raise its size, or lower the bound of the channel"}


class SharedSegment:
    """A segment that this process owns: mapped for writing, unlinked by `close`. A context manager."""

    def __init__(self, size: int, *, token: str, folder: Path = SHARED_MEMORY) -> None:
        """Reserve `size` bytes, 1 at least.

        Args:
            token: 8 hex digits of the sender, by which it finds its own segments.
        Raises: CheckpointError where there is no room: memory is reserved now, and not found missing at a write.
        """
        self.folder, self.size = folder, max(1, size)
        self.name = f"posttrain-{os.getuid()}-{os.getpid()}-{token}-{next(_numbers)}"
        path = folder / self.name
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be made: {error.strerror}") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)  # a reaper may be looking at it for a moment
            fault("online.segment")
            os.posix_fallocate(self._descriptor, 0, self.size)
            self.memory = mmap.mmap(self._descriptor, self.size)
        except BaseException as error:
            os.unlink(path)
            os.close(self._descriptor)
            if isinstance(error, OSError):
                remedy = _REMEDY.get(error.errno or 0, "")
                raise CheckpointError(f"{path}: {self.size} bytes: {error.strerror}{remedy}") from error
            raise

    def close(self) -> None:
        """Remove the segment; those who have it mapped keep their bytes until they let go."""
        if self._descriptor < 0:
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.folder / self.name)
        with contextlib.suppress(BufferError):  # a view of it is still used here: it goes with that
            self.memory.close()
        os.close(self._descriptor)
        self._descriptor = -1

    def __enter__(self) -> SharedSegment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def attach_segment(name: str, size: int, *, folder: Path = SHARED_MEMORY) -> mmap.mmap:
    """Another process's segment, mapped for reading.

    Raises: CorruptError for a name that is none, a segment that is gone, smaller than said, or of another user.
    """
    if not _NAME.fullmatch(name):
        raise CorruptError(f"{name[:100]!r}: is no segment's name")
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise CorruptError(f"{folder / name}: {error.strerror}") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or not 0 < size <= found.st_size:
            raise CorruptError(f"{folder / name}: is not a segment of this user with {size} bytes")
        return mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)


def own_segments(token: str, *, folder: Path = SHARED_MEMORY) -> list[str]:
    """Names of a sender's segments that are there."""
    return sorted(name for name in os.listdir(folder) if (match := _NAME.fullmatch(name)) and match[3] == token)


def reap_segments(*, folder: Path = SHARED_MEMORY) -> list[str]:
    """Remove this user's segments whose owner is dead; returns their names."""
    removed = []
    for name in sorted(os.listdir(folder)):
        match = _NAME.fullmatch(name)
        if match is None or int(match[1]) != os.getuid():
            continue
        try:
            descriptor = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # its owner has just removed it
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_size or not _is_alive(int(match[2])):  # not between its making and its lock
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(folder / name)
                    removed.append(name)
        except OSError:  # its owner lives
            continue
        finally:
            os.close(descriptor)
    return removed


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def new_token() -> str:
    """8 hex digits."""
    return secrets.token_hex(4)
