"""Folders in the temporary folder that other programs work in while a run lives, and that no killed run leaves behind.

    <temporary folder>/posttrain-ray-<uid>-<random>/lock         Ray's sockets and logs
    <folder>/posttrain-weights-<uid>-<random>/lock               weights on their way to an inference server

The owner holds a lock (flock) on `lock`, which the kernel frees when the process dies, in whatever way. The programs
may outlive it for a moment and write on: `lock` goes last, so that what cannot be removed now is found by the next run.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

__all__ = ["SESSION_PREFIX", "WEIGHTS_PREFIX", "SessionFolder", "reap_session_folders"]

SESSION_PREFIX, WEIGHTS_PREFIX = "posttrain-ray-", "posttrain-weights-"
LOCK = "lock"
PATIENCE_S = 5.0  # for programs that are being ended and still write
MAKING_S = 60.0  # after which a folder without a lock is none that is being made


class SessionFolder:
    """A folder of this process, with a short path, since sockets in it have at most 107 characters."""

    def __init__(self, prefix: str = SESSION_PREFIX, root: Path | None = None) -> None:
        """`root`: where it is made; None = the temporary folder. Raises: OSError where it cannot be."""
        self.path = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getuid()}-", dir=root))
        self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        """Remove the folder with everything in it; what others write there meanwhile too, for a few seconds."""
        _remove(self.path, PATIENCE_S)
        self.abandon()

    def abandon(self) -> None:
        """Let go of the lock, as the end of the process does."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1


def reap_session_folders(prefix: str = SESSION_PREFIX, root: Path | None = None) -> list[str]:
    """Remove the folders of this user's runs that were killed; returns their names."""
    removed = []
    for folder in sorted((root or Path(tempfile.gettempdir())).glob(f"{prefix}{os.getuid()}-*")):
        try:
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | _made_anew(folder), 0o600)
        except OSError:  # its owner is just making or removing it
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(folder, 0.0)
            removed.append(folder.name)
        except OSError:  # its owner lives
            continue
        finally:
            os.close(lock)
    return removed


def _made_anew(folder: Path) -> int:
    """Flag with which a lock is opened: O_CREAT where one is missing for long, so that nobody is making the folder."""
    is_old = time.time() - folder.lstat().st_mtime > MAKING_S and not folder.is_symlink()
    return os.O_CREAT if is_old else 0


def _remove(folder: Path, seconds: float) -> None:
    """Remove a folder, the lock last; where it does not get empty within so many seconds, the lock stays."""
    end = time.monotonic() + seconds
    while True:
        for entry in _entries(folder):
            if entry.name != LOCK:
                shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() and not entry.is_symlink() else _unlink(
                    entry
                )
        if not [entry for entry in _entries(folder) if entry.name != LOCK]:
            _unlink(folder / LOCK)
            try:
                os.rmdir(folder)
                return
            except FileNotFoundError:
                return
            except OSError:  # something was written since
                with contextlib.suppress(OSError):
                    (folder / LOCK).touch(0o600)
        if time.monotonic() >= end:
            return
        time.sleep(0.02)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
