"""Limits of a process that serves many connections from few threads."""

from __future__ import annotations

import resource
import sys

__all__ = ["raise_file_limit", "switch_threads_soon"]

SWITCH_SECONDS = 0.001  # of the interpreter's lock: threads that need it briefly should not wait 5 ms for it


def raise_file_limit(wanted: int) -> None:
    """Allow this process so many open files, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def switch_threads_soon() -> None:
    """Have threads of this process hand on the interpreter's lock sooner than by default."""
    sys.setswitchinterval(SWITCH_SECONDS)
