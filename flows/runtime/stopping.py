"""SIGTERM outside a training loop (which saves and stops by itself): unwinds the stack like Ctrl-C, in bounded time.

So is the time after Ctrl-C, once the iteration that it waits for has ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

# Set by the first SIGTERM, and by Ctrl-C within `bounded(interrupt=True)`. Its exception may be swallowed by a
# destructor, a callback from C or a bare `except`, all frequent in imports; then the next stage, or the next iteration
# of a loop, stops.
stop_requested = threading.Event()

FORCED_EXIT_SECONDS = 7.0  # after such a signal; what has not unwound by then (a long call into C, a server that hangs) is left
EXIT_CALLBACK_SECONDS = 1.0  # for noting that the run was stopped
POLL_SECONDS = 0.1  # between two looks at a training loop that finishes its iteration

_forced_exit_callbacks: list[Callable[[], None]] = []


class TerminatedBySignal(KeyboardInterrupt):
    """SIGTERM arrived. Not an Exception, as KeyboardInterrupt: imports and start-up code would catch it."""


def unwind_on_sigterm() -> None:
    """Install a handler: SIGTERM raises Terminated in the main thread."""
    stop_requested.clear()

    def stop(signum: int, frame: FrameType | None) -> NoReturn:
        stop_requested.set()
        raise TerminatedBySignal

    try:
        signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread, where signals cannot be handled
        return


def schedule_sigterm(seconds: float | None) -> None:
    """Send this process SIGTERM after `seconds`, as a scheduler with a time limit does; None = never."""
    if seconds is None:
        return
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.name = "stop after"
    timer.start()


@contextlib.contextmanager
def on_forced_exit(callback: Callable[[], None]) -> Iterator[None]:
    """Have `say` called, in another thread, if the process has to be ended within the block."""
    _forced_exit_callbacks.append(callback)
    try:
        yield
    finally:
        _forced_exit_callbacks.remove(callback)


@contextlib.contextmanager
def bound_shutdown_time(
    seconds: float | None = None,
    code: int = 128 + signal.SIGTERM,
    *,
    include_interrupt: bool = False,
    is_resumable: bool = True,
) -> Iterator[None]:
    """End this process `seconds` after a SIGTERM that arrives within the block, whatever then still runs.

    Args:
        seconds: None = LAST_SECONDS. code: exit code of a process that is ended so by SIGTERM.
        interrupt: do so after Ctrl-C as well, once no training loop has it wait for its iteration any more.
        resumes: True = what is ended so has checkpoints, from which the same command goes on.

    A thread learns of the signal from the file that the interpreter's own handler writes to: also while the main thread
    is in C, and whoever handles the signal there (Prefect does within a flow, the training loop within training).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    given = (read, seconds, code, include_interrupt, is_resumable)
    threading.Thread(target=_exit_after_signal, args=given, name="stop", daemon=True).start()
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(before)
        os.close(
            write
        )  # the thread reads the end, unless it has seen the signal: then the end of the process is bound


@contextlib.contextmanager
def suspend_shutdown_bound() -> Iterator[None]:
    """Take the bound away within a `bounded` block, for one that handles SIGTERM itself and waits for children."""
    before = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)


def _exit_after_signal(
    read: int, seconds: float | None, code: int, interrupt: bool, resumes: bool
) -> None:
    signum = _wait_for_signal(read, interrupt)
    if signum is None:
        os.close(read)
        return
    stop_requested.set()
    threading.Event().wait(FORCED_EXIT_SECONDS if seconds is None else seconds)
    for say in list(_forced_exit_callbacks):
        thread = threading.Thread(target=say, daemon=True)
        thread.start()
        thread.join(EXIT_CALLBACK_SECONDS)
    how = "Ctrl-C" if signum == signal.SIGINT else "SIGTERM"
    more = "; the same command resumes from the last checkpoint" if resumes else ""
    print(f"posttrain: stopped by {how}{more}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(code if signum == signal.SIGTERM else 128 + signum)


def _wait_for_signal(read: int, interrupt: bool) -> int | None:
    """The signal that ends the process in bounded time; None = the block is over without one."""
    interrupted = False
    while True:
        if interrupted and not _has_running_training_loop():
            return signal.SIGINT
        if interrupted and not select.select([read], [], [], POLL_SECONDS)[0]:
            continue
        seen = os.read(read, 64)
        if signal.SIGTERM in seen:
            return signal.SIGTERM
        if not seen:
            return signal.SIGINT if interrupted else None
        interrupted = interrupted or (interrupt and signal.SIGINT in seen)


def _has_running_training_loop() -> bool:
    """True = a training loop handles Ctrl-C: it saves and stops after its iteration, however long that takes."""
    signals = sys.modules.get(
        "rl_core.training.signals"
    )  # a loop can only run where it is imported
    handler = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    return signals is not None and isinstance(handler, signals.StopRequests)
