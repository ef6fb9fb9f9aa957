"""Opening files for writing in folders that others may write into: no links are followed, owners are checked.

with open(path, "a", opener=own_file) as file: ...
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from rl_core.errors import CheckpointError, SettingsError

__all__ = ["cache_folder", "own_file", "plain_file"]

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_folder(name: str) -> Path:
    """Folder `name` among the caches of the user. Raises: SettingsError for a user without a home."""
    place = os.environ.get("XDG_CACHE_HOME")
    try:
        caches = Path(place) if place else Path.home() / ".cache"
    except RuntimeError:
        raise SettingsError("this user has no home folder for caches; set HOME or XDG_CACHE_HOME") from None
    return caches / "posttrain" / name


def own_file(path: str | os.PathLike[str], flags: int, mode: int = 0o644) -> int:
    """Descriptor of a regular file, as `os.open` gives it; the `opener` of the built-in `open`.

    A symbolic link, device or pipe under that name is refused before anything is cut off or written. Where others may
    write into the folder, so is a file that belongs neither to this user nor to the folder's owner; where everybody
    may, so is one that has another name elsewhere.
    Raises: CheckpointError for those; OSError as `os.open`.
    """
    path = os.fspath(path)
    careful = (flags & ~os.O_TRUNC) | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe would wait for a reader
    try:
        descriptor = os.open(path, careful, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckpointError(
                f"{path}: is a symbolic link, and nothing is written through links; remove it"
            ) from None
        if error.errno == errno.ENXIO:
            raise CheckpointError(f"{path}: is no regular file; remove it") from None
        raise
    try:
        _check(path, os.fstat(descriptor))
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def plain_file(path: str | os.PathLike[str], flags: int) -> int:
    """Descriptor of a regular file for reading; the `opener` of the built-in `open`.

    Raises: OSError, also for a pipe, which would be waited for, and a device, which may never end.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is no regular file", os.fspath(path))
    return descriptor


def _check(path: str, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path}: is no regular file; remove it")
    folder = os.stat(os.path.dirname(path) or ".")
    if folder.st_mode & stat.S_IWOTH and found.st_nlink > 1:  # not for groups: snapshots are made of hard links
        raise CheckpointError(
            f"{path}: has another name elsewhere (a hard link), in a folder that everybody may write into; remove it"
        )
    if folder.st_mode & _OTHERS_WRITE and found.st_uid not in (os.geteuid(), folder.st_uid):
        raise CheckpointError(
            f"{path}: belongs to user {found.st_uid}, in a folder that others may write into; remove it, or use "
            "another folder"
        )
