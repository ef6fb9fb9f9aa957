"""Atomic publishing of folders: write, sync, manifest, rename.

A published folder holds its files and a manifest (`rl_core/storage/manifest.py`), by which readers verify it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from rl_core.errors import CheckpointError, FolderBusy
from rl_core.storage.faults import fault
from rl_core.storage.folder_removal import delete
from rl_core.storage.manifest import MANIFEST, new_manifest
from rl_core.storage.own_files import own_file
from rl_core.storage.single_files import make_folder, refused, sync, temporary_beside

__all__ = ["publish_folder", "put_bytes", "seal_folder", "sync_tree"]

_publishing: set[Path] = set()  # folders that this process publishes
_publishing_guard = threading.Lock()


def put_bytes(path: Path, data: bytes) -> None:
    """Write a file of a folder that is being published: sealing the folder syncs it. Nothing is written through."""
    path.unlink(missing_ok=True)
    with open(path, "xb", opener=own_file) as file:
        file.write(data)


def sync_tree(path: Path | str) -> None:
    """Force a file, or a folder's files and folders with their entries, to the disk."""
    path = Path(path)
    if path.is_dir():
        for root, _, names in os.walk(path):
            for name in names:
                sync(Path(root, name))
            sync(root)
    else:
        sync(path)


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
        manifest = new_manifest(folder, final, extra, digests)
        for inner in folder.iterdir():
            sync_tree(inner)
        fault("publish.written")
        put_bytes(folder / MANIFEST, json.dumps(manifest, indent=2).encode())
        sync(folder / MANIFEST)
        sync(folder)
        fault("publish.manifest")
        if final.exists() or final.is_symlink():  # rename() would silently replace an empty folder
            raise CheckpointError(f"{final}: exists already; a published folder is never written again")
        os.rename(folder, final)
        fault("publish.renamed")
        sync(final.parent)
        fault("publish.done")
    except OSError as error:
        raise refused(final, error) from error
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
    with _publishing_guard:
        if final in _publishing:
            raise FolderBusy(f"{final}: another thread of this process publishes it")
        _publishing.add(final)
    try:
        make_folder(final.parent)
        with temporary_beside(final) as temporary:
            return _publish(temporary, final, write, extra_manifest)
    finally:
        with _publishing_guard:
            _publishing.discard(final)


def _publish(
    temporary: Path,
    final: Path,
    write: Callable[[Path], Mapping[str, str] | None],
    extra_manifest: Mapping[str, Any] | None,
) -> dict[str, Any]:
    try:
        delete(temporary)  # of a dead process that had our number
        temporary.mkdir()
        fault("publish.begin")
        digests = write(temporary)
        return seal_folder(temporary, final, extra_manifest, digests=digests)
    except OSError as error:
        raise refused(final, error) from error
    except SafetensorError as error:
        raise refused(final, _disk_error(error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _disk_error(error: SafetensorError) -> OSError:
    """The disk's error in the text of safetensors' own, "I/O error: No space left on device (os error 28)"."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(found[1]), os.strerror(int(found[1]))) if found else OSError(str(error))
