"""Exclusive lock of a folder; the kernel releases it when its process ends, in whatever way."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import time
from pathlib import Path
from types import TracebackType

from rl_core.errors import CheckpointError, FolderBusy
from rl_core.storage.faults import fault
from rl_core.storage.network_folders import locks_reach_other_machines
from rl_core.storage.own_files import own_file
from rl_core.storage.single_files import create_once, make_folder, refused

__all__ = ["FolderLock"]


class FolderLock:
    """Exclusive lock of a folder (made if absent), held by this process within the `with` block.

    The lock is the file `.lock` in it; a path whose name ends in `.lock` is the lock file itself. It is a
    flock: the kernel frees it when the holder dies, however it dies, so a stale lock cannot exist. The file stays.

    On a network folder whose locks do not reach other machines, a second file (`.lock.holder`) names the machine that
    holds the lock. Another machine refuses while it is there, and cannot know whether its process lives: after the
    crash of a machine a person has to remove it.
    """

    def __init__(self, path: Path | str, wait_s: float = 0.0) -> None:
        """wait_s: seconds to wait for another holder; 0 refuses at once."""
        path = Path(path)
        self.path = path if path.name.endswith(".lock") else path / ".lock"
        self.wait_s = wait_s
        self._descriptor: int | None = None
        self._holder: Path | None = None  # the second file, where one is needed

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
        make_folder(self.path.parent)
        try:
            descriptor = own_file(self.path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise refused(self.path, error, "locked") from error
        try:
            self._lock(descriptor)
            if not locks_reach_other_machines(self.path):
                self._claim(self.path.with_name(f"{self.path.name}.holder"))
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()} on {platform.node()}\n".encode(), 0)
            fault("lock.taken")
        except OSError as error:  # full disk: nobody could say who holds it
            self._unclaim()
            os.close(descriptor)
            raise refused(self.path, error, "locked") from error
        except BaseException:
            self._unclaim()
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return self

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 200).decode("utf-8", "replace").strip() or "unknown"
            raise FolderBusy(
                f"{self.path}: locked by process {holder}, which writes there; wait for it, stop it, "
                "or use another folder"
            ) from None
        except OSError as error:
            raise CheckpointError(f"{self.path}: this file system has no working locks: {error}") from error

    def _claim(self, holder: Path) -> None:
        """Note this machine as the holder, unless another one is. Our own may be left by a process that was killed."""
        if not create_once(holder, platform.node() + "\n"):
            with contextlib.suppress(FileNotFoundError):
                machine = holder.read_text(encoding="utf-8", errors="replace").strip()
                if machine != platform.node():
                    raise FolderBusy(
                        f"{self.path}: locked by machine {machine or 'unknown'}; the locks of this network folder do "
                        f"not reach other machines. Wait for its run; if it crashed, remove {holder}"
                    )
        self._holder = holder

    def _unclaim(self) -> None:
        if self._holder is not None:
            with contextlib.suppress(OSError):
                self._holder.unlink(missing_ok=True)
            self._holder = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._descriptor is not None:
            self._unclaim()
            with contextlib.suppress(OSError):  # of a disk that refuses; the lock is released all the same
                os.ftruncate(self._descriptor, 0)
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # children that inherited the descriptor lose it as well
            os.close(self._descriptor)
            self._descriptor = None
