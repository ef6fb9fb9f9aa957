"""CPU memory: keeping freed memory in the process, huge pages, arenas and scratch buffers."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import platform
import threading

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)
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
    """Keep memory that this process frees for its next tensors instead of returning it to the operating system.

    A training step allocates the same tensors as the previous one. Memory that glibc returns in between must be
    mapped page by page and zeroed again: on virtual machines up to a tenth of a step. Peak memory does not change. An
    allocator that is configured by environment variables, or another allocator, is not touched.

    Returns: whether the setting was made.
    """
    if platform.libc_ver()[0] != "glibc" or any(os.environ.get(name) for name in _USER_VARIABLES):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(
        mallopt(_MMAP_THRESHOLD, _MAX_THRESHOLD) and mallopt(_TRIM_THRESHOLD, _MAX_THRESHOLD)
    )


def allocate_huge_pages(size: int) -> torch.Tensor:
    """Allocate `size` zeroed bytes, on 2 MiB pages if the system has them, because these are read faster."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)  # keeps a reference to `memory`
    start = -buffer.data_ptr() % _HUGE_PAGE_BYTES
    return buffer[start : start + size]


class Arena:
    """A bump allocator: memory is handed out piece by piece and reused after `reset`."""

    def __init__(self, chunk: int = 2**26) -> None:
        """Create an empty arena.

        Args:
            chunk: bytes to reserve at a time.
        """
        self._chunk = chunk
        self._chunks: list[torch.Tensor] = []
        self.reset()

    def reset(self) -> None:
        """Start over; memory handed out earlier is overwritten."""
        self._number = self._used = 0

    def allocate_bytes(self, size: int) -> torch.Tensor:
        """Allocate `size` bytes at a multiple of 64."""
        size += -size % 64
        while self._number < len(self._chunks):
            if self._used + size <= len(self._chunks[self._number]):
                break
            self._number, self._used = self._number + 1, 0
        if self._number == len(self._chunks):
            self._chunks.append(allocate_huge_pages(max(size, self._chunk)))
        start = self._used
        self._used += size
        return self._chunks[self._number][start : self._used]


class ScratchMemory:
    """Scratch memory of calls, one buffer per Python thread."""

    def __init__(self) -> None:
        self._thread_local = threading.local()

    def reserve_address(self, size: int) -> int:
        """Return the address of `size` uninitialised bytes, a multiple of 64."""
        memory: torch.Tensor | None = getattr(self._thread_local, "memory", None)
        if memory is None or len(memory) < size + 64:
            self._thread_local.memory = memory = torch.empty(size + 64, dtype=torch.uint8)
        address: int = memory.data_ptr()
        return address + -address % 64
