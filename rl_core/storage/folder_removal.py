"""Folders that go: renamed, set aside or removed, and what dead processes have left.

Every rename is on the disk when the function returns.
"""

from __future__ import annotations

import itertools
import os
import platform
import shutil
from pathlib import Path

from rl_core.errors import CheckpointError
from rl_core.storage.faults import fault
from rl_core.storage.single_files import is_ours, owner_of_temporary, refused, sync

__all__ = ["TRASH", "clear_leftovers", "delete", "move_folder", "remove_folder", "set_aside"]

TRASH = ".trash-"  # begins the name of a folder that is being removed


def _free_name(path: Path) -> Path:
    """`path` with the first number behind it that is not taken."""
    names = (path.with_name(f"{path.name}-{number}") for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


def set_aside(path: Path, name: str) -> Path:
    """Rename a damaged file or folder to `name` with a number behind it, for people to look at; returns the new path.

    Raises: CheckpointError where the disk refuses.
    """
    aside = _free_name(path.with_name(name))
    try:
        os.rename(path, aside)
        sync(path.parent)
    except OSError as error:
        raise refused(path, error, "set aside") from error
    return aside


def move_folder(path: Path, final: Path) -> None:
    """Rename a folder to a name in the same folder that is free; on the disk when this returns.

    Raises: CheckpointError if the name is taken, or the disk refuses.
    """
    if final.exists() or final.is_symlink():
        raise CheckpointError(f"{final}: exists already")
    try:
        os.rename(path, final)
        sync(final.parent)
    except OSError as error:
        raise refused(path, error, "renamed") from error


def remove_folder(path: Path | str) -> None:
    """Delete a folder: renamed first, so that a reader sees all of it or nothing, after a crash too.

    One that is not there is fine. Raises: CheckpointError where the disk refuses.
    """
    path = Path(path)
    trash = _free_name(path.with_name(f"{TRASH}{path.name}-{os.getpid()}"))
    try:
        os.rename(path, trash)
        sync(path.parent)
    except FileNotFoundError:
        return
    except OSError as error:
        raise refused(path, error, "removed") from error
    fault("prune.renamed")
    shutil.rmtree(trash, ignore_errors=True)
    fault("prune.done")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _is_leftover(path: Path, locked: bool) -> bool:
    if path.name.startswith(TRASH):
        return True
    owner = owner_of_temporary(path.name)
    if owner is None:
        return False
    host, pid = owner
    here = host is None or host == platform.node()
    return not is_ours(path) and (locked or (here and (pid == os.getpid() or not _alive(pid))))


def clear_leftovers(parent: Path | str, *, locked: bool = False) -> list[str]:
    """Delete temporaries of dead processes and unfinished deletions in `parent`; returns their names.

    Those of another machine are left alone, as nothing tells here that their process is gone.
    `locked` = the caller holds the folder's lock, so every temporary there is dead, its pid reused or not.
    """
    removed: list[str] = []
    if not Path(parent).is_dir():
        return removed
    for path in sorted(Path(parent).iterdir()):
        if _is_leftover(path, locked):
            delete(path)
            fault("leftover.removed")
            removed.append(path.name)
    return removed


def delete(path: Path) -> None:
    """Delete a folder, a file, or a link (never its target)."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
