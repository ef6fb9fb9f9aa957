"""Manifests of folders: digests of files and of whole folders, and verification by readers.

manifest.json holds the format version, size and SHA-256 of every file, whatever the publisher adds, and a digest of the
manifest itself. Names that begin with a dot are not part of a folder's content.

Verification of files that a library opens by itself, such as the weights of a published model folder.
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
# A file that is gone, or that the disk cannot read, is damage; one that cannot be read just now says nothing.
_DAMAGE_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO)


# ------------------------------------------------------------------------------------------------------------ digests


def digest_bytes(data: bytes) -> str:
    """SHA-256 as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def digest_file(path: Path | str) -> str:
    """SHA-256 of a file's bytes, as 64 hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _list_content(folder: Path) -> Iterator[tuple[str, Path]]:
    """(relative name with slashes, path) of every file but the manifest and dot names, sorted."""
    found: list[tuple[str, Path]] = []
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            path = Path(root, name)
            relative = path.relative_to(folder).as_posix()
            if not name.startswith(".") and relative != MANIFEST_FILE:
                found.append((relative, path))
    yield from sorted(found)


def list_content_names(folder: Path | str) -> set[str]:
    """Names of a folder's files, relative to it, without its manifest and dot names."""
    return {name for name, _ in _list_content(Path(folder))}


def _digest_content(files: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [f"{name}\0{files[name]['size']}\0{files[name]['sha256']}\n" for name in sorted(files)]
    return digest_bytes("".join(lines).encode())


def digest_folder(path: Path | str) -> str:
    """SHA-256 over names, sizes and bytes of a folder's files; equals `compute_content_digest` in its manifest.

    The manifest itself does not count, so the same content has the same digest whoever published it.
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
    """Manifest of a written folder that will be called `final`. Arguments: see `folders.seal_folder`.

    Raises: CheckpointError if a file of `digests` is not there.
    """
    known = dict(digests or {})
    files = {
        name: _build_file_entry(path, known.pop(name, None)) for name, path in _list_content(folder)
    }
    if known:
        raise CheckpointError(f"{final}: {sorted(known)[0]} was not written")
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
    rest = {key: value for key, value in manifest.items() if key != "manifest_digest"}
    return digest_bytes(json.dumps(rest, sort_keys=True).encode())


# ------------------------------------------------------------------------------------------------------- verification


def _measure_regular_file(path: Path) -> int:
    """Size of a regular file; CorruptError for a pipe, which would be waited for, or a device, which never ends."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise CorruptError(f"{path}: is no regular file")
    return found.st_size


def _read_regular_file(path: Path) -> bytes:
    _measure_regular_file(path)
    return path.read_bytes()


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _build_read_error(path: Path, error: OSError) -> CheckpointError:
    """CorruptError for a file that is gone or unreadable for good; else CheckpointError: it may be read later."""
    if error.errno in _DAMAGE_ERRNOS:
        return CorruptError(f"{path}: cannot be read: {error.strerror or error}")
    remedy = REMEDIES.get(error.errno or 0)
    return CheckpointError(
        f"{path}: cannot be read: {error.strerror or error}{'; ' + remedy if remedy else ''}"
    )


def read_manifest(folder: Path | str) -> dict[str, Any]:
    """A folder's manifest, verified (its own digest, safe file names).

    Raises: CorruptError; CheckpointError where it cannot be read at the moment.
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
            if (
                pure.is_absolute()
                or ".." in pure.parts
                or "\\" in name
                or "\0" in name
                or not pure.parts
            ):
                raise CorruptError(f"{path}: unsafe file name {name!r}")
            int(entry["size"]), str(entry["sha256"])
    except OSError as error:
        raise _build_read_error(path, error) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(f"{path}: not a manifest: {type(error).__name__} {error}") from error
    return manifest


def read_verified_file(folder: Path | str, name: str, manifest: Mapping[str, Any]) -> bytes:
    """Bytes of a file, verified against the manifest's size and SHA-256.

    Raises: CorruptError; CheckpointError where it cannot be read at the moment.
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
    """The manifest of a folder, with every file verified and none besides them.

    Raises: CorruptError naming the file; CheckpointError where one cannot be read at the moment.
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
    """Verify the files of a folder that has a manifest, or lies in one that has, and that none changes in the block.

    transformers reads paths, not bytes, so the file is hashed first, and afterwards it has to be the same one (inode,
    size, time of change) as when hashing began. A folder without a manifest of ours is taken as it is.
    Args:
        wanted: names of the files that are read in the block.
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
    """Files below `folder` with their entries in its manifest, or in that of the folder around it; {} without one."""
    for holder in (folder, folder.parent):
        with contextlib.suppress(OSError):
            if (
                b'"manifest_digest"' in (holder / MANIFEST_FILE).read_bytes()
            ):  # other tools have a manifest.json too
                files = {
                    holder / name: entry for name, entry in read_manifest(holder)["files"].items()
                }
                return {path: entry for path, entry in files.items() if folder in path.parents}
    return {}


def _read_file_stamp(path: Path) -> tuple[int, int, int]:
    """Identity, size and time of change. Not the inode's own change: a new hard link is one."""
    try:
        found = path.stat()
    except OSError as error:
        raise CorruptError(f"{path}: cannot be read: {error.strerror or error}") from error
    return found.st_ino, found.st_size, found.st_mtime_ns
