"""Where commands look for a user's own environments and rewards."""

from __future__ import annotations

import contextlib
import os
import sys

__all__ = ["find_own_code"]


def find_own_code() -> None:
    """What a config names by import path may lie in the folder that the command is called from, as with `python -m`.

    Last on the path: a file there hides nothing that is installed.
    """
    with contextlib.suppress(FileNotFoundError):  # the folder is gone
        if (here := os.getcwd()) not in sys.path:
            sys.path.append(here)
