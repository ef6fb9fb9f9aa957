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
    """Have the kernel kill this process (SIGKILL) when its parent, the process `parent`, dies for any reason.

    Exit immediately if the parent is already dead. Does nothing on systems other than Linux: there the children of a
    parent killed by SIGKILL notice only a broken connection.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def wait_for_exit(pids: Iterable[int], timeout_s: float) -> list[int]:
    """Wait for processes that are being killed and are not children of this process; return those that still run."""
    deadline = time.monotonic() + timeout_s
    running = list(pids)
    while True:
        running = [pid for pid in running if _is_running(pid)]
        if not running or time.monotonic() > deadline:
            return running
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        # A zombie only waits to be reaped by init.
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
