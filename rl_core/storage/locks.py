"""Exclusive lock of a folder; the kernel releases it when its process ends, in whatever way."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from types import TracebackType

from rl_core.errors import CheckpointError, FolderBusy
from rl_core.storage.faults import fault
from rl_core.storage.own_files import own_file

__all__ = ["FolderLock"]


class FolderLock:
    """Exclusive lock of a folder (made if absent), held by this process within the `with` block.

    The lock is the file `.lock` in it; a path whose name ends in `.lock` is the lock file itself. It is a
    flock: the kernel frees it when the holder dies, however it dies, so a stale lock cannot exist. The file stays.
    """

    def __init__(self, path: Path | str, wait_s: float = 0.0) -> None:
        """wait_s: seconds to wait for another holder; 0 refuses at once."""
        path = Path(path)
        self.path = path if path.name.endswith(".lock") else path / ".lock"
        self.wait_s = wait_s
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        """True = this object holds the lock."""
        return self._descriptor is not None

    def __enter__(self) -> FolderLock:
        deadline = time.monotonic() + self.wait_s
        while True:
            try:
                return self._take()
            except FolderBusy:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise
                time.sleep(min(1.0, left))

    def _take(self) -> FolderLock:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = own_file(self.path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be locked: {error.strerror or error}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(descriptor, 64).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            if not isinstance(error, BlockingIOError):
                raise CheckpointError(f"{self.path}: this file system has no working locks: {error}") from error
            raise FolderBusy(
                f"{self.path}: locked by process {holder}, which writes there; wait for it, stop it, "
                "or use another folder"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor
        fault("lock.taken")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # children that inherited the descriptor lose it as well
            os.close(self._descriptor)
            self._descriptor = None
