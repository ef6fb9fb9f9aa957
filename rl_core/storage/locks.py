"""Exclusive folder locks, released by the kernel when the process ends, and detection of network folders."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import re
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rl_core.errors import CheckpointError, FolderBusy
from rl_core.storage.atomic_files import create_file_once, make_folder, open_owned_file, write_error
from rl_core.storage.faults import inject_fault

# File systems that other machines can access through a server. All others, and their locks, are local.
_NETWORK_FILE_SYSTEMS = re.compile(
    r"nfs4?|cifs|smb3|smbfs|9p|virtiofs|lustre|afs|beegfs|gpfs|glusterfs|fuse(\..+)?|fuseblk"
)
_LOCAL_FUSE_FILE_SYSTEMS = frozenset(
    {"fuse.fuse-overlayfs", "fuse.lxcfs", "fuse.gvfsd-fuse", "fuse.portal", "fuseblk"}
)


def has_cross_machine_locks(path: Path | str, mounts: str | None = None) -> bool:
    """Return False if the path lies on a network folder whose flocks other machines do not see.

    NFS sends flocks to the server (Linux 2.6.12 and newer) unless mounted with `nolock` or `local_lock`; SMB does
    unless mounted with `nobrl`; Lustre only if mounted with `flock`. For FUSE nothing is known, so False is returned.
    Args:
        mounts: text of /proc/self/mountinfo; None = read that of this machine.
    """
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text(
                encoding="utf-8", errors="surrogateescape"
            )
        except OSError:  # not Linux, so it cannot be determined
            return True
    kind, options = _find_mount(os.path.realpath(path), mounts)
    if not _NETWORK_FILE_SYSTEMS.fullmatch(kind) or kind in _LOCAL_FUSE_FILE_SYSTEMS:
        return True
    if kind in ("nfs", "nfs4"):
        return "nolock" not in options and not {"local_lock=flock", "local_lock=all"} & set(options)
    if kind in ("cifs", "smb3"):
        return "nobrl" not in options
    return kind in ("gpfs", "afs") or (kind == "lustre" and "flock" in options)


def _find_mount(path: str, mounts: str) -> tuple[str, Sequence[str]]:
    """Return (file system, mount options) of the mount that a path lies on; ("", ()) if there is none."""
    longest = -1
    mount: tuple[str, Sequence[str]] = ("", ())
    for line in mounts.splitlines():
        # Example: 36 35 98:0 / /mnt rw,noatime shared:1 - nfs4 server:/export rw,vers=4.2,local_lock=none
        left, _, right = line.partition(" - ")
        fields, source_fields = left.split(), right.split()
        if len(fields) < 6 or len(source_fields) < 3:
            continue
        mount_point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        is_inside = path == mount_point or path.startswith(mount_point.rstrip("/") + "/")
        # Of several mounts on the same path, the last one is on top.
        if is_inside and len(mount_point) >= longest:
            longest = len(mount_point)
            options = [*fields[5].split(","), *source_fields[2].split(",")]
            mount = (source_fields[0], options)
    return mount


class FolderLock:
    """Exclusive lock of a folder (created if absent), held by this process within the `with` block.

    The lock is the file `.lock` in the folder; a path that ends in `.lock` is the lock file itself. It is a flock: the
    kernel frees it when the holder dies, so a stale lock cannot exist. The file stays.

    On a network folder whose locks do not reach other machines, a second file (`.lock.holder`) names the machine that
    holds the lock. Other machines refuse to lock while it exists. They cannot know whether its process lives, so after
    a crash of that machine the user has to remove the file.
    """

    def __init__(self, path: Path | str, wait_s: float = 0.0) -> None:
        """Configure the lock without acquiring it.

        Args:
            wait_s: seconds to wait for another holder; 0 = refuse immediately.
        """
        path = Path(path)
        self.path = path if path.name.endswith(".lock") else path / ".lock"
        self.wait_s = wait_s
        self._descriptor: int | None = None
        self._holder_file: Path | None = None  # the second file, if one is needed

    @property
    def is_held(self) -> bool:
        """True if this object holds the lock."""
        return self._descriptor is not None

    def __enter__(self) -> FolderLock:
        deadline = time.monotonic() + self.wait_s
        while True:
            try:
                return self._acquire_lock()
            except FolderBusy:
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    raise
                time.sleep(min(1.0, remaining_s))

    def _acquire_lock(self) -> FolderLock:
        make_folder(self.path.parent)
        try:
            descriptor = open_owned_file(self.path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise write_error(self.path, error, "locked") from error
        try:
            self._lock_descriptor(descriptor)
            if not has_cross_machine_locks(self.path):
                self._claim_holder_file(self.path.with_name(f"{self.path.name}.holder"))
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()} on {platform.node()}\n".encode(), 0)
            inject_fault("lock.taken")
        except OSError as error:  # on a full disk, the holder could not be recorded
            self._release_holder_file()
            os.close(descriptor)
            raise write_error(self.path, error, "locked") from error
        except BaseException:
            self._release_holder_file()
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return self

    def _lock_descriptor(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 200).decode("utf-8", "replace").strip() or "unknown"
            raise FolderBusy(
                f"{self.path}: locked by process {holder}, which is writing there; wait for it, stop it, "
                "or use another folder"
            ) from None
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: this file system has no working locks: {error}"
            ) from error

    def _claim_holder_file(self, holder: Path) -> None:
        """Record this machine as the holder unless another machine is; a killed process may have left the record."""
        if not create_file_once(holder, platform.node() + "\n"):
            with contextlib.suppress(FileNotFoundError):
                machine = holder.read_text(encoding="utf-8", errors="replace").strip()
                if machine != platform.node():
                    raise FolderBusy(
                        f"{self.path}: locked by machine {machine or 'unknown'}; the locks of this network folder do "
                        f"not reach other machines. Wait for its run; if it crashed, remove {holder}"
                    )
        self._holder_file = holder

    def _release_holder_file(self) -> None:
        if self._holder_file is not None:
            with contextlib.suppress(OSError):
                self._holder_file.unlink(missing_ok=True)
            self._holder_file = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._descriptor is not None:
            self._release_holder_file()
            with contextlib.suppress(OSError):  # release the lock despite a disk error
                os.ftruncate(self._descriptor, 0)
            # Child processes that inherited the descriptor lose the lock too.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None
