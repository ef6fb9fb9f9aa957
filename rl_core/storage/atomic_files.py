"""Opening files for writing in folders that others may write into: no links are followed, owners are checked.

with open(path, "a", opener=own_file) as file: ...

Writing of single files: whole or not at all, never through links. With `folders` the only code that writes files.

    write_text_atomic, write_json_atomic   replaced, and on the disk when the call returns
    replacing                              the same for a file that is written piece by piece
    create_once                            the same for a file that is made once, whoever comes first
    write_text_unsynced                    replaced, but a crash of the machine may lose it: for live views
    append_bytes, truncate_file            files that grow; their lines have checksums (`checked_lines`)
    open_log                               output of a child process, for people
    make_folder                            a folder, and on the disk that it is there

A temporary is called .tmp-<name>@<host>-<pid>.<number>: the name says whose it is, on a network folder too.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import os
import platform
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from rl_core.errors import CheckpointError, SettingsError
from rl_core.storage.faults import inject_fault

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def resolve_cache_folder(name: str) -> Path:
    """Folder `name` among the caches of the user. Raises: SettingsError for a user without a home."""
    place = os.environ.get("XDG_CACHE_HOME")
    try:
        caches = Path(place) if place else Path.home() / ".cache"
    except RuntimeError:
        raise SettingsError(
            "this user has no home folder for caches; set HOME or XDG_CACHE_HOME"
        ) from None
    return caches / "posttrain" / name


def open_owned_file(path: str | os.PathLike[str], flags: int, mode: int = 0o644) -> int:
    """Descriptor of a regular file, as `os.open` gives it; the `opener` of the built-in `open`.

    A symbolic link, device or pipe under that name is refused before anything is cut off or written. Where others may
    write into the folder, so is a file that belongs neither to this user nor to the folder's owner; where everybody
    may, so is one that has another name elsewhere.
    Raises: CheckpointError for those; OSError as `os.open`.
    """
    path = os.fspath(path)
    careful = (
        (flags & ~os.O_TRUNC) | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    )  # a pipe would wait for a reader
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
        _check_file_owner(path, os.fstat(descriptor))
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_regular_file(path: str | os.PathLike[str], flags: int) -> int:
    """Descriptor of a regular file for reading; the `opener` of the built-in `open`.

    Raises: OSError, also for a pipe, which would be waited for, and a device, which may never end.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is no regular file", os.fspath(path))
    return descriptor


def _check_file_owner(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: is no regular file; remove it")
    folder = os.stat(os.path.dirname(path) or ".")
    if (
        folder.st_mode & stat.S_IWOTH and status.st_nlink > 1
    ):  # not for groups: snapshots are made of hard links
        raise CheckpointError(
            f"{path}: has another name elsewhere (a hard link), in a folder that everybody may write into; remove it"
        )
    if folder.st_mode & _OTHERS_WRITE and status.st_uid not in (os.geteuid(), folder.st_uid):
        raise CheckpointError(
            f"{path}: belongs to user {status.st_uid}, in a folder that others may write into; remove it, or use "
            "another folder"
        )


_ROOM_REMEDY = "make room"
_FOLDER_REMEDY = "use a folder that you may write into"
# What to do about an error of the file system; the command line says it in its own words.
REMEDIES = {
    errno.ENOSPC: _ROOM_REMEDY,
    errno.EDQUOT: _ROOM_REMEDY,
    errno.EFBIG: "raise the file size limit (ulimit -f)",
    errno.EROFS: "make the file system writable again (a disk error may have made it read-only), or use another folder",
    errno.EACCES: _FOLDER_REMEDY,
    errno.EPERM: _FOLDER_REMEDY,
    errno.ENOTDIR: _FOLDER_REMEDY,
    errno.EEXIST: "remove it, or use another folder",
    errno.EIO: "the disk fails: see the kernel's log, and use another one",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ESTALE: "mount the network folder again",
}

# The last part is SQLite's, of a database that is being made.
_TEMPORARY = re.compile(r"\.tmp-.+?(?:@([^@/]*))?-(\d+)(?:\.\d+)?(?:-journal)?")
_numbers = itertools.count()  # two threads that write one file have two temporaries
_active_temporaries: set[str] = set()  # temporaries that this process is writing


def write_error(path: Path | str, error: OSError, action: str = "written") -> CheckpointError:
    """The error for people: the file, what could not be done to it, the reason, what to do."""
    remedy = REMEDIES.get(error.errno or 0)
    reason = f"{error.strerror or error}{'; ' + remedy if remedy else ''}"
    return CheckpointError(f"{path}: cannot be {action}: {reason}")


@contextlib.contextmanager
def reserve_temporary(path: Path) -> Iterator[Path]:
    """A name beside `path` that no other process, thread or machine uses; ours until the block ends."""
    temporary = path.with_name(f".tmp-{path.name}@{platform.node()}-{os.getpid()}.{next(_numbers)}")
    _active_temporaries.add(os.path.abspath(temporary))
    try:
        yield temporary
    finally:
        _active_temporaries.discard(os.path.abspath(temporary))


def is_own_temporary(temporary: Path) -> bool:
    """True = this process is writing it now."""
    return os.path.abspath(temporary) in _active_temporaries


def parse_temporary_owner(name: str) -> tuple[str | None, int] | None:
    """(host, process) of a temporary's name; None for another name. The host is None in names of older versions."""
    match = _TEMPORARY.fullmatch(name)
    return (match[1], int(match[2])) if match else None


def fsync_path(path: Path | str) -> None:
    """Force a file's data, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path | str) -> Path:
    """The folder, made with its parents where it is not there; every new entry is on the disk when the call returns.

    Raises: CheckpointError where it cannot be made.
    """
    path = Path(path)
    missing = list(itertools.takewhile(lambda folder: not folder.is_dir(), (path, *path.parents)))
    try:
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)  # another process may be faster
            fsync_path(folder.parent)
    except OSError as error:
        raise write_error(error.filename or path, error, "made") from error
    return path


@contextlib.contextmanager
def replace_file(
    path: Path | str,
    *,
    binary: bool = False,
    synced: bool = True,
    errors: str = "strict",
    mode: int = 0o644,
    point: str | None = None,
) -> Iterator[IO[Any]]:
    """A file to write into, which takes the place of `path` when the block ends: readers see the old or the new.

    If the block raises, the old one stays.
    Args:
        binary: bytes; else UTF-8 text, line ends as they are.
        synced: on the disk at the end. False is for live views, and for files of a folder that is sealed afterwards.
        errors: of the encoding. mode: permissions. point: a fault point between writing and replacing.
    Raises: CheckpointError naming the file, the reason and what to do.
    """
    path = Path(path)
    text = {} if binary else {"encoding": "utf-8", "errors": errors, "newline": ""}
    opener = functools.partial(open_owned_file, mode=mode)
    with reserve_temporary(path) as temporary:
        try:
            if not _is_replaceable(path):
                raise CheckpointError(f"{path}: is no regular file; remove it")
            with contextlib.suppress(FileNotFoundError):  # of a dead process that had our number
                os.unlink(temporary)
            with open(temporary, "xb" if binary else "x", opener=opener, **text) as file:  # type: ignore[call-overload]
                yield file
                file.flush()
                if synced:
                    os.fsync(file.fileno())
            inject_fault(point or ("text.written" if synced else "live.written"))
            os.replace(temporary, path)
            if synced:
                fsync_path(path.parent)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            ours = (None, str(temporary), str(path), str(path.parent))
            if isinstance(error, OSError) and (
                error.filename is None or os.fspath(error.filename) in ours
            ):
                raise write_error(path, error) from error
            raise
    if synced:
        inject_fault("text.done")


def _is_replaceable(path: Path) -> bool:
    """True = nothing is there, or a file, or a link, which goes and not its target; False = a device, a pipe."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return True
    return (
        stat.S_ISREG(mode) or stat.S_ISLNK(mode) or stat.S_ISDIR(mode)
    )  # the last is an error of the rename


def write_text_atomic(path: Path | str, text: str, *, point: str | None = None) -> None:
    """Replace a file's text atomically: readers see the old or the new, after a crash too.

    `point` names a fault point between writing and replacing. Raises: as `replacing`.
    """
    with replace_file(path, binary=True, point=point) as file:
        file.write(text.encode())


def write_json_atomic(path: Path | str, value: Any) -> None:
    """Replace a JSON file atomically. Raises ValueError for NaN and infinities, which are not JSON."""
    write_text_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_text_unsynced(path: Path | str, text: str) -> bool:
    """Replace a file's text without syncing, for live views: readers see the old or the new, a crash may lose both.

    Costs no wait for the disk. Returns whether it was written: a disk that refuses is no reason to stop.
    """
    try:
        with replace_file(path, binary=True, synced=False) as file:
            file.write(text.encode())
    except CheckpointError:
        return False
    return True


def create_file_once(path: Path | str, text: str, *, mode: int = 0o644) -> bool:
    """Make a file that does not exist, complete before it has its name. Returns False where another one was first.

    Raises: CheckpointError where it cannot be written.
    """
    path = Path(path)
    with reserve_temporary(path) as temporary:
        with replace_file(temporary, binary=True, synced=False, mode=mode) as file:
            file.write(text.encode())
        try:
            try:
                fsync_path(temporary)
                inject_fault("once.written")
                os.link(temporary, path)
            finally:
                os.unlink(temporary)
            fsync_path(path.parent)
        except FileExistsError:
            return False
        except OSError as error:
            raise write_error(path, error) from error
    return True


def move_into_place(source: Path, path: Path, *, once: bool = False) -> bool:
    """Rename a file that a library or a compiler wrote; its bytes are on the disk first.

    Args:
        once: True = a second name, and never that of a file that is there: then False is returned.
    Raises: CheckpointError.
    """
    try:
        fsync_path(source)
        (os.link if once else os.replace)(source, path)
        fsync_path(path.parent)
    except FileExistsError:
        return False
    except OSError as error:
        raise write_error(path, error) from error
    return True


def copy_tree(source: Path, target: Path) -> None:
    """Copy a folder's files into another one, made if absent; each file that is there is replaced atomically."""
    for path in sorted(source.rglob("*")):
        if path.is_file():
            place = target / path.relative_to(source)
            make_folder(place.parent)
            with path.open("rb") as read, replace_file(place, binary=True) as file:
                shutil.copyfileobj(read, file, 1 << 20)


def append_bytes(path: Path | str, data: bytes, *, synced: bool = False) -> None:
    """Append to a file of one writer, all of `data` or nothing; the file is made where it is not there.

    Raises: CheckpointError where the disk refuses; what it took of `data` is cut off again.
    """
    try:
        is_new = not os.path.lexists(path)
        descriptor = open_owned_file(path, os.O_RDWR | os.O_CREAT)
        try:
            place = os.fstat(descriptor).st_size
            try:
                _write_all_bytes(descriptor, data, place)
                if synced:
                    os.fsync(descriptor)
                if synced and is_new:
                    fsync_path(os.path.dirname(path) or ".")
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(
                        descriptor, place
                    )  # shrinking needs no space; a torn line must not stay in the middle
                raise
        finally:
            os.close(descriptor)
    except OSError as error:
        raise write_error(path, error) from error


def _write_all_bytes(descriptor: int, data: bytes, offset: int) -> None:
    """Write at a byte offset; a disk that takes only a part is asked again, and then says why."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def truncate_file(path: Path | str, size: int) -> None:
    """Cut a file to `size` bytes. Raises: CheckpointError."""
    try:
        descriptor = open_owned_file(path, os.O_RDWR)
        try:
            os.ftruncate(descriptor, size)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise write_error(path, error) from error


def open_log_file(path: Path | str, *, append_up_to: int = 0) -> IO[bytes]:
    """A file for the output of a child process: for people, so neither whole nor synced is promised.

    append_up_to: bytes from which a file is renamed to NAME.1 and begun anew; 0 = always begun anew.
    """
    path = Path(path)
    if append_up_to and path.exists() and path.stat().st_size > append_up_to:
        os.replace(path, path.with_name(f"{path.name}.1"))
    return open(path, "ab" if append_up_to else "wb", opener=open_owned_file)
