"""Calls with a time limit, on daemon threads that are terminated when they are late.

Python cannot kill a thread. An exception raised in it from outside (`PyThreadState_SetAsyncExc` of Python's C API) ends
every loop written in Python at its next byte code; a call that blocks in C, such as a read from a socket without a
timeout, ends when that returns. Threads that are still running are counted, and at most MAX_HUNG may hang per process.
"""

from __future__ import annotations

import contextvars
import ctypes
import logging
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_HUNG = 32
_POLL_INTERVAL_S = 0.1
_GRACE_S = 0.1  # for a late call to end after termination was requested

_hung_threads: list[threading.Thread] = []
_lock = threading.Lock()


class CallTimeout(Exception):
    """A call did not return within its time limit."""


class TooManyHungCalls(CallTimeout):
    """MAX_HUNG earlier calls hang, so this one was not started."""


class _CallTerminated(BaseException):
    """Exception raised within a late call; no `except Exception` catches it."""


def count_hung_calls() -> int:
    """Return the number of late calls of this process that still run, after requesting their termination again."""
    if not _hung_threads:
        return 0
    with _lock:
        _hung_threads[:] = [thread for thread in _hung_threads if thread.is_alive()]
        for thread in _hung_threads:
            _raise_in_thread(thread)
        return len(_hung_threads)


def call_with_timeout(
    seconds: float, name: str, function: Callable[..., T], *args: Any, counts_cpu_time: bool = False
) -> T:
    """Return the result of `function`, run on a separate thread in the caller's context; raise its exceptions here.

    Args:
        name: of the call, for the thread's name and warnings.
        counts_cpu_time: `seconds` are CPU time of the thread, which a busy machine does not use up.
    Raises: CallTimeout after `seconds`; TooManyHungCalls.
    """
    count = count_hung_calls()
    if count >= MAX_HUNG:
        raise TooManyHungCalls(f"{name} is out of service; {count} earlier calls still hang")
    outcome: list[tuple[Any, BaseException | None]] = []
    context = contextvars.copy_context()

    def work() -> None:
        try:
            outcome.append((context.run(function, *args), None))
        except _CallTerminated:
            pass
        except BaseException as error:
            outcome.append((None, error))

    # A daemon thread, so that process exit does not wait for it.
    thread = threading.Thread(target=work, daemon=True, name=name)
    thread.start()
    thread.join(seconds)
    while counts_cpu_time and thread.is_alive() and _measure_cpu_seconds(thread) < seconds:
        thread.join(_POLL_INTERVAL_S)
    if not outcome:
        terminate_thread(thread)
        raise CallTimeout(f"{name} did not return within {seconds:g} s")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


def _measure_cpu_seconds(thread: threading.Thread) -> float:
    """Return the CPU time that a thread has used; infinite if unknown, or if the thread has just ended."""
    try:
        stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    except OSError:
        return math.inf
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def terminate_thread(thread: threading.Thread) -> None:
    """Request the end of a late call's thread; count the thread if it does not end within a short grace period."""
    _raise_in_thread(thread)
    thread.join(_GRACE_S)
    if not thread.is_alive():
        return
    with _lock:
        _hung_threads.append(thread)
        count = len(_hung_threads)
    logger.warning(
        "%s is late and does not end; %d such calls hang, at most %d may",
        thread.name,
        count,
        MAX_HUNG,
    )


def _raise_in_thread(thread: threading.Thread) -> None:
    if thread.ident is not None and thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(_CallTerminated)
        )
