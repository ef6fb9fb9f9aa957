"""Atomic publishing of folders (write, sync, manifest, rename) and verification by readers.

A published folder holds its files and manifest.json: format version, size and SHA-256 of every file, whatever the
publisher adds, and a digest of the manifest itself. Names that begin with a dot are not part of a folder's content.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from rl_core.errors import CheckpointError, CorruptError, FolderBusy
from rl_core.storage.faults import fault
from rl_core.storage.own_files import own_file

__all__ = [
    "FORMAT_VERSION",
    "MANIFEST",
    "clear_leftovers",
    "digest_bytes",
    "digest_file",
    "digest_folder",
    "publish_folder",
    "read_manifest",
    "read_verified",
    "remove_folder",
    "seal_folder",
    "verify_folder",
    "write_json_atomic",
    "write_text_atomic",
    "write_text_unsynced",
]

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
_LEFTOVER = re.compile(r"\.tmp-.+-(\d+)|\.trash-.+")
_publishing: set[Path] = set()  # temporary folders of this process; a pid alone cannot tell two threads apart
_publishing_guard = threading.Lock()


def digest_bytes(data: bytes) -> str:
    """SHA-256 as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def digest_file(path: Path | str) -> str:
    """SHA-256 of a file's bytes, as 64 hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _content(folder: Path) -> Iterator[tuple[str, Path]]:
    """(relative name with slashes, path) of every file but the manifest and dot names, sorted."""
    found: list[tuple[str, Path]] = []
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            path = Path(root, name)
            relative = path.relative_to(folder).as_posix()
            if not name.startswith(".") and relative != MANIFEST:
                found.append((relative, path))
    yield from sorted(found)


def _content_digest(files: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [f"{name}\0{files[name]['size']}\0{files[name]['sha256']}\n" for name in sorted(files)]
    return digest_bytes("".join(lines).encode())


def digest_folder(path: Path | str) -> str:
    """SHA-256 over names, sizes and bytes of a folder's files; equals `content_digest` in its manifest.

    The manifest itself does not count, so the same content has the same digest whoever published it.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: not a folder")
    return _content_digest({name: _entry(file) for name, file in _content(path)})


def _entry(path: Path, digest: str | None = None) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": digest or digest_file(path)}


def sync(path: Path | str) -> None:
    """Force a file's data, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, data: bytes) -> None:
    """Write and sync a file; one that lies there is replaced, never written through."""
    path.unlink(missing_ok=True)
    with open(path, "xb", opener=own_file) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_text_atomic(path: Path | str, text: str, *, point: str | None = None) -> None:
    """Replace a file's text atomically: readers see the old or the new, after a crash too.

    `point` names a fault point between writing and replacing.
    """
    path = Path(path)
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        write_bytes(temporary, text.encode())
        fault(point or "text.written")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"{path}: cannot be written: {error}") from error
    sync(path.parent)
    fault("text.done")


def write_text_unsynced(path: Path | str, text: str) -> bool:
    """Replace a file's text without syncing, for live views: readers see the old or the new, a crash may lose both.

    Costs no wait for the disk. Returns whether it was written: a disk that refuses is no reason to stop.
    """
    path = Path(path)
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        with open(temporary, "x", opener=own_file) as file:
            file.write(text)
        fault("live.written")
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        return False
    return True


def write_json_atomic(path: Path | str, value: Any) -> None:
    """Replace a JSON file atomically. Raises ValueError for NaN and infinities, which are not JSON."""
    write_text_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def seal_folder(
    folder: Path,
    final: Path,
    extra: Mapping[str, Any] | None = None,
    *,
    digests: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Add a manifest to a written folder and rename it; it is complete before its final name exists.

    Steps: sync every file and folder, write and sync the manifest, sync the folder, rename, sync the parent. `folder`
    and `final` must lie on one file system; the caller holds the lock.
    Args:
        extra: what else the manifest says.
        digests: SHA-256 of files that the caller knows from memory: what was meant to be written, not what was.
    Returns: the manifest.
    Raises: CheckpointError if `final` exists, or the disk refuses.
    """
    try:
        known = dict(digests or {})
        files = {name: _entry(path, known.pop(name, None)) for name, path in _content(folder)}
        if known:
            raise CheckpointError(f"{final}: {sorted(known)[0]} was not written")
        for root, _, names in os.walk(folder):
            for name in names:
                sync(Path(root, name))
            sync(root)
        fault("publish.written")
        manifest = {
            **(extra or {}),
            "format_version": FORMAT_VERSION,
            "files": files,
            "content_digest": _content_digest(files),
        }
        manifest = json.loads(json.dumps(manifest, allow_nan=False))
        manifest["manifest_digest"] = _manifest_digest(manifest)
        write_bytes(folder / MANIFEST, json.dumps(manifest, indent=2).encode())
        sync(folder)
        fault("publish.manifest")
        if final.exists() or final.is_symlink():  # rename() would silently replace an empty folder
            raise CheckpointError(f"{final}: exists already; a published folder is never written again")
        os.rename(folder, final)
        fault("publish.renamed")
        sync(final.parent)
        fault("publish.done")
    except OSError as error:
        raise CheckpointError(f"{final}: cannot be written: {error}") from error
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
    temporary = final.with_name(f".tmp-{final.name}-{os.getpid()}")
    with _publishing_guard:
        if temporary in _publishing:
            raise FolderBusy(f"{final}: another thread of this process publishes it")
        _publishing.add(temporary)
    try:
        _remove(temporary)  # of a dead process that had our pid
        temporary.mkdir(parents=True)
        fault("publish.begin")
        digests = write(temporary)
        return seal_folder(temporary, final, extra_manifest, digests=digests)
    except OSError as error:
        raise CheckpointError(f"{final}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        with _publishing_guard:
            _publishing.discard(temporary)


def _manifest_digest(manifest: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "manifest_digest"}
    return digest_bytes(json.dumps(rest, sort_keys=True).encode())


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def read_manifest(folder: Path | str) -> dict[str, Any]:
    """A folder's manifest, verified (its own digest, safe file names). Raises CorruptError."""
    path = Path(folder) / MANIFEST
    try:
        manifest = json.loads(path.read_bytes(), parse_constant=_no_constant)
        if manifest["format_version"] != FORMAT_VERSION:
            raise CorruptError(f"{path}: format {manifest['format_version']!r}, this version reads {FORMAT_VERSION}")
        if manifest["manifest_digest"] != _manifest_digest(manifest):
            raise CorruptError(f"{path}: differs from its own digest")
        for name, entry in manifest["files"].items():
            pure = PurePosixPath(name)
            if pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name or not pure.parts:
                raise CorruptError(f"{path}: unsafe file name {name!r}")
            int(entry["size"]), str(entry["sha256"])
    except OSError as error:
        raise CorruptError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(f"{path}: not a manifest: {type(error).__name__} {error}") from error
    return manifest


def read_verified(folder: Path | str, name: str, manifest: Mapping[str, Any]) -> bytes:
    """Bytes of a file, verified against the manifest's size and SHA-256. Raises CorruptError."""
    path = Path(folder) / name
    entry = manifest["files"].get(name)
    if entry is None:
        raise CorruptError(f"{path}: not in the manifest")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CorruptError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(data) != entry["size"]:
        raise CorruptError(f"{path}: {len(data)} bytes, the manifest says {entry['size']}")
    if digest_bytes(data) != entry["sha256"]:
        raise CorruptError(f"{path}: SHA-256 differs from the manifest")
    return data


def verify_folder(path: Path | str) -> dict[str, Any]:
    """The manifest of a folder, with every file verified and none besides them.

    Raises: CorruptError naming the file.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    present = dict(_content(folder))
    for name, entry in manifest["files"].items():
        if name not in present:
            raise CorruptError(f"{folder / name}: missing")
        size = present[name].stat().st_size
        if size != entry["size"]:
            raise CorruptError(f"{folder / name}: {size} bytes, the manifest says {entry['size']}")
        if digest_file(present[name]) != entry["sha256"]:
            raise CorruptError(f"{folder / name}: SHA-256 differs from the manifest")
    if extra := sorted(present.keys() - manifest["files"].keys()):
        raise CorruptError(f"{folder / extra[0]}: not in the manifest")
    return manifest


def remove_folder(path: Path | str) -> None:
    """Delete a folder: renamed first, so that a reader sees all of it or nothing."""
    path = Path(path)
    trash = path.with_name(f".trash-{path.name}-{os.getpid()}-{time.time_ns()}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, trash)
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


def clear_leftovers(parent: Path | str, *, locked: bool = False) -> list[str]:
    """Delete temporaries of dead processes and unfinished deletions in `parent`; returns their names.

    `locked` = the caller holds the folder's lock, so every temporary there is dead, its pid reused or not.
    """
    removed = []
    for path in sorted(Path(parent).iterdir()):
        match = _LEFTOVER.fullmatch(path.name)
        if match is None or path in _publishing:
            continue
        if match[1] and not locked and _alive(int(match[1])):
            continue
        _remove(path)
        fault("leftover.removed")
        removed.append(path.name)
    return removed


def _remove(path: Path) -> None:
    """Delete a folder, a file, or a link (never its target)."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
