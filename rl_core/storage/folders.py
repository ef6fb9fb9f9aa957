"""Atomic publishing of folders (write, sync, manifest, rename) and verification by readers.

A published folder holds its files and manifest.json: format version, size and SHA-256 of every file, whatever the
publisher adds, and a digest of the manifest itself. Names that begin with a dot are not part of a folder's content.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import platform
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from rl_core.errors import CheckpointError, CorruptError, FolderBusy
from rl_core.storage.faults import fault
from rl_core.storage.own_files import own_file
from rl_core.storage.single_files import (
    REMEDIES,
    is_ours,
    make_folder,
    owner_of_temporary,
    refused,
    sync,
    temporary_beside,
)

__all__ = [
    "FORMAT_VERSION",
    "MANIFEST",
    "clear_leftovers",
    "content_names",
    "digest_bytes",
    "digest_file",
    "digest_folder",
    "move_folder",
    "publish_folder",
    "put_bytes",
    "read_manifest",
    "read_verified",
    "remove_folder",
    "seal_folder",
    "set_aside",
    "sync_tree",
    "verify_folder",
]

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
_TRASH = ".trash-"
# A file that is gone, or that the disk cannot read, is damage; one that cannot be read just now says nothing.
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO)
_publishing: set[Path] = set()  # folders that this process publishes
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


def content_names(folder: Path | str) -> set[str]:
    """Names of a folder's files, relative to it, without its manifest and dot names."""
    return {name for name, _ in _content(Path(folder))}


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
        known = dict(digests or {})
        files = {name: _entry(path, known.pop(name, None)) for name, path in _content(folder)}
        if known:
            raise CheckpointError(f"{final}: {sorted(known)[0]} was not written")
        for inner in folder.iterdir():
            sync_tree(inner)
        fault("publish.written")
        manifest = {
            **(extra or {}),
            "format_version": FORMAT_VERSION,
            "files": files,
            "content_digest": _content_digest(files),
        }
        manifest = json.loads(json.dumps(manifest, allow_nan=False))
        manifest["manifest_digest"] = _manifest_digest(manifest)
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
        _remove(temporary)  # of a dead process that had our number
        temporary.mkdir()
        fault("publish.begin")
        digests = write(temporary)
        return seal_folder(temporary, final, extra_manifest, digests=digests)
    except OSError as error:
        raise refused(final, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _regular(path: Path) -> int:
    """Size of a regular file; CorruptError for a pipe, which would be waited for, or a device, which never ends."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise CorruptError(f"{path}: is no regular file")
    return found.st_size


def _bytes(path: Path) -> bytes:
    _regular(path)
    return path.read_bytes()


def _manifest_digest(manifest: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "manifest_digest"}
    return digest_bytes(json.dumps(rest, sort_keys=True).encode())


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    """CorruptError for a file that is gone or unreadable for good; else CheckpointError: it may be read later."""
    if error.errno in _DAMAGE:
        return CorruptError(f"{path}: cannot be read: {error.strerror or error}")
    remedy = REMEDIES.get(error.errno or 0)
    return CheckpointError(f"{path}: cannot be read: {error.strerror or error}{'; ' + remedy if remedy else ''}")


def read_manifest(folder: Path | str) -> dict[str, Any]:
    """A folder's manifest, verified (its own digest, safe file names).

    Raises: CorruptError; CheckpointError where it cannot be read at the moment.
    """
    path = Path(folder) / MANIFEST
    try:
        manifest = json.loads(_bytes(path), parse_constant=_no_constant)
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
        raise _unreadable(path, error) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(f"{path}: not a manifest: {type(error).__name__} {error}") from error
    return manifest


def read_verified(folder: Path | str, name: str, manifest: Mapping[str, Any]) -> bytes:
    """Bytes of a file, verified against the manifest's size and SHA-256.

    Raises: CorruptError; CheckpointError where it cannot be read at the moment.
    """
    path = Path(folder) / name
    entry = manifest["files"].get(name)
    if entry is None:
        raise CorruptError(f"{path}: not in the manifest")
    try:
        size = _regular(path)
        if size != entry["size"]:
            raise CorruptError(f"{path}: {size} bytes, the manifest says {entry['size']}")
        data = _bytes(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    if digest_bytes(data) != entry["sha256"]:
        raise CorruptError(f"{path}: SHA-256 differs from the manifest")
    return data


def verify_folder(path: Path | str) -> dict[str, Any]:
    """The manifest of a folder, with every file verified and none besides them.

    Raises: CorruptError naming the file; CheckpointError where one cannot be read at the moment.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    present = dict(_content(folder))
    for name, entry in manifest["files"].items():
        if name not in present:
            raise CorruptError(f"{folder / name}: missing")
        try:
            size = _regular(present[name])
            digest = digest_file(present[name]) if size == entry["size"] else ""
        except OSError as error:
            raise _unreadable(folder / name, error) from error
        if size != entry["size"]:
            raise CorruptError(f"{folder / name}: {size} bytes, the manifest says {entry['size']}")
        if digest != entry["sha256"]:
            raise CorruptError(f"{folder / name}: SHA-256 differs from the manifest")
    if extra := sorted(present.keys() - manifest["files"].keys()):
        raise CorruptError(f"{folder / extra[0]}: not in the manifest")
    return manifest


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
    trash = _free_name(path.with_name(f"{_TRASH}{path.name}-{os.getpid()}"))
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
    if path.name.startswith(_TRASH):
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
