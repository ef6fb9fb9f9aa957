"""Writing of single files: whole or not at all, never through links. With `folders` the only code that writes files.

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

from rl_core.errors import CheckpointError
from rl_core.storage.faults import fault
from rl_core.storage.own_files import own_file

__all__ = [
    "REMEDIES",
    "adopt",
    "append_bytes",
    "copy_tree",
    "create_once",
    "is_ours",
    "make_folder",
    "open_log",
    "owner_of_temporary",
    "refused",
    "replacing",
    "sync",
    "temporary_beside",
    "truncate_file",
    "write_json_atomic",
    "write_text_atomic",
    "write_text_unsynced",
]

_ROOM = "make room"
_ELSEWHERE = "use a folder that you may write into"
# What to do about an error of the file system; the command line says it in its own words.
REMEDIES = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: "raise the file size limit (ulimit -f)",
    errno.EROFS: "make the file system writable again (a disk error may have made it read-only), or use another folder",
    errno.EACCES: _ELSEWHERE,
    errno.EPERM: _ELSEWHERE,
    errno.ENOTDIR: _ELSEWHERE,
    errno.EEXIST: "remove it, or use another folder",
    errno.EIO: "the disk fails: see the kernel's log, and use another one",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ESTALE: "mount the network folder again",
}

# The last part is SQLite's, of a database that is being made.
_TEMPORARY = re.compile(r"\.tmp-.+?(?:@([^@/]*))?-(\d+)(?:\.\d+)?(?:-journal)?")
_numbers = itertools.count()  # two threads that write one file have two temporaries
_ours: set[str] = set()  # temporaries that this process is writing


def refused(path: Path | str, error: OSError, what: str = "written") -> CheckpointError:
    """The error for people: the file, what could not be done to it, the reason, what to do."""
    remedy = REMEDIES.get(error.errno or 0)
    reason = f"{error.strerror or error}{'; ' + remedy if remedy else ''}"
    return CheckpointError(f"{path}: cannot be {what}: {reason}")


@contextlib.contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """A name beside `path` that no other process, thread or machine uses; ours until the block ends."""
    temporary = path.with_name(f".tmp-{path.name}@{platform.node()}-{os.getpid()}.{next(_numbers)}")
    _ours.add(os.path.abspath(temporary))
    try:
        yield temporary
    finally:
        _ours.discard(os.path.abspath(temporary))


def is_ours(temporary: Path) -> bool:
    """True = this process is writing it now."""
    return os.path.abspath(temporary) in _ours


def owner_of_temporary(name: str) -> tuple[str | None, int] | None:
    """(host, process) of a temporary's name; None for another name. The host is None in names of older versions."""
    match = _TEMPORARY.fullmatch(name)
    return (match[1], int(match[2])) if match else None


def sync(path: Path | str) -> None:
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
            sync(folder.parent)
    except OSError as error:
        raise refused(error.filename or path, error, "made") from error
    return path


@contextlib.contextmanager
def replacing(
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
    opener = functools.partial(own_file, mode=mode)
    with temporary_beside(path) as temporary:
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
            fault(point or ("text.written" if synced else "live.written"))
            os.replace(temporary, path)
            if synced:
                sync(path.parent)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            ours = (None, str(temporary), str(path), str(path.parent))
            if isinstance(error, OSError) and (error.filename is None or os.fspath(error.filename) in ours):
                raise refused(path, error) from error
            raise
    if synced:
        fault("text.done")


def _is_replaceable(path: Path) -> bool:
    """True = nothing is there, or a file, or a link, which goes and not its target; False = a device, a pipe."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return True
    return stat.S_ISREG(mode) or stat.S_ISLNK(mode) or stat.S_ISDIR(mode)  # the last is an error of the rename


def write_text_atomic(path: Path | str, text: str, *, point: str | None = None) -> None:
    """Replace a file's text atomically: readers see the old or the new, after a crash too.

    `point` names a fault point between writing and replacing. Raises: as `replacing`.
    """
    with replacing(path, binary=True, point=point) as file:
        file.write(text.encode())


def write_json_atomic(path: Path | str, value: Any) -> None:
    """Replace a JSON file atomically. Raises ValueError for NaN and infinities, which are not JSON."""
    write_text_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_text_unsynced(path: Path | str, text: str) -> bool:
    """Replace a file's text without syncing, for live views: readers see the old or the new, a crash may lose both.

    Costs no wait for the disk. Returns whether it was written: a disk that refuses is no reason to stop.
    """
    try:
        with replacing(path, binary=True, synced=False) as file:
            file.write(text.encode())
    except CheckpointError:
        return False
    return True


def create_once(path: Path | str, text: str, *, mode: int = 0o644) -> bool:
    """Make a file that does not exist, complete before it has its name. Returns False where another one was first.

    Raises: CheckpointError where it cannot be written.
    """
    path = Path(path)
    with temporary_beside(path) as temporary:
        with replacing(temporary, binary=True, synced=False, mode=mode) as file:
            file.write(text.encode())
        try:
            try:
                sync(temporary)
                fault("once.written")
                os.link(temporary, path)
            finally:
                os.unlink(temporary)
            sync(path.parent)
        except FileExistsError:
            return False
        except OSError as error:
            raise refused(path, error) from error
    return True


def adopt(made: Path, path: Path, *, once: bool = False) -> bool:
    """Rename a file that a library or a compiler wrote; its bytes are on the disk first.

    Args:
        once: True = a second name, and never that of a file that is there: then False is returned.
    Raises: CheckpointError.
    """
    try:
        sync(made)
        (os.link if once else os.replace)(made, path)
        sync(path.parent)
    except FileExistsError:
        return False
    except OSError as error:
        raise refused(path, error) from error
    return True


def copy_tree(source: Path, target: Path) -> None:
    """Copy a folder's files into another one, made if absent; each file that is there is replaced atomically."""
    for path in sorted(source.rglob("*")):
        if path.is_file():
            place = target / path.relative_to(source)
            make_folder(place.parent)
            with path.open("rb") as read, replacing(place, binary=True) as file:
                shutil.copyfileobj(read, file, 1 << 20)


def append_bytes(path: Path | str, data: bytes, *, synced: bool = False) -> None:
    """Append to a file of one writer, all of `data` or nothing; the file is made where it is not there.

    Raises: CheckpointError where the disk refuses; what it took of `data` is cut off again.
    """
    try:
        is_new = not os.path.lexists(path)
        descriptor = own_file(path, os.O_RDWR | os.O_CREAT)
        try:
            place = os.fstat(descriptor).st_size
            try:
                _write_all(descriptor, data, place)
                if synced:
                    os.fsync(descriptor)
                if synced and is_new:
                    sync(os.path.dirname(path) or ".")
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, place)  # shrinking needs no space; a torn line must not stay in the middle
                raise
        finally:
            os.close(descriptor)
    except OSError as error:
        raise refused(path, error) from error


def _write_all(descriptor: int, data: bytes, place: int) -> None:
    """Write at a byte offset; a disk that takes only a part is asked again, and then says why."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, place)
        view, place = view[written:], place + written


def truncate_file(path: Path | str, size: int) -> None:
    """Cut a file to `size` bytes. Raises: CheckpointError."""
    try:
        descriptor = own_file(path, os.O_RDWR)
        try:
            os.ftruncate(descriptor, size)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise refused(path, error) from error


def open_log(path: Path | str, *, append_up_to: int = 0) -> IO[bytes]:
    """A file for the output of a child process: for people, so neither whole nor synced is promised.

    append_up_to: bytes from which a file is renamed to NAME.1 and begun anew; 0 = always begun anew.
    """
    path = Path(path)
    if append_up_to and path.exists() and path.stat().st_size > append_up_to:
        os.replace(path, path.with_name(f"{path.name}.1"))
    return open(path, "ab" if append_up_to else "wb", opener=own_file)
