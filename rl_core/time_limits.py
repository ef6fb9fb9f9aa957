"""Calls with a time limit, on daemon threads that are made to end when they are late.

Python cannot kill a thread. An exception raised in it from outside (`PyThreadState_SetAsyncExc` of Python's C API) ends
every loop written in Python, at its next byte code; a call that waits in C, such as a read from a socket without a
timeout, ends when that returns. What is still there is counted, and at most MAX_HUNG calls of a process may hang.
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
_GRACE_S = 0.1  # for a late call to end when it is told to

_hung_threads: list[threading.Thread] = []
_lock = threading.Lock()


class CallTimeout(Exception):
    """A call did not return within its time."""


class TooManyHungCalls(CallTimeout):
    """MAX_HUNG earlier calls hang; this one was not begun."""


class _CallTerminated(BaseException):
    """Raised within a late call; no `except Exception` catches it."""


def count_hung_calls() -> int:
    """Number of late calls of this process that still run; each is told again to end."""
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
    """Result of `function`, run on a thread of its own in the caller's context; whatever it raises is raised here.

    Args:
        name: of the call, in the thread's name and in warnings.
        of_cpu: `seconds` are of the thread's processor time, which a busy machine does not use up.
    Raises: CallTimeout after `seconds`; TooManyHung.
    """
    if (count := count_hung_calls()) >= MAX_HUNG:
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

    # daemon: exit does not wait for it
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
    """Processor time that a thread has used; infinite where the system does not say, or it has just ended."""
    try:
        stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    except OSError:
        return math.inf
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def terminate_thread(thread: threading.Thread) -> None:
    """Make a late call's thread end; count it if it does not at once."""
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
