"""Folders and shared-memory segments of a running process, which no killed run leaves behind.

    <temporary folder>/posttrain-ray-<uid>-<random>/lock         Ray's sockets and logs
    <folder>/posttrain-weights-<uid>-<random>/lock               weights on their way to an inference server
    <temporary folder>/posttrain-agent-<uid>-<random>/lock       an agent's working folder and outputs
    /dev/shm/posttrain-<uid>-<pid>-<random>-<number>             a segment of shared memory

The owner holds a flock on each folder's `lock` and on each segment. The kernel frees it when the process dies, so
whatever can be locked has no owner any more and is removed by the next run, even if the pid was reused. Programs that
work in a folder may briefly outlive the owner and continue to write: `lock` is removed last, so that the next run
detects what could not be removed.
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
import weakref
from pathlib import Path
from types import TracebackType

from rl_core.errors import CheckpointError, CorruptError
from rl_core.storage.atomic_files import is_process_alive
from rl_core.storage.faults import inject_fault

RAY_PREFIX, WEIGHTS_PREFIX = "posttrain-ray-", "posttrain-weights-"
AGENT_PREFIX = "posttrain-agent-"
LOCK_FILE = "lock"
REMOVAL_TIMEOUT_S = 5.0  # for programs that are terminating and still write
CREATION_GRACE_S = 60.0  # a folder without a lock that is older is not being created any more


SHARED_MEMORY = Path("/dev/shm")
_SEGMENT_NAME = re.compile(r"posttrain-(\d+)-(\d+)-([0-9a-f]{8})-(\d+)")
_SEGMENT_REMEDIES = {
    errno.ENOSPC: "; the shared memory is full: raise its size, or lower the bound of the channel"
}
_segment_numbers = itertools.count()


class SessionFolder:
    """Folder of this process with a short path, because paths of sockets in it have at most 107 characters."""

    def __init__(self, prefix: str = RAY_PREFIX, root: Path | None = None) -> None:
        """Create and lock the folder in `root`; None = the temporary folder. Raises: OSError if that fails.

        It is removed by `close`, and at the latest when this object or the process ends.
        """
        self.path, self._lock = _create_locked_folder(f"{prefix}{os.getuid()}-", root)
        self._finalizer = weakref.finalize(
            self, _close_folder, self.path, self._lock, os.getpid(), 0.0
        )

    def close(self) -> None:
        """Remove the folder and its content; keep trying for a few seconds while others write to it."""
        if self._finalizer.detach() is not None:
            _close_folder(self.path, self._lock, os.getpid(), REMOVAL_TIMEOUT_S)

    def release_lock(self) -> None:
        """Release the lock and leave the folder, as a kill of the process does."""
        if self._finalizer.detach() is not None:
            os.close(self._lock)


def _create_locked_folder(prefix: str, root: Path | None) -> tuple[Path, int]:
    """Create a folder and lock it; another one if a run removed it before it was locked."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        lock = -1
        try:
            lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (path / LOCK_FILE).exists():
                return path, lock
            os.close(lock)
        except BaseException:
            if lock >= 0:
                os.close(lock)
            _remove_session_folder(path, 0.0)
            raise


def _close_folder(path: Path, lock: int, owner: int, seconds: float) -> None:
    """Remove a folder and release its lock, unless this process is a fork of the owner."""
    if os.getpid() == owner:
        _remove_session_folder(path, seconds)
        os.close(lock)


def remove_stale_session_folders(prefix: str = RAY_PREFIX, root: Path | None = None) -> list[str]:
    """Remove the folders of this user's killed runs; return their names."""
    removed = []
    for folder in sorted((root or Path(tempfile.gettempdir())).glob(f"{prefix}{os.getuid()}-*")):
        try:
            flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | _choose_lock_flags(folder)
            lock = os.open(folder / LOCK_FILE, flags, 0o600)
        except OSError:  # its owner is creating or removing it
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_session_folder(folder, 0.0)
            removed.append(folder.name)
        except OSError:  # its owner is alive
            continue
        finally:
            os.close(lock)
    return removed


def _choose_lock_flags(folder: Path) -> int:
    """Return O_CREAT if the folder is so old that nobody can still be creating its lock, else 0."""
    is_old = time.time() - folder.lstat().st_mtime > CREATION_GRACE_S and not folder.is_symlink()
    return os.O_CREAT if is_old else 0


def _remove_session_folder(folder: Path, seconds: float) -> None:
    """Remove a folder, its lock last; if it is not empty within `seconds`, the lock stays."""
    end = time.monotonic() + seconds
    while True:
        for entry in _list_entries(folder):
            if entry.name == LOCK_FILE:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                _unlink_quietly(entry)
        if not [entry for entry in _list_entries(folder) if entry.name != LOCK_FILE]:
            _unlink_quietly(folder / LOCK_FILE)
            try:
                os.rmdir(folder)
                return
            except FileNotFoundError:
                return
            except OSError:  # another program wrote to it meanwhile
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


class SharedSegment:
    """Segment of shared memory owned by this process: mapped for writing, unlinked by `close`. A context manager."""

    def __init__(self, size: int, *, token: str, folder: Path = SHARED_MEMORY) -> None:
        """Reserve `size` bytes, at least 1.

        Args:
            token: 8 hex digits that identify the sender's segments.
        Raises: CheckpointError if there is no space; memory is reserved here so that later writes cannot fail.
        """
        self.folder, self.size = folder, max(1, size)
        self.name = f"posttrain-{os.getuid()}-{os.getpid()}-{token}-{next(_segment_numbers)}"
        path = folder / self.name
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be created: {error.strerror}") from error
        try:
            # Waits while another process checks briefly whether the segment is stale.
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
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
        """Remove the segment. Processes that have mapped it keep their bytes until they unmap it."""
        if self._descriptor < 0:
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.folder / self.name)
        with contextlib.suppress(BufferError):  # a view is still in use and frees the memory later
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
    """Map another process's segment for reading.

    Raises: CorruptError for an invalid name, or a segment that is missing, too small, or of another user.
    """
    if not _SEGMENT_NAME.fullmatch(name):
        raise CorruptError(f"{name[:100]!r}: is not a segment name")
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise CorruptError(f"{folder / name}: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        is_user_file = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
        if not is_user_file or not 0 < size <= status.st_size:
            raise CorruptError(f"{folder / name}: is not a segment of this user with {size} bytes")
        return mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)


def list_sender_segments(token: str, *, folder: Path = SHARED_MEMORY) -> list[str]:
    """Return the names of a sender's existing segments."""
    matches = map(_SEGMENT_NAME.fullmatch, os.listdir(folder))
    return sorted(match[0] for match in matches if match and match[3] == token)


def remove_stale_segments(*, folder: Path = SHARED_MEMORY) -> list[str]:
    """Remove this user's segments whose owner is dead; return their names."""
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
            # An empty segment of a living process has been created but not locked yet.
            if os.fstat(descriptor).st_size or not is_process_alive(int(match[2])):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(folder / name)
                    removed.append(name)
        except OSError:  # its owner is alive
            continue
        finally:
            os.close(descriptor)
    return removed


def generate_sender_token() -> str:
    """Return 8 random hex digits."""
    return secrets.token_hex(4)
