"""File writing that is atomic, never follows links and checks who owns the target.

Other rooms write files through this package; `tests/test_written_files.py` lists the exceptions with their reasons.

    write_text_atomic, write_json_atomic   replace a file; durable when the call returns
    replace_file                           the same for a file that is written in pieces
    create_file_once                       the same for a file that only the first caller creates
    write_text_unsynced                    replace a live view; a machine crash may lose it
    AppendLog (append_log.py)              files that grow, whose lines carry checksums
    open_log_file                          output of a child process
    make_folder                            create a folder durably

Temporaries are named .tmp-<name>@<host>-<pid>.<number>, so their owner is known on a network folder too.
To write another kind of file: `with open(path, "a", opener=open_owned_file) as file: ...`
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
_SPACE_REMEDY = "make room"
_FOLDER_REMEDY = "use a folder that you may write into"
# What the user can do about a file system error, by errno.
REMEDIES = {
    errno.ENOSPC: _SPACE_REMEDY,
    errno.EDQUOT: _SPACE_REMEDY,
    errno.EFBIG: "raise the file size limit (ulimit -f)",
    errno.EROFS: "make the file system writable again (a disk error may have made it read-only), or use another folder",
    errno.EACCES: _FOLDER_REMEDY,
    errno.EPERM: _FOLDER_REMEDY,
    errno.ENOTDIR: _FOLDER_REMEDY,
    errno.EEXIST: "remove it, or use another folder",
    errno.EIO: "the disk is failing: see the kernel log, and use another disk",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ESTALE: "mount the network folder again",
}

# The last part is the journal that SQLite writes while it creates a database.
_TEMPORARY = re.compile(r"\.tmp-.+?(?:@([^@/]*))?-(\d+)(?:\.\d+)?(?:-journal)?")
_temporary_numbers = itertools.count()  # lets two threads write the same file
_active_temporaries: set[str] = set()  # temporaries that this process is writing


def resolve_cache_folder(name: str) -> Path:
    """Return the folder `name` in the user's cache folder. Raises: SettingsError for a user without a home."""
    cache_home = os.environ.get("XDG_CACHE_HOME")
    try:
        caches = Path(cache_home) if cache_home else Path.home() / ".cache"
    except RuntimeError:
        raise SettingsError(
            "this user has no home folder for caches; set HOME or XDG_CACHE_HOME"
        ) from None
    return caches / "posttrain" / name


def open_owned_file(path: str | os.PathLike[str], flags: int, mode: int = 0o644) -> int:
    """Open a regular file as `os.open` does and return its descriptor; an `opener` for the built-in `open`.

    Refuses a symbolic link, device or pipe before anything is truncated or written. In a folder that others can write
    to, also refuses a file that belongs neither to this user nor to the folder's owner; in a folder that everybody can
    write to, also a file that has hard links.
    Raises: CheckpointError for these; OSError as `os.open`.
    """
    path = os.fspath(path)
    # O_NONBLOCK: opening a pipe would otherwise wait for a reader.
    safe_flags = (flags & ~os.O_TRUNC) | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, safe_flags, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckpointError(
                f"{path}: is a symbolic link, and nothing is written through links; remove it"
            ) from None
        if error.errno == errno.ENXIO:
            raise CheckpointError(f"{path}: is not a regular file; remove it") from None
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
    """Open a regular file for reading and return its descriptor; an `opener` for the built-in `open`.

    Raises: OSError, also for a pipe, which could block, and a device, which may never end.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file", os.fspath(path))
    return descriptor


def _check_file_owner(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: is not a regular file; remove it")
    folder = os.stat(os.path.dirname(path) or ".")
    # Not checked for group-writable folders, because snapshots consist of hard links.
    if folder.st_mode & stat.S_IWOTH and status.st_nlink > 1:
        raise CheckpointError(
            f"{path}: has another name elsewhere (a hard link), in a folder that everybody may write into; remove it"
        )
    if folder.st_mode & _OTHERS_WRITE and status.st_uid not in (os.geteuid(), folder.st_uid):
        raise CheckpointError(
            f"{path}: belongs to user {status.st_uid}, in a folder that others may write into; remove it, or use "
            "another folder"
        )


def write_error(path: Path | str, error: OSError, action: str = "written") -> CheckpointError:
    """Build the error for the user: the file, what failed, the reason, and what to do."""
    remedy = REMEDIES.get(error.errno or 0)
    reason = f"{error.strerror or error}{'; ' + remedy if remedy else ''}"
    return CheckpointError(f"{path}: cannot be {action}: {reason}")


@contextlib.contextmanager
def reserve_temporary(path: Path) -> Iterator[Path]:
    """Yield a sibling name of `path` that no other process, thread or machine uses; reserved until the block ends."""
    temporary = path.with_name(
        f".tmp-{path.name}@{platform.node()}-{os.getpid()}.{next(_temporary_numbers)}"
    )
    _active_temporaries.add(os.path.abspath(temporary))
    try:
        yield temporary
    finally:
        _active_temporaries.discard(os.path.abspath(temporary))


def is_active_temporary(temporary: Path) -> bool:
    """Return whether this process is currently writing the temporary."""
    return os.path.abspath(temporary) in _active_temporaries


def parse_temporary_owner(name: str) -> tuple[str | None, int] | None:
    """Return (host, pid) from a temporary's name, or None for any other name.

    The host is None in names written by older versions.
    """
    match = _TEMPORARY.fullmatch(name)
    return (match[1], int(match[2])) if match else None


def is_process_alive(pid: int) -> bool:
    """Return whether a process of this machine has the pid; a pid too large for the kernel counts as alive."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def fsync_path(path: Path | str) -> None:
    """Flush a file's data, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path | str) -> Path:
    """Create a folder and its parents if absent, durably, and return its path.

    Raises: CheckpointError if it cannot be created.
    """
    path = Path(path)
    missing = list(itertools.takewhile(lambda folder: not folder.is_dir(), (path, *path.parents)))
    try:
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)  # another process may have created it meanwhile
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
    """Yield a file to write to; it replaces `path` atomically when the block ends. If the block raises, `path` stays.

    Args:
        binary: bytes; otherwise UTF-8 text with line ends unchanged.
        synced: flush to the disk at the end. Use False for live views and for files in a folder that is sealed later.
        errors: error handler of the encoding.
        mode: file permissions.
        point: fault point between writing and replacing.
    Raises: CheckpointError naming the file, the reason and what to do.
    """
    path = Path(path)
    text_options = {} if binary else {"encoding": "utf-8", "errors": errors, "newline": ""}
    opener = functools.partial(open_owned_file, mode=mode)
    with reserve_temporary(path) as temporary:
        try:
            if not _is_replaceable(path):
                raise CheckpointError(f"{path}: is not a regular file; remove it")
            with contextlib.suppress(FileNotFoundError):  # left by a dead process with our pid
                os.unlink(temporary)
            with open(temporary, "xb" if binary else "x", opener=opener, **text_options) as file:  # type: ignore[call-overload]
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
            involved_names = (str(temporary), str(path), str(path.parent))
            if isinstance(error, OSError) and (
                error.filename is None or os.fspath(error.filename) in involved_names
            ):
                raise write_error(path, error) from error
            raise
    if synced:
        inject_fault("text.done")


def _is_replaceable(path: Path) -> bool:
    """Return False for a device or a pipe, True otherwise: nothing, a file, or a link (the link itself is replaced)."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return True
    # For a folder, the rename raises the error.
    return stat.S_ISREG(mode) or stat.S_ISLNK(mode) or stat.S_ISDIR(mode)


def write_text_atomic(path: Path | str, text: str, *, point: str | None = None) -> None:
    """Replace a file's text atomically and durably: readers see the old or the new text, even after a crash.

    Args:
        point: fault point between writing and replacing.
    Raises: as `replace_file`.
    """
    with replace_file(path, binary=True, point=point) as file:
        file.write(text.encode())


def write_json_atomic(path: Path | str, value: Any) -> None:
    """Replace a JSON file atomically and durably. Raises: ValueError for NaN and infinities, which are not JSON."""
    write_text_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_text_unsynced(path: Path | str, text: str) -> bool:
    """Replace a live view's text without syncing. Readers see the old or the new text; a machine crash may lose both.

    Never waits for the disk. Returns whether the text was written; a disk error does not raise.
    """
    try:
        with replace_file(path, binary=True, synced=False) as file:
            file.write(text.encode())
    except CheckpointError:
        return False
    return True


def create_file_once(path: Path | str, text: str, *, mode: int = 0o644) -> bool:
    """Create a file that is complete before it gets its name. Return False if another process created it first.

    Raises: CheckpointError if it cannot be written.
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


def protect_database(path: Path) -> None:
    """Let only this user read a SQLite database, also one that a server is about to create.

    One that the group may write to is shared on purpose and stays so.
    Raises: CheckpointError if it cannot be created.
    """
    make_folder(path.parent)
    create_file_once(path, "", mode=0o600)
    for file in (path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")):
        with contextlib.suppress(OSError):  # absent, or of another user
            mode = stat.S_IMODE(file.stat().st_mode)
            if mode & 0o077 and not mode & 0o020:
                file.chmod(mode & 0o700)


def move_into_place(source: Path, path: Path, *, once: bool = False) -> bool:
    """Rename a file that a library or a compiler wrote, after flushing it to the disk.

    Args:
        once: add a second name instead, and return False if a file already has it.
    Raises: CheckpointError.
    """
    try:
        fsync_path(source)
        rename = os.link if once else os.replace
        rename(source, path)
        fsync_path(path.parent)
    except FileExistsError:
        return False
    except OSError as error:
        raise write_error(path, error) from error
    return True


def copy_tree(source: Path, target: Path) -> None:
    """Copy a folder's files into another folder, created if absent; replace each existing file atomically."""
    for path in sorted(source.rglob("*")):
        if path.is_file():
            copy = target / path.relative_to(source)
            make_folder(copy.parent)
            copy_file(path, copy)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file; replace an existing one atomically."""
    with source.open("rb") as source_file, replace_file(target, binary=True) as target_file:
        shutil.copyfileobj(source_file, target_file, 1 << 20)


def open_log_file(path: Path | str, *, append_up_to: int = 0) -> IO[bytes]:
    """Open a file for the output of a child process; writes are neither atomic nor synced.

    Args:
        append_up_to: rename an existing file larger than this many bytes to NAME.1 and start a new one; 0 = always
            start a new one.
    """
    path = Path(path)
    if append_up_to and path.exists() and path.stat().st_size > append_up_to:
        os.replace(path, path.with_name(f"{path.name}.1"))
    return open(path, "ab" if append_up_to else "wb", opener=open_owned_file)
