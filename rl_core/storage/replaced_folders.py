"""Replacing a folder that a user names, whole: readers find the old one or the new one, never a mixture."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl_core.errors import CheckpointError, CorruptError
from rl_core.storage.folder_removal import remove_folder
from rl_core.storage.folders import publish_folder
from rl_core.storage.manifest import content_names, read_manifest
from rl_core.storage.single_files import refused, sync, temporary_beside

__all__ = ["replace_folder"]

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # linux/fs.h


def replace_folder(
    final: Path | str,
    write: Callable[[Path], None],
    extra_manifest: Mapping[str, Any] | None = None,
) -> None:
    """Publish a folder (see `publish_folder`) under a name that may be taken by an empty one, or by an earlier version.

    The new folder takes the place of the old one in one step; where the file system has none (NFS), a crash in between
    leaves the old one under a name that begins with `.trash-`.
    Args:
        write: writes the files into the folder it is given.
    Raises: CheckpointError if the disk refuses, or the folder holds files that are neither written anew nor listed in
        its manifest: somebody else's.
    """
    final = Path(os.path.abspath(final))
    if final.exists() and not final.is_dir():
        raise CheckpointError(f"{final}: cannot be written: it is a file; name a folder")
    with temporary_beside(final) as temporary:
        complete = temporary / final.name
        try:
            publish_folder(complete, lambda folder: write(folder), extra_manifest)
            _refuse_foreign(final, complete)
            _take_place(complete, final)
            sync(final.parent)
        except OSError as error:
            raise refused(final, error) from error
        finally:
            remove_folder(temporary)


def _refuse_foreign(final: Path, complete: Path) -> None:
    """Refuse to replace a folder that holds more than an earlier version of it."""
    if not final.is_dir():
        return
    try:
        listed = set(read_manifest(final)["files"])
    except CorruptError:
        listed = set()
    foreign = sorted(content_names(final) - content_names(complete) - listed)
    if foreign:
        raise CheckpointError(f"{final}: holds {foreign[0]}, which saving would remove; name a new or empty folder")


def _take_place(complete: Path, final: Path) -> None:
    """Give `complete` the name `final`; what had it, if anything, gets the name of `complete`, or is removed."""
    if not final.is_dir() or not any(final.iterdir()):
        os.rename(complete, final)  # replaces an empty folder
        return
    libc = ctypes.CDLL(None, use_errno=True)
    exchange = getattr(libc, "renameat2", None)
    names = os.fsencode(complete), os.fsencode(final)
    if exchange is not None and exchange(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return
    code = ctypes.get_errno() if exchange is not None else errno.ENOSYS
    if code not in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        raise OSError(code, os.strerror(code))
    remove_folder(final)
    os.rename(complete, final)
