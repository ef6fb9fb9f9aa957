"""Setup of a process before its imports: bytecode files, home folder, garbage collection."""

from __future__ import annotations

import contextlib
import gc
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rl_core.errors import SettingsError

MIN_OPEN_FILES = 128
_freeze_pending = False  # the imports of a command are not frozen yet


def disable_bytecode_under_file_limit() -> None:
    """Write no bytecode files in this process and its children under a file size limit (`ulimit -f`).

    Python truncates them at the limit and still publishes them. Later programs that import such a module fail with
    "marshal data too short", even without the limit.
    """
    try:
        from resource import RLIM_INFINITY, RLIMIT_FSIZE, getrlimit
    except ImportError:  # not available on this system
        return
    if getrlimit(RLIMIT_FSIZE)[0] != RLIM_INFINITY:
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


def ensure_open_files() -> None:
    """Allow this process and its children as many open files as the heavy commands need.

    With fewer, a run waits for servers that cannot accept connections.
    Raises: SettingsError if the system does not permit it.
    """
    try:
        from resource import RLIM_INFINITY, RLIMIT_NOFILE, getrlimit, setrlimit
    except ImportError:  # not available on this system
        return
    soft, hard = getrlimit(RLIMIT_NOFILE)
    if soft != RLIM_INFINITY and soft < MIN_OPEN_FILES:
        if hard != RLIM_INFINITY and hard < MIN_OPEN_FILES:
            raise SettingsError(
                f"the limit of open files is {hard}, and at least {MIN_OPEN_FILES} are needed; raise it (ulimit -n)"
            )
        setrlimit(RLIMIT_NOFILE, (MIN_OPEN_FILES, hard))


def ensure_home_folder() -> None:
    """Give a user without HOME and without an entry in the user database a home folder and a name, also for children.

    Containers run with arbitrary user ids, and libraries look for their caches in the home folder. It is then a folder
    of this user in the temporary folder.
    Raises: SettingsError if that belongs to somebody else.
    """
    try:
        Path.home()
    except RuntimeError:
        folder = os.path.join(tempfile.gettempdir(), f"posttrain-home-{os.getuid()}")
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        status = os.lstat(folder)
        is_private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o022
        if not is_private or status.st_uid != os.getuid():
            raise SettingsError(
                f"this user has no home folder, and {folder} is not theirs alone; set HOME"
            ) from None
        os.environ["HOME"] = folder
        if not os.environ.keys() & {"LOGNAME", "USER", "LNAME", "USERNAME"}:
            os.environ["USER"] = str(os.getuid())


@contextlib.contextmanager
def pause_garbage_collection(*, is_command: bool = False) -> Iterator[None]:
    """Disable garbage collection within the block, whose many imported objects it would scan repeatedly in vain.

    Args:
        is_command: the process was started for these imports and holds no objects of a user; see
            `freeze_imported_objects`.
    """
    global _freeze_pending
    _freeze_pending = _freeze_pending or (is_command and gc.get_freeze_count() == 0)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def freeze_imported_objects() -> None:
    """Exclude the objects that a command imported from later collections, each of which would take half a second.

    This happens once per process, and only in those of commands: a notebook's unreachable models would stay as well.
    """
    global _freeze_pending
    if _freeze_pending:
        gc.freeze()
    _freeze_pending = False
