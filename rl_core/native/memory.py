"""How glibc's allocator treats memory that was freed."""

from __future__ import annotations

import ctypes
import functools
import os
import platform

__all__ = ["keep_freed_memory"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of mallopt(3)
_MOST = 2**31 - 1
_SET_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES", "LD_PRELOAD")


@functools.cache
def keep_freed_memory() -> bool:
    """Keep what this process frees for its next tensors, instead of giving it back to the operating system.

    A training step allocates the same tensors as the one before. What glibc gives back in between has to be mapped,
    page by page, and filled with zeros again: on virtual machines up to a tenth of a step. The peak stays what it was.
    Whoever has set the allocator by its environment variables, or brought another one, is left alone.
    Returns: whether it was done.
    """
    if platform.libc_ver()[0] != "glibc" or any(os.environ.get(name) for name in _SET_BY_USER):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MMAP_THRESHOLD, _MOST) and mallopt(_TRIM_THRESHOLD, _MOST))
