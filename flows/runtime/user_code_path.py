"""Import path of a user's own environments and rewards."""

from __future__ import annotations

import contextlib
import os
import sys

__all__ = ["find_own_code"]


def find_own_code() -> None:
    """Append the working directory to the import path, as with `python -m`.

    Last on the path, so that files there do not shadow installed packages.
    """
    with contextlib.suppress(FileNotFoundError):  # the working directory was deleted
        if (here := os.getcwd()) not in sys.path:
            sys.path.append(here)
