"""Imports without the garbage collector, which would look through their many objects again and again in vain."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["freeze_imports", "without_collection"]

_to_freeze = False  # what this process has imported is a command's, and not frozen yet


@contextlib.contextmanager
def without_collection(*, of_command: bool = False) -> Iterator[None]:
    """Context in which this process collects no garbage; afterwards it does, if it did before.

    of_command: the process was started for these imports and holds nothing of a user's yet; see `freeze_imports`.
    """
    global _to_freeze
    _to_freeze = _to_freeze or (of_command and gc.get_freeze_count() == 0)
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def freeze_imports() -> None:
    """Leave all objects that a command has imported out of later collections, each of which would take half a second.

    Done once in a process, and in those of commands alone: a notebook's unreachable models would stay, too.
    """
    global _to_freeze
    if _to_freeze:
        gc.freeze()
    _to_freeze = False
