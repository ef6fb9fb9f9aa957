"""Child processes that do not outlive their parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable

import psutil

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def bind_to_parent(parent: int) -> None:
    """Have the kernel kill this process (SIGKILL) when its parent, the process `parent`, dies, however it dies.

    Exits at once where it is dead already. On systems other than Linux nothing is done: there a parent that is killed
    with SIGKILL leaves its children to notice a broken connection.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def wait_for_exit(pids: Iterable[int], timeout_s: float) -> list[int]:
    """Wait for processes that are being killed and are no children of this one; returns those that still run."""
    end = time.monotonic() + timeout_s
    left = list(pids)
    while True:
        left = [pid for pid in left if _is_running(pid)]
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        # a zombie waits for init alone
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
