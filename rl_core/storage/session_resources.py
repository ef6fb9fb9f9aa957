"""Folders of a running process, which no killed run leaves behind.

    <temporary folder>/posttrain-ray-<uid>-<random>/lock         Ray's sockets and logs
    <folder>/posttrain-weights-<uid>-<random>/lock               weights on their way to an inference server
    <temporary folder>/posttrain-agent-<uid>-<random>/lock       an agent's working folder and outputs

The owner holds a flock on each folder's `lock`. The kernel frees it when the process dies, so whatever can be locked
has no owner any more and is removed by the next run, even if the pid was reused. Programs that work in a folder may
briefly outlive the owner and continue to write: `lock` is removed last, so that the next run detects what could not be
removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
import weakref
from pathlib import Path

RAY_PREFIX, WEIGHTS_PREFIX = "posttrain-ray-", "posttrain-weights-"
AGENT_PREFIX = "posttrain-agent-"
LOCK_FILE = "lock"
REMOVAL_TIMEOUT_S = 5.0  # for programs that are terminating and still write
CREATION_GRACE_S = 60.0  # a folder without a lock that is older is not being created any more


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
