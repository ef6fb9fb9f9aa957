"""Start, stop and parent-death binding of child processes.

A child gets a session of its own, so Ctrl-C in the terminal reaches only its parent, and its process group can be
signalled as a whole. Programs that import nothing of this project bind themselves: `subreaper.py`,
`rl_core/environments/sandbox.py` and `code_child.py`, `rl_core/models/export_verification_child.py`.

The kernel binds a child to the thread that forks it, and most threads end long before their process: those that open an
episode, those of a pool. Children are therefore forked by the main thread or by one that never ends.
"""

from __future__ import annotations

import ctypes
import functools
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any

from rl_core.storage.atomic_files import make_folder, open_log_file

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
KEEPER_SCRIPT = Path(__file__).with_name("subreaper.py")
MAX_SERVER_LOG_BYTES = 20 * 2**20
START_LINE = "--- started "  # begins the log of each start


@functools.cache
def _load_prctl() -> Any:
    return ctypes.CDLL(None, use_errno=True).prctl


def bind_to_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent, the process `parent`, dies for any reason.

    Exit immediately if the parent is already dead. The signal also arrives when only the thread that forked this
    process ends; `start_child` forks in one that does not. Do nothing on systems other than Linux: there the children
    of a parent killed by SIGKILL notice only a broken connection.
    """
    if not sys.platform.startswith("linux"):
        return
    _load_prctl()(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def start_child(
    command: Sequence[str],
    *,
    log: Path | None = None,
    append_up_to: int = 0,
    header: str = "",
    stdin: int | None = subprocess.DEVNULL,
    stdout: int | None = None,
    stderr: int | None = None,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    descriptors: Sequence[int] = (),
    death_signal: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own.

    Args:
        log: file for the output, instead of `stdout` and `stderr`; its folder is created.
        append_up_to: size of the log in bytes up to which it is appended to (`open_log_file`); 0 = always a new one.
        header: first text of the output in the log.
        environment: None = that of this process.
        descriptors: file descriptors that the child inherits.
        death_signal: sent to the child when this process ends (Linux), even by SIGKILL; None = the child lives on
            unless it binds itself.
    Raises: OSError.
    """
    bind = None
    if death_signal is not None and sys.platform.startswith("linux"):
        _load_prctl()  # here, because the child may not load libraries between fork and exec
        bind = functools.partial(bind_to_parent, os.getpid(), death_signal)

    def start(stdout: int | IO[bytes] | None, stderr: int | None) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=environment,
            cwd=folder,
            pass_fds=descriptors,
            start_new_session=True,
            preexec_fn=bind,
        )

    if log is None:
        return _fork_in_lasting_thread(lambda: start(stdout, stderr))
    make_folder(log.parent)
    with open_log_file(log, append_up_to=append_up_to) as output:
        output.write(header.encode())
        output.flush()
        return _fork_in_lasting_thread(lambda: start(output, subprocess.STDOUT))


_ChildStart = Callable[[], subprocess.Popen[bytes]]


class _ForkingThread:
    """Daemon thread that starts children for other threads and ends with its process."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[tuple[_ChildStart, Future[subprocess.Popen[bytes]]]]
        self._requests = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True, name="start of children").start()

    def run_in_thread(self, start: _ChildStart) -> subprocess.Popen[bytes]:
        """Run a function in the thread; return its result or raise its error."""
        result: Future[subprocess.Popen[bytes]] = Future()
        self._requests.put((start, result))
        return result.result()

    def _serve(self) -> None:
        while True:
            start, result = self._requests.get()
            try:
                result.set_result(start())
            except BaseException as error:  # re-raised by `run_in_thread`
                result.set_exception(error)
            del start, result  # until the next request they would hold the child


@functools.cache
def _start_forking_thread(process: int) -> _ForkingThread:
    """Start the thread of a process: after a fork it is missing in the child, whose number is another."""
    return _ForkingThread()


def _fork_in_lasting_thread(start: _ChildStart) -> subprocess.Popen[bytes]:
    if threading.current_thread() is threading.main_thread():
        return start()
    return _start_forking_thread(os.getpid()).run_in_thread(start)


def spawn_server(
    command: Sequence[str],
    environment: Mapping[str, str] | None,
    folder: Path | None,
    log: Path,
    *,
    lead: float = 0.0,
    soft: float = 5.0,
    grace: float = 15.0,
) -> subprocess.Popen[bytes]:
    """Start a command under a keeper, in its own session, with output appended to `log`.

    Args:
        lead: seconds for the server's children to end before the server is signalled; see subreaper.py.
        soft, grace: seconds from the server's SIGTERM to that of the whole tree, and to SIGKILL.
    """
    keeper = [sys.executable, "-I", "-S", str(KEEPER_SCRIPT), str(os.getpid())]
    return start_child(
        [*keeper, str(lead), str(soft), str(grace), *command],
        log=log,
        append_up_to=MAX_SERVER_LOG_BYTES,
        header=f"{START_LINE}{time.strftime('%Y-%m-%d %H:%M:%S')}\n",
        environment=environment,
        folder=folder,
    )


def signal_group(child: subprocess.Popen[Any], number: int) -> bool:
    """Signal the process group of a child of `start_child`; return False if no process is left in it.

    Descendants may outlive the child, so an ended child's group is signalled as well.
    """
    try:
        os.killpg(child.pid, number)
        return True
    except (ProcessLookupError, PermissionError):
        return False


def stop_child(child: subprocess.Popen[Any], grace_s: float) -> int:
    """End a child: SIGTERM, after `grace_s` seconds SIGKILL; return its exit code."""
    child.terminate()
    return wait_or_kill(child, grace_s)


def stop_group(child: subprocess.Popen[Any], grace_s: float) -> int:
    """End a child and its process group: SIGTERM, after `grace_s` seconds SIGKILL; return its exit code."""
    if child.poll() is None:
        signal_group(child, signal.SIGTERM)
    return wait_or_kill(child, grace_s, whole_group=True)


def kill_group(child: subprocess.Popen[Any]) -> int:
    """Kill a child and its process group; return its exit code."""
    signal_group(child, signal.SIGKILL)
    return child.wait()


def wait_or_kill(child: subprocess.Popen[Any], grace_s: float, *, whole_group: bool = False) -> int:
    """Wait up to `grace_s` seconds for the end of a child, then kill it or its group; return its exit code."""
    try:
        return child.wait(grace_s)
    except subprocess.TimeoutExpired:
        if whole_group:
            return kill_group(child)
        child.kill()
        return child.wait()
