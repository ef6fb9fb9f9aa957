"""Folders in the temporary folder that other programs work in while a run lives, and that no killed run leaves behind.

    <temporary folder>/posttrain-ray-<uid>-<random>/lock         Ray's sockets and logs
    <folder>/posttrain-weights-<uid>-<random>/lock               weights on their way to an inference server

The owner holds a lock (flock) on `lock`, which the kernel frees when the process dies, in whatever way.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

__all__ = ["SESSION_PREFIX", "WEIGHTS_PREFIX", "SessionFolder", "reap_session_folders"]

SESSION_PREFIX, WEIGHTS_PREFIX = "posttrain-ray-", "posttrain-weights-"


class SessionFolder:
    """A folder of this process, with a short path, since sockets in it have at most 107 characters."""

    def __init__(self, prefix: str = SESSION_PREFIX, root: Path | None = None) -> None:
        """`root`: where it is made; None = the temporary folder. Raises: OSError where it cannot be."""
        self.path = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getuid()}-", dir=root))
        self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        """Remove the folder with everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)
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
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # its owner is just making or removing it
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder.name)
        except OSError:  # its owner lives
            continue
        finally:
            os.close(lock)
    return removed
