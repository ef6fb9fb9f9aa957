"""Folders that go: renamed, set aside or removed, and what dead processes have left.

Every rename is on the disk when the function returns.

Atomic publishing of folders: write, sync, manifest, rename.

A published folder holds its files and a manifest (`rl_core/storage/manifest.py`), by which readers verify it.

Files and folders under another name: hard links where the file system has them, else copies.

Replacing a folder that a user names, whole: readers find the old one or the new one, never a mixture.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import json
import os
import platform
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from rl_core.errors import CheckpointError, CorruptError, FolderBusy
from rl_core.storage.atomic_files import (
    fsync_path,
    is_own_temporary,
    make_folder,
    open_owned_file,
    parse_temporary_owner,
    reserve_temporary,
    write_error,
)
from rl_core.storage.faults import inject_fault
from rl_core.storage.manifest import (
    MANIFEST_FILE,
    build_manifest,
    list_content_names,
    read_manifest,
)

TRASH_PREFIX = ".trash-"  # begins the name of a folder that is being removed


def _find_free_name(path: Path) -> Path:
    """`path` with the first number behind it that is not taken."""
    names = (path.with_name(f"{path.name}-{number}") for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


def move_aside(path: Path, name: str) -> Path:
    """Rename a damaged file or folder to `name` with a number behind it, for people to look at; returns the new path.

    Raises: CheckpointError where the disk refuses.
    """
    aside = _find_free_name(path.with_name(name))
    try:
        os.rename(path, aside)
        fsync_path(path.parent)
    except OSError as error:
        raise write_error(path, error, "set aside") from error
    return aside


def move_folder(path: Path, final: Path) -> None:
    """Rename a folder to a name in the same folder that is free; on the disk when this returns.

    Raises: CheckpointError if the name is taken, or the disk refuses.
    """
    if final.exists() or final.is_symlink():
        raise CheckpointError(f"{final}: exists already")
    try:
        os.rename(path, final)
        fsync_path(final.parent)
    except OSError as error:
        raise write_error(path, error, "renamed") from error


def remove_folder(path: Path | str) -> None:
    """Delete a folder: renamed first, so that a reader sees all of it or nothing, after a crash too.

    One that is not there is fine. Raises: CheckpointError where the disk refuses.
    """
    path = Path(path)
    trash = _find_free_name(path.with_name(f"{TRASH_PREFIX}{path.name}-{os.getpid()}"))
    try:
        os.rename(path, trash)
        fsync_path(path.parent)
    except FileNotFoundError:
        return
    except OSError as error:
        raise write_error(path, error, "removed") from error
    inject_fault("prune.renamed")
    shutil.rmtree(trash, ignore_errors=True)
    inject_fault("prune.done")


def _is_process_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _is_leftover(path: Path, locked: bool) -> bool:
    if path.name.startswith(TRASH_PREFIX):
        return True
    owner = parse_temporary_owner(path.name)
    if owner is None:
        return False
    host, pid = owner
    here = host is None or host == platform.node()
    return not is_own_temporary(path) and (
        locked or (here and (pid == os.getpid() or not _is_process_alive(pid)))
    )


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
            delete_path(path)
            inject_fault("leftover.removed")
            removed.append(path.name)
    return removed


def delete_path(path: Path) -> None:
    """Delete a folder, a file, or a link (never its target)."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


_open_publications: set[Path] = set()  # folders that this process publishes
_publications_lock = threading.Lock()


def write_folder_file(path: Path, data: bytes) -> None:
    """Write a file of a folder that is being published: sealing the folder syncs it. Nothing is written through."""
    path.unlink(missing_ok=True)
    with open(path, "xb", opener=open_owned_file) as file:
        file.write(data)


def fsync_tree(path: Path | str) -> None:
    """Force a file, or a folder's files and folders with their entries, to the disk."""
    path = Path(path)
    if path.is_dir():
        for root, _, names in os.walk(path):
            for name in names:
                fsync_path(Path(root, name))
            fsync_path(root)
    else:
        fsync_path(path)


def seal_folder(
    folder: Path,
    final: Path,
    extra: Mapping[str, Any] | None = None,
    *,
    digests: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Add a manifest to a written folder and rename it; it is complete before its final name exists.

    Steps: sync every file and inner folder, write and sync the manifest, sync the folder, rename, sync the parent.
    `folder` and `final` must lie in the same folder; the caller holds the lock.
    Args:
        extra: what else the manifest says.
        digests: SHA-256 of files that the caller knows from memory: what was meant to be written, not what was.
    Returns: the manifest.
    Raises: CheckpointError if `final` exists, or the disk refuses.
    """
    assert folder.parent == final.parent, "a rename between folders is not synced"
    try:
        manifest = build_manifest(folder, final, extra, digests)
        for inner in folder.iterdir():
            fsync_tree(inner)
        inject_fault("publish.written")
        write_folder_file(folder / MANIFEST_FILE, json.dumps(manifest, indent=2).encode())
        fsync_path(folder / MANIFEST_FILE)
        fsync_path(folder)
        inject_fault("publish.manifest")
        if final.exists() or final.is_symlink():  # rename() would silently replace an empty folder
            raise CheckpointError(
                f"{final}: exists already; a published folder is never written again"
            )
        os.rename(folder, final)
        inject_fault("publish.renamed")
        fsync_path(final.parent)
        inject_fault("publish.done")
    except OSError as error:
        raise write_error(final, error) from error
    return manifest


def publish_folder(
    final: Path | str,
    write: Callable[[Path], Mapping[str, str] | None],
    extra_manifest: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A new folder that appears under its name only when complete (see `seal_folder`).

    Args:
        final: its name; must not exist.
        write: writes the files into the folder it is given; may return SHA-256 by name for those it hashed in memory.
        extra_manifest: what else the manifest says.
    Returns: the manifest.
    Raises: CheckpointError if `final` exists or the disk refuses; FolderBusy if another thread publishes it. The
        temporary folder is removed whatever is raised.
    """
    final = Path(final)
    if final.exists():
        raise CheckpointError(f"{final}: exists already; a published folder is never written again")
    with _publications_lock:
        if final in _open_publications:
            raise FolderBusy(f"{final}: another thread of this process publishes it")
        _open_publications.add(final)
    try:
        make_folder(final.parent)
        with reserve_temporary(final) as temporary:
            return _write_and_seal(temporary, final, write, extra_manifest)
    finally:
        with _publications_lock:
            _open_publications.discard(final)


def _write_and_seal(
    temporary: Path,
    final: Path,
    write: Callable[[Path], Mapping[str, str] | None],
    extra_manifest: Mapping[str, Any] | None,
) -> dict[str, Any]:
    try:
        delete_path(temporary)  # of a dead process that had our number
        temporary.mkdir()
        inject_fault("publish.begin")
        digests = write(temporary)
        return seal_folder(temporary, final, extra_manifest, digests=digests)
    except OSError as error:
        raise write_error(final, error) from error
    except SafetensorError as error:
        raise write_error(final, _extract_disk_error(error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _extract_disk_error(error: SafetensorError) -> OSError:
    """The disk's error in the text of safetensors' own, "I/O error: No space left on device (os error 28)"."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(found[1]), os.strerror(int(found[1]))) if found else OSError(str(error))


def link_tree(source: Path, target: Path) -> None:
    """The file or folder `source` under another name."""
    if source.is_dir():
        shutil.copytree(source, target, copy_function=link_file)
    else:
        link_file(source, target)


def link_file(source: str | Path, target: str | Path) -> None:
    """The file `source` under another name."""
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)


def link_folder_synced(source: Path, target: Path) -> None:
    """A folder's present files under another name, too, which is free; on the disk when the call returns.

    Files that are replaced in `source` afterwards, as published ones are, stay in `target` as they were.
    Raises: CheckpointError where the disk refuses.
    """
    make_folder(target.parent)
    try:
        link_tree(source, target)
        fsync_tree(target)
        fsync_path(target.parent)
    except OSError as error:
        raise write_error(target, error, "made") from error


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
    with reserve_temporary(final) as temporary:
        complete = temporary / final.name
        try:
            publish_folder(complete, lambda folder: write(folder), extra_manifest)
            _refuse_foreign_files(final, complete)
            _swap_folders(complete, final)
            fsync_path(final.parent)
        except OSError as error:
            raise write_error(final, error) from error
        finally:
            remove_folder(temporary)


def _refuse_foreign_files(final: Path, complete: Path) -> None:
    """Refuse to replace a folder that holds more than an earlier version of it."""
    if not final.is_dir():
        return
    try:
        listed = set(read_manifest(final)["files"])
    except CorruptError:
        listed = set()
    foreign = sorted(list_content_names(final) - list_content_names(complete) - listed)
    if foreign:
        raise CheckpointError(
            f"{final}: holds {foreign[0]}, which saving would remove; name a new or empty folder"
        )


def _swap_folders(complete: Path, final: Path) -> None:
    """Give `complete` the name `final`; what had it, if anything, gets the name of `complete`, or is removed."""
    if not final.is_dir() or not any(final.iterdir()):
        os.rename(complete, final)  # replaces an empty folder
        return
    libc = ctypes.CDLL(None, use_errno=True)
    exchange = getattr(libc, "renameat2", None)
    names = os.fsencode(complete), os.fsencode(final)
    if (
        exchange is not None
        and exchange(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0
    ):
        return
    code = ctypes.get_errno() if exchange is not None else errno.ENOSYS
    if code not in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        raise OSError(code, os.strerror(code))
    remove_folder(final)
    os.rename(complete, final)
