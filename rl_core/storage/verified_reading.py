"""Verification of files that a library opens by itself, such as the weights of a published model folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rl_core.errors import CorruptError
from rl_core.storage.manifest import MANIFEST, digest_file, read_manifest

__all__ = ["verified"]


@contextlib.contextmanager
def verified(folder: Path | str, wanted: Callable[[str], bool] = lambda name: True) -> Iterator[None]:
    """Verify the files of a folder that has a manifest, or lies in one that has, and that none changes in the block.

    transformers reads paths, not bytes, so the file is hashed first, and afterwards it has to be the same one (inode,
    size, time of change) as when hashing began. A folder without a manifest of ours is taken as it is.
    Args:
        wanted: names of the files that are read in the block.
    Raises: CorruptError naming the file.
    """
    folder = Path(folder)
    entries = {path: entry for path, entry in _listed(folder).items() if wanted(path.name)}
    before = {path: _stamp(path) for path in entries}
    for path, entry in entries.items():
        if before[path][1] != entry["size"] or digest_file(path) != entry["sha256"]:
            raise CorruptError(
                f"{path}: differs from the manifest of its folder: damaged, or changed since it was saved. "
                f"If that was meant, remove {MANIFEST}"
            )
    yield
    for path, stamp in before.items():
        if _stamp(path) != stamp:
            raise CorruptError(f"{path}: was changed while it was read; nothing may write into a published folder")


def _listed(folder: Path) -> dict[Path, Any]:
    """Files below `folder` with their entries in its manifest, or in that of the folder around it; {} without one."""
    for holder in (folder, folder.parent):
        with contextlib.suppress(OSError):
            if b'"manifest_digest"' in (holder / MANIFEST).read_bytes():  # other tools have a manifest.json too
                files = {holder / name: entry for name, entry in read_manifest(holder)["files"].items()}
                return {path: entry for path, entry in files.items() if folder in path.parents}
    return {}


def _stamp(path: Path) -> tuple[int, int, int]:
    """Identity, size and time of change. Not the inode's own change: a new hard link is one."""
    try:
        found = path.stat()
    except OSError as error:
        raise CorruptError(f"{path}: cannot be read: {error.strerror or error}") from error
    return found.st_ino, found.st_size, found.st_mtime_ns
