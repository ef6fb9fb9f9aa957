"""Compiled modules that Python keeps on the disk, under a limit of file sizes (`ulimit -f`).

Python cuts one at the limit and publishes it all the same, and every later program that imports the module ends with
"marshal data too short", also without the limit.
"""

from __future__ import annotations

import os
import sys

__all__ = ["keep_them_whole"]


def keep_them_whole() -> None:
    """Under such a limit, have this process and its children write no compiled modules."""
    try:
        from resource import RLIM_INFINITY, RLIMIT_FSIZE, getrlimit
    except ImportError:  # not on this system
        return
    if getrlimit(RLIMIT_FSIZE)[0] != RLIM_INFINITY:
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
