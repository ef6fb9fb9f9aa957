"""Memory on a CPU: keeping freed memory in the process, huge pages, arenas and scratch buffers."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import platform
import threading

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of mallopt(3)
_MAX_THRESHOLD = 2**31 - 1
_HUGE_PAGE_BYTES = 2**21
_USER_VARIABLES = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
)


@functools.cache
def keep_freed_memory() -> bool:
    """Keep what this process frees for its next tensors, instead of giving it back to the operating system.

    A training step allocates the same tensors as the one before. What glibc gives back in between has to be mapped,
    page by page, and filled with zeros again: on virtual machines up to a tenth of a step. The peak stays what it was.
    An allocator that is configured by environment variables, or another one, is left alone. Returns: True = done.
    """
    if platform.libc_ver()[0] != "glibc" or any(os.environ.get(name) for name in _USER_VARIABLES):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(
        mallopt(_MMAP_THRESHOLD, _MAX_THRESHOLD) and mallopt(_TRIM_THRESHOLD, _MAX_THRESHOLD)
    )


def allocate_huge_pages(size: int) -> torch.Tensor:
    """`size` bytes of zeroed memory on pages of 2 MiB where the system has them: they are read faster."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # holds on to `memory`
    start = -whole.data_ptr() % _HUGE_PAGE_BYTES
    return whole[start : start + size]


class Arena:
    """Bump allocator: memory is given out piece by piece, and all of it again after `reset`."""

    def __init__(self, chunk: int = 2**26) -> None:
        """chunk: bytes that are reserved at a time."""
        self._chunk = chunk
        self._chunks: list[torch.Tensor] = []
        self.reset()

    def reset(self) -> None:
        """Start over; memory given out before is overwritten."""
        self._number = self._used = 0

    def allocate_bytes(self, size: int) -> torch.Tensor:
        """`size` bytes at a multiple of 64."""
        size += -size % 64
        while self._number < len(self._chunks) and self._used + size > len(
            self._chunks[self._number]
        ):
            self._number, self._used = self._number + 1, 0
        if self._number == len(self._chunks):
            self._chunks.append(allocate_huge_pages(max(size, self._chunk)))
        taken = self._chunks[self._number][self._used : self._used + size]
        self._used += size
        return taken


class ScratchMemory:
    """Scratch memory of calls: each Python thread has its own, and keeps it."""

    def __init__(self) -> None:
        self._thread_local = threading.local()

    def reserve_address(self, size: int) -> int:
        """The address, a multiple of 64, of `size` uninitialised bytes."""
        memory: torch.Tensor | None = getattr(self._thread_local, "memory", None)
        if memory is None or len(memory) < size + 64:
            self._thread_local.memory = memory = torch.empty(size + 64, dtype=torch.uint8)
        place: int = memory.data_ptr()
        return place + -place % 64
