"""Compiled modules that Python keeps on the disk, under a limit of file sizes (`ulimit -f`).

Python cuts one at the limit and publishes it all the same, and every later program that imports the module ends with
"marshal data too short", also without the limit.

Import path of a user's own environments and rewards.

Imports without the garbage collector, which would look through their many objects again and again in vain.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator


def disable_bytecode_under_file_limit() -> None:
    """Under such a limit, have this process and its children write no compiled modules."""
    try:
        from resource import RLIM_INFINITY, RLIMIT_FSIZE, getrlimit
    except ImportError:  # not on this system
        return
    if getrlimit(RLIMIT_FSIZE)[0] != RLIM_INFINITY:
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


def append_working_directory() -> None:
    """Append the working directory to the import path, as with `python -m`.

    Last on the path, so that files there do not shadow installed packages.
    """
    with contextlib.suppress(FileNotFoundError):  # the working directory was deleted
        if (here := os.getcwd()) not in sys.path:
            sys.path.append(here)


_freeze_pending = False  # what this process has imported is a command's, and not frozen yet


@contextlib.contextmanager
def pause_garbage_collection(*, is_command: bool = False) -> Iterator[None]:
    """Context in which this process collects no garbage; afterwards it does, if it did before.

    of_command: the process was started for these imports and holds nothing of a user's yet; see `freeze_imported_objects`.
    """
    global _freeze_pending
    _freeze_pending = _freeze_pending or (is_command and gc.get_freeze_count() == 0)
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def freeze_imported_objects() -> None:
    """Leave all objects that a command has imported out of later collections, each of which would take half a second.

    Done once in a process, and in those of commands alone: a notebook's unreachable models would stay, too.
    """
    global _freeze_pending
    if _freeze_pending:
        gc.freeze()
    _freeze_pending = False
