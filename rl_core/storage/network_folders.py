"""Network folders: which file system a path lies on, and whether its locks reach other machines."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

__all__ = ["locks_reach_other_machines"]

# Reached through a server by other machines too. Anything else is this machine's own, and so are its locks.
_NETWORK = re.compile(r"nfs4?|cifs|smb3|smbfs|9p|virtiofs|lustre|afs|beegfs|gpfs|glusterfs|fuse(\..+)?|fuseblk")
_LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs", "fuse.lxcfs", "fuse.gvfsd-fuse", "fuse.portal", "fuseblk"})


def locks_reach_other_machines(path: Path | str, mounts: str | None = None) -> bool:
    """False = the path lies on a network folder whose flocks this machine alone sees.

    NFS sends flocks to the server (Linux 2.6.12 and newer) unless mounted with `nolock` or `local_lock`; SMB does
    unless mounted with `nobrl`; Lustre with `flock` alone; of FUSE nothing is known.
    Args:
        mounts: text of /proc/self/mountinfo; None = this machine's.
    """
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:  # another system than Linux: nothing can be said
            return True
    kind, options = _mount_of(os.path.realpath(path), mounts)
    if not _NETWORK.fullmatch(kind) or kind in _LOCAL_FUSE:
        return True
    if kind in ("nfs", "nfs4"):
        return "nolock" not in options and not {"local_lock=flock", "local_lock=all"} & set(options)
    if kind in ("cifs", "smb3"):
        return "nobrl" not in options
    return kind in ("gpfs", "afs") or (kind == "lustre" and "flock" in options)


def _mount_of(path: str, mounts: str) -> tuple[str, Sequence[str]]:
    """(file system, mount options) of the mount that a path lies on; ("", ()) where there is none."""
    best = -1
    found: tuple[str, Sequence[str]] = ("", ())
    for line in mounts.splitlines():
        # 36 35 98:0 / /mnt rw,noatime shared:1 - nfs4 server:/export rw,vers=4.2,local_lock=none
        left, _, right = line.partition(" - ")
        fields, kinds = left.split(), right.split()
        if len(fields) < 6 or len(kinds) < 3:
            continue
        place = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        inside = path == place or path.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= best:  # the last one of equals lies on top
            best, found = len(place), (kinds[0], [*fields[5].split(","), *kinds[2].split(",")])
    return found
