"""Manifests of folders: digests of files and of folders, and verification by readers.

manifest.json holds the format version, size and SHA-256 of every file, entries added by the publisher, and a digest of
the manifest itself. Names that begin with a dot are not part of a folder's content.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from rl_core.errors import CheckpointError, CorruptError
from rl_core.storage.atomic_files import REMEDIES

FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
# A missing or unreadable file is damage; a file that is temporarily unreadable is not.
_DAMAGE_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO)


def digest_bytes(data: bytes) -> str:
    """Return the SHA-256 as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def digest_file(path: Path | str) -> str:
    """Return the SHA-256 of a file as 64 hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _list_content(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield (relative name with slashes, path) of every file except the manifest and dot names, sorted."""
    entries: list[tuple[str, Path]] = []
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            path = Path(root, name)
            relative = path.relative_to(folder).as_posix()
            if not name.startswith(".") and relative != MANIFEST_FILE:
                entries.append((relative, path))
    yield from sorted(entries)


def list_content_names(folder: Path | str) -> set[str]:
    """Return the names of a folder's files relative to it, without its manifest and dot names."""
    return {name for name, _ in _list_content(Path(folder))}


def _digest_content(files: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [f"{name}\0{files[name]['size']}\0{files[name]['sha256']}\n" for name in sorted(files)]
    return digest_bytes("".join(lines).encode())


def digest_folder(path: Path | str) -> str:
    """Return the SHA-256 over names, sizes and bytes of a folder's files, equal to `content_digest` in its manifest.

    The manifest itself does not count, so equal content has an equal digest whoever published it.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: not a folder")
    return _digest_content({name: _build_file_entry(file) for name, file in _list_content(path)})


def _build_file_entry(path: Path, digest: str | None = None) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": digest or digest_file(path)}


def build_manifest(
    folder: Path,
    final: Path,
    extra: Mapping[str, Any] | None = None,
    digests: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Build the manifest of a written folder that will be renamed to `final`. Arguments: see `folders.seal_folder`.

    Raises: CheckpointError if a file of `digests` does not exist.
    """
    remaining = dict(digests or {})
    files = {
        name: _build_file_entry(path, remaining.pop(name, None))
        for name, path in _list_content(folder)
    }
    if remaining:
        raise CheckpointError(f"{final}: {min(remaining)} was not written")
    manifest = {
        **(extra or {}),
        "format_version": FORMAT_VERSION,
        "files": files,
        "content_digest": _digest_content(files),
    }
    manifest = json.loads(json.dumps(manifest, allow_nan=False))
    manifest["manifest_digest"] = _digest_manifest(manifest)
    return dict(manifest)


def _digest_manifest(manifest: Mapping[str, Any]) -> str:
    entries = {key: value for key, value in manifest.items() if key != "manifest_digest"}
    return digest_bytes(json.dumps(entries, sort_keys=True).encode())


def _measure_regular_file(path: Path) -> int:
    """Return the size of a regular file.

    Raises: CorruptError for a pipe, which could block, or a device, which may never end.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CorruptError(f"{path}: is not a regular file")
    return status.st_size


def _read_regular_file(path: Path) -> bytes:
    _measure_regular_file(path)
    return path.read_bytes()


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _build_read_error(path: Path, error: OSError) -> CheckpointError:
    """Return CorruptError for a missing or damaged file, otherwise CheckpointError: a later read may succeed."""
    if error.errno in _DAMAGE_ERRNOS:
        return CorruptError(f"{path}: cannot be read: {error.strerror or error}")
    remedy = REMEDIES.get(error.errno or 0)
    return CheckpointError(
        f"{path}: cannot be read: {error.strerror or error}{'; ' + remedy if remedy else ''}"
    )


def read_manifest(folder: Path | str) -> dict[str, Any]:
    """Return a folder's manifest after verifying its digest and that its file names are safe.

    Raises: CorruptError; CheckpointError if it is temporarily unreadable.
    """
    path = Path(folder) / MANIFEST_FILE
    try:
        manifest = json.loads(_read_regular_file(path), parse_constant=_reject_constant)
        if manifest["format_version"] != FORMAT_VERSION:
            raise CorruptError(
                f"{path}: format {manifest['format_version']!r}, this version reads {FORMAT_VERSION}"
            )
        if manifest["manifest_digest"] != _digest_manifest(manifest):
            raise CorruptError(f"{path}: differs from its own digest")
        for name, entry in manifest["files"].items():
            pure = PurePosixPath(name)
            has_unsafe_characters = "\\" in name or "\0" in name
            if has_unsafe_characters or pure.is_absolute() or ".." in pure.parts or not pure.parts:
                raise CorruptError(f"{path}: unsafe file name {name!r}")
            int(entry["size"]), str(entry["sha256"])
    except OSError as error:
        raise _build_read_error(path, error) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(f"{path}: not a manifest: {type(error).__name__} {error}") from error
    return manifest


def read_verified_file(folder: Path | str, name: str, manifest: Mapping[str, Any]) -> bytes:
    """Return the bytes of a file after verifying size and SHA-256 against the manifest.

    Raises: CorruptError; CheckpointError if it is temporarily unreadable.
    """
    path = Path(folder) / name
    entry = manifest["files"].get(name)
    if entry is None:
        raise CorruptError(f"{path}: not in the manifest")
    try:
        size = _measure_regular_file(path)
        if size != entry["size"]:
            raise CorruptError(f"{path}: {size} bytes, the manifest says {entry['size']}")
        data = _read_regular_file(path)
    except OSError as error:
        raise _build_read_error(path, error) from error
    if digest_bytes(data) != entry["sha256"]:
        raise CorruptError(f"{path}: SHA-256 differs from the manifest")
    return data


def verify_folder(path: Path | str) -> dict[str, Any]:
    """Verify every file of a folder and that there are no others; return the manifest.

    Raises: CorruptError naming the file; CheckpointError if one is temporarily unreadable.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    present = dict(_list_content(folder))
    for name, entry in manifest["files"].items():
        if name not in present:
            raise CorruptError(f"{folder / name}: missing")
        try:
            size = _measure_regular_file(present[name])
            digest = digest_file(present[name]) if size == entry["size"] else ""
        except OSError as error:
            raise _build_read_error(folder / name, error) from error
        if size != entry["size"]:
            raise CorruptError(f"{folder / name}: {size} bytes, the manifest says {entry['size']}")
        if digest != entry["sha256"]:
            raise CorruptError(f"{folder / name}: SHA-256 differs from the manifest")
    if extra := sorted(present.keys() - manifest["files"].keys()):
        raise CorruptError(f"{folder / extra[0]}: not in the manifest")
    return manifest


@contextlib.contextmanager
def verify_while_reading(
    folder: Path | str, is_wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[None]:
    """Verify the files of a folder that is covered by a manifest, and that none changes during the block.

    The manifest lies in the folder or its parent; a folder without a manifest of this package is not verified.
    transformers reads paths, not bytes. So each file is hashed first, and after the block it must still have the same
    inode, size and modification time.
    Args:
        is_wanted: whether the block reads a file of this name.
    Raises: CorruptError naming the file.
    """
    folder = Path(folder)
    entries = {
        path: entry
        for path, entry in _list_manifest_entries(folder).items()
        if is_wanted(path.name)
    }
    before = {path: _read_file_stamp(path) for path in entries}
    for path, entry in entries.items():
        if before[path][1] != entry["size"] or digest_file(path) != entry["sha256"]:
            raise CorruptError(
                f"{path}: differs from the manifest of its folder: damaged, or changed since it was saved. "
                f"If that was meant, remove {MANIFEST_FILE}"
            )
    yield
    for path, stamp in before.items():
        if _read_file_stamp(path) != stamp:
            raise CorruptError(
                f"{path}: was changed while it was read; nothing may write into a published folder"
            )


def _list_manifest_entries(folder: Path) -> dict[Path, Any]:
    """Map the files below `folder` to their entries in its manifest or its parent folder's; {} without a manifest."""
    for holder in (folder, folder.parent):
        with contextlib.suppress(OSError):
            # Other tools write a manifest.json too.
            if b'"manifest_digest"' in (holder / MANIFEST_FILE).read_bytes():
                entries = read_manifest(holder)["files"]
                files = {holder / name: entry for name, entry in entries.items()}
                return {path: entry for path, entry in files.items() if folder in path.parents}
    return {}


def _read_file_stamp(path: Path) -> tuple[int, int, int]:
    """Return inode, size and modification time. The change time would not do: a new hard link changes it."""
    try:
        status = path.stat()
    except OSError as error:
        raise CorruptError(f"{path}: cannot be read: {error.strerror or error}") from error
    return status.st_ino, status.st_size, status.st_mtime_ns
