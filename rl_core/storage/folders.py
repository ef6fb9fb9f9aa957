"""Folder operations that survive crashes: publish, replace, rename, link, remove. Every rename is durable on return.

Publishing writes the files into a temporary folder, syncs them, adds a manifest (`rl_core/storage/manifest.py`) and
renames the folder; readers verify it by the manifest. Replacing swaps a folder that the user names: readers see the
old or the new one, never a mixture. Links are hard links where the file system supports them, otherwise copies.
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
    is_active_temporary,
    is_process_alive,
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

TRASH_PREFIX = ".trash-"  # prefix of a folder that is being removed

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # linux/fs.h

_open_publications: set[Path] = set()  # folders that this process is publishing
_publications_lock = threading.Lock()


def _find_free_name(path: Path) -> Path:
    """Return `path` with the first number appended that is not taken."""
    names = (path.with_name(f"{path.name}-{number}") for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


def move_aside(path: Path, name: str) -> Path:
    """Rename a damaged file or folder to `name` plus a number, so that it can be examined; return the new path.

    Raises: CheckpointError for a disk error.
    """
    aside = _find_free_name(path.with_name(name))
    try:
        os.rename(path, aside)
        fsync_path(path.parent)
    except OSError as error:
        raise write_error(path, error, "set aside") from error
    return aside


def move_folder(path: Path, final: Path) -> None:
    """Rename a folder durably to a free name in the same parent folder.

    Raises: CheckpointError if the name is taken, or for a disk error.
    """
    if final.exists() or final.is_symlink():
        raise CheckpointError(f"{final}: exists already")
    try:
        os.rename(path, final)
        fsync_path(final.parent)
    except OSError as error:
        raise write_error(path, error, "renamed") from error


def remove_folder(path: Path | str) -> None:
    """Delete a folder. It is renamed first, so that readers see all of it or nothing, even after a crash.

    A missing folder is fine. Raises: CheckpointError for a disk error.
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


def _is_leftover(path: Path, locked: bool) -> bool:
    """Return whether a path is an unfinished deletion or the temporary of a dead process."""
    if path.name.startswith(TRASH_PREFIX):
        return True
    owner = parse_temporary_owner(path.name)
    if owner is None or is_active_temporary(path):
        return False
    if locked:
        return True
    host, pid = owner
    is_local = host is None or host == platform.node()
    return is_local and (pid == os.getpid() or not is_process_alive(pid))


def clear_leftovers(parent: Path | str, *, locked: bool = False) -> list[str]:
    """Delete temporaries of dead processes and unfinished deletions in `parent`; return their names.

    Temporaries of other machines stay, because this machine cannot tell whether their process lives.
    Args:
        locked: the caller holds the folder's lock, so every temporary is dead even if its pid was reused.
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


def write_folder_file(path: Path, data: bytes) -> None:
    """Write a file of a folder that is being published, without sync (`seal_folder` syncs) and never through a link."""
    path.unlink(missing_ok=True)
    with open(path, "xb", opener=open_owned_file) as file:
        file.write(data)


def fsync_tree(path: Path | str) -> None:
    """Flush a file, or a folder with all files and folders in it, to the disk."""
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
    """Add a manifest to a written folder and rename it, so that it is complete before its final name exists.

    Steps: sync every file and inner folder, write and sync the manifest, sync the folder, rename, sync the parent.
    `folder` and `final` must have the same parent; the caller holds the lock.
    Args:
        extra: additional entries of the manifest.
        digests: SHA-256 of files, computed by the caller in memory: of the intended bytes, not of those on the disk.
    Returns: the manifest.
    Raises: CheckpointError if `final` exists, or for a disk error.
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
        # rename() would silently replace an empty folder.
        if final.exists() or final.is_symlink():
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
    """Create a folder that appears under its name only when complete (see `seal_folder`).

    Args:
        final: path of the folder; must not exist.
        write: writes the files into a folder; may return SHA-256 by name for files that it hashed in memory.
        extra_manifest: additional entries of the manifest.
    Returns: the manifest.
    Raises: CheckpointError if `final` exists or for a disk error; FolderBusy if another thread is publishing it. The
        temporary folder is removed in every case.
    """
    final = Path(final)
    if final.exists():
        raise CheckpointError(f"{final}: exists already; a published folder is never written again")
    with _publications_lock:
        if final in _open_publications:
            raise FolderBusy(f"{final}: another thread of this process is publishing it")
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
        delete_path(temporary)  # left by a dead process with our pid
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
    """Return the OSError behind a safetensors error such as "I/O error: No space left on device (os error 28)"."""
    match = re.search(r"\(os error (\d+)\)", str(error))
    if match is None:
        return OSError(str(error))
    code = int(match[1])
    return OSError(code, os.strerror(code))


def link_tree(source: Path, target: Path) -> None:
    """Give a file or a folder's files a second name, `target`."""
    if source.is_dir():
        shutil.copytree(source, target, copy_function=link_file)
    else:
        link_file(source, target)


def link_file(source: str | Path, target: str | Path) -> None:
    """Give a file a second name: a hard link where possible, otherwise a copy."""
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)


def link_folder_synced(source: Path, target: Path) -> None:
    """Link the current files of a folder durably under a second, free name.

    Files that are later replaced in `source`, as published files are, stay unchanged in `target`.
    Raises: CheckpointError for a disk error.
    """
    make_folder(target.parent)
    try:
        link_tree(source, target)
        fsync_tree(target)
        fsync_path(target.parent)
    except OSError as error:
        raise write_error(target, error, "made") from error


def replace_folder(
    final: Path | str,
    write: Callable[[Path], None],
    extra_manifest: Mapping[str, Any] | None = None,
) -> None:
    """Publish a folder (see `publish_folder`), replacing an empty folder or an earlier version under that name.

    The swap is a single step. On file systems without an atomic exchange (NFS), a crash in between leaves the old
    folder under a name that begins with `.trash-`.
    Args:
        write: writes the files into a folder.
    Raises: CheckpointError for a disk error, or if the folder holds files that are neither in the new version nor
        listed in its manifest, because they belong to somebody else.
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
    """Refuse to replace a folder that holds more than an earlier version of itself."""
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
    """Rename `complete` to `final`. An old folder there gets the name of `complete`, or is removed."""
    if not final.is_dir() or not any(final.iterdir()):
        os.rename(complete, final)  # replaces an empty folder
        return
    exchange = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    code = errno.ENOSYS
    if exchange is not None:
        old, new = os.fsencode(complete), os.fsencode(final)
        if exchange(_AT_FDCWD, old, _AT_FDCWD, new, _RENAME_EXCHANGE) == 0:
            return
        code = ctypes.get_errno()
    if code not in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        raise OSError(code, os.strerror(code))
    remove_folder(final)
    os.rename(complete, final)
