"""SIGTERM and Ctrl-C: unwind the stack, and end the process in bounded time.

A training loop saves and stops by itself. Elsewhere SIGTERM unwinds the stack like Ctrl-C. After Ctrl-C the time is
bounded once the current iteration has ended.
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

# Set by the first SIGTERM, and by Ctrl-C within `bound_shutdown_time(include_interrupt=True)`. Its exception may be
# swallowed by a destructor, a callback from C or a bare `except`, all frequent in imports; then the next stage, or the
# next iteration of a loop, stops.
stop_requested = threading.Event()

# After a signal; a long call into C or a hanging server may not have unwound by then.
FORCED_EXIT_SECONDS = 7.0
EXIT_CALLBACK_SECONDS = 1.0  # for recording that the run was stopped
POLL_SECONDS = 0.1  # while a training loop finishes its iteration

_forced_exit_callbacks: list[Callable[[], None]] = []
_reached_limits: list[float] = []  # seconds of the `--stop-after` that sent SIGTERM


class TerminatedBySignal(KeyboardInterrupt):
    """SIGTERM arrived. Not an Exception, like KeyboardInterrupt: imports and start-up code would catch it."""


def unwind_on_sigterm() -> None:
    """Install a handler with which SIGTERM raises TerminatedBySignal in the main thread."""
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
    _reached_limits.clear()
    if seconds is None:
        return

    def stop() -> None:
        _reached_limits.append(seconds)
        if signals := sys.modules.get("rl_core.training.signals"):  # imported by every loop
            signals.signal_causes[signal.SIGTERM] = describe_signal(signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    timer.name = "stop after"
    timer.start()


def describe_signal(signum: int) -> str:
    """Describe to the user what sent a signal that stops a command: Ctrl-C, SIGTERM or `--stop-after`."""
    if signum == signal.SIGINT:
        return "Ctrl-C"
    if _reached_limits:
        return f"the time limit of {_reached_limits[0]:g} s (--stop-after)"
    return "SIGTERM"


@contextlib.contextmanager
def on_forced_exit(callback: Callable[[], None]) -> Iterator[None]:
    """Call `callback` in another thread if the process has to be ended within the block."""
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

    A thread learns of the signal from the file that the interpreter's handler writes to. That works even while the
    main thread is in C, and whoever handles the signal there (Prefect within a flow, the training loop within
    training).
    Args:
        seconds: None = FORCED_EXIT_SECONDS.
        code: exit code of a process that is ended this way by SIGTERM.
        include_interrupt: also after Ctrl-C, once no training loop waits for its iteration.
        is_resumable: the command has checkpoints from which it resumes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    previous = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    thread_arguments = (read_end, seconds, code, include_interrupt, is_resumable)
    threading.Thread(
        target=_exit_after_signal, args=thread_arguments, name="stop", daemon=True
    ).start()
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(previous)
        # The thread reads the end of file, unless it has seen the signal and will end the process.
        os.close(write_end)


@contextlib.contextmanager
def suspend_shutdown_bound() -> Iterator[None]:
    """Suspend `bound_shutdown_time` within the block, for code that handles SIGTERM and waits for children."""
    previous = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)


def _exit_after_signal(
    read_end: int, seconds: float | None, code: int, include_interrupt: bool, is_resumable: bool
) -> None:
    signum = _wait_for_signal(read_end, include_interrupt)
    if signum is None:
        os.close(read_end)
        return
    stop_requested.set()
    threading.Event().wait(FORCED_EXIT_SECONDS if seconds is None else seconds)
    for callback in list(_forced_exit_callbacks):
        thread = threading.Thread(target=callback, daemon=True)
        thread.start()
        thread.join(EXIT_CALLBACK_SECONDS)
    hint = "; the same command resumes from the last checkpoint" if is_resumable else ""
    print(f"posttrain: stopped by {describe_signal(signum)}{hint}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(code if signum == signal.SIGTERM else 128 + signum)


def _wait_for_signal(read_end: int, include_interrupt: bool) -> int | None:
    """Return the signal that bounds the shutdown; None if the block ends without one."""
    interrupted = False
    while True:
        if interrupted and not _has_running_training_loop():
            return signal.SIGINT
        if interrupted and not select.select([read_end], [], [], POLL_SECONDS)[0]:
            continue
        signums = os.read(read_end, 64)
        if signal.SIGTERM in signums:
            return signal.SIGTERM
        if not signums:
            return signal.SIGINT if interrupted else None
        interrupted = interrupted or (include_interrupt and signal.SIGINT in signums)


def _has_running_training_loop() -> bool:
    """Return whether a training loop handles Ctrl-C: it saves and stops after its iteration, however long."""
    signals = sys.modules.get("rl_core.training.signals")  # imported by every loop
    handler = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    return signals is not None and isinstance(handler, signals.StopRequests)
