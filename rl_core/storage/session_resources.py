"""Folders in the temporary folder that other programs work in while a run lives, and that no killed run leaves behind.

    <temporary folder>/posttrain-ray-<uid>-<random>/lock         Ray's sockets and logs
    <folder>/posttrain-weights-<uid>-<random>/lock               weights on their way to an inference server

The owner holds a lock (flock) on `lock`, which the kernel frees when the process dies, in whatever way. The programs
may outlive it for a moment and write on: `lock` goes last, so that what cannot be removed now is found by the next run.

Named segments of shared memory: files of /dev/shm that name their owner and are never left behind.

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
import shutil
import stat
import tempfile
import time
from pathlib import Path
from types import TracebackType

from rl_core.errors import CheckpointError, CorruptError
from rl_core.storage.faults import inject_fault

RAY_PREFIX, WEIGHTS_PREFIX = "posttrain-ray-", "posttrain-weights-"
LOCK_FILE = "lock"
REMOVAL_TIMEOUT_S = 5.0  # for programs that are being ended and still write
CREATION_GRACE_S = 60.0  # after which a folder without a lock is none that is being made


class SessionFolder:
    """A folder of this process, with a short path, since sockets in it have at most 107 characters."""

    def __init__(self, prefix: str = RAY_PREFIX, root: Path | None = None) -> None:
        """`root`: where it is made; None = the temporary folder. Raises: OSError where it cannot be."""
        self.path = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getuid()}-", dir=root))
        self._lock = os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        """Remove the folder with everything in it; what others write there meanwhile too, for a few seconds."""
        _remove_session_folder(self.path, REMOVAL_TIMEOUT_S)
        self.release_lock()

    def release_lock(self) -> None:
        """Let go of the lock, as the end of the process does."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1


def remove_stale_session_folders(prefix: str = RAY_PREFIX, root: Path | None = None) -> list[str]:
    """Remove the folders of this user's runs that were killed; returns their names."""
    removed = []
    for folder in sorted((root or Path(tempfile.gettempdir())).glob(f"{prefix}{os.getuid()}-*")):
        try:
            lock = os.open(
                folder / LOCK_FILE,
                os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | _choose_lock_flags(folder),
                0o600,
            )
        except OSError:  # its owner is just making or removing it
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_session_folder(folder, 0.0)
            removed.append(folder.name)
        except OSError:  # its owner lives
            continue
        finally:
            os.close(lock)
    return removed


def _choose_lock_flags(folder: Path) -> int:
    """Flag with which a lock is opened: O_CREAT where one is missing for long, so that nobody is making the folder."""
    is_old = time.time() - folder.lstat().st_mtime > CREATION_GRACE_S and not folder.is_symlink()
    return os.O_CREAT if is_old else 0


def _remove_session_folder(folder: Path, seconds: float) -> None:
    """Remove a folder, the lock last; where it does not get empty within so many seconds, the lock stays."""
    end = time.monotonic() + seconds
    while True:
        for entry in _list_entries(folder):
            if entry.name != LOCK_FILE:
                shutil.rmtree(
                    entry, ignore_errors=True
                ) if entry.is_dir() and not entry.is_symlink() else _unlink_quietly(entry)
        if not [entry for entry in _list_entries(folder) if entry.name != LOCK_FILE]:
            _unlink_quietly(folder / LOCK_FILE)
            try:
                os.rmdir(folder)
                return
            except FileNotFoundError:
                return
            except OSError:  # something was written since
                with contextlib.suppress(OSError):
                    (folder / LOCK_FILE).touch(0o600)
        if time.monotonic() >= end:
            return
        time.sleep(0.02)


def _list_entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _unlink_quietly(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


SHARED_MEMORY = Path("/dev/shm")
_SEGMENT_NAME = re.compile(r"posttrain-(\d+)-(\d+)-([0-9a-f]{8})-(\d+)")
_segment_numbers = itertools.count()
_SEGMENT_REMEDIES = {
    errno.ENOSPC: "; the shared memory is full: raise its size, or lower the bound of the channel"
}


class SharedSegment:
    """A segment that this process owns: mapped for writing, unlinked by `close`. A context manager."""

    def __init__(self, size: int, *, token: str, folder: Path = SHARED_MEMORY) -> None:
        """Reserve `size` bytes, 1 at least.

        Args:
            token: 8 hex digits of the sender, by which it finds its own segments.
        Raises: CheckpointError where there is no room: memory is reserved now, and not found missing at a write.
        """
        self.folder, self.size = folder, max(1, size)
        self.name = f"posttrain-{os.getuid()}-{os.getpid()}-{token}-{next(_segment_numbers)}"
        path = folder / self.name
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be made: {error.strerror}") from error
        try:
            fcntl.flock(
                self._descriptor, fcntl.LOCK_EX
            )  # a reaper may be looking at it for a moment
            inject_fault("online.segment")
            os.posix_fallocate(self._descriptor, 0, self.size)
            self.memory = mmap.mmap(self._descriptor, self.size)
        except BaseException as error:
            os.unlink(path)
            os.close(self._descriptor)
            if isinstance(error, OSError):
                remedy = _SEGMENT_REMEDIES.get(error.errno or 0, "")
                raise CheckpointError(
                    f"{path}: {self.size} bytes: {error.strerror}{remedy}"
                ) from error
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
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def attach_segment(name: str, size: int, *, folder: Path = SHARED_MEMORY) -> mmap.mmap:
    """Another process's segment, mapped for reading.

    Raises: CorruptError for a name that is none, a segment that is gone, smaller than said, or of another user.
    """
    if not _SEGMENT_NAME.fullmatch(name):
        raise CorruptError(f"{name[:100]!r}: is no segment's name")
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise CorruptError(f"{folder / name}: {error.strerror}") from error
    try:
        found = os.fstat(descriptor)
        if (
            not stat.S_ISREG(found.st_mode)
            or found.st_uid != os.getuid()
            or not 0 < size <= found.st_size
        ):
            raise CorruptError(f"{folder / name}: is not a segment of this user with {size} bytes")
        return mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)


def list_sender_segments(token: str, *, folder: Path = SHARED_MEMORY) -> list[str]:
    """Names of a sender's segments that are there."""
    return sorted(
        name
        for name in os.listdir(folder)
        if (match := _SEGMENT_NAME.fullmatch(name)) and match[3] == token
    )


def remove_stale_segments(*, folder: Path = SHARED_MEMORY) -> list[str]:
    """Remove this user's segments whose owner is dead; returns their names."""
    removed = []
    for name in sorted(os.listdir(folder)):
        match = _SEGMENT_NAME.fullmatch(name)
        if match is None or int(match[1]) != os.getuid():
            continue
        try:
            descriptor = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # its owner has just removed it
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_size or not _is_process_alive(
                int(match[2])
            ):  # not between its making and its lock
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(folder / name)
                    removed.append(name)
        except OSError:  # its owner lives
            continue
        finally:
            os.close(descriptor)
    return removed


def _is_process_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def generate_sender_token() -> str:
    """8 hex digits."""
    return secrets.token_hex(4)
