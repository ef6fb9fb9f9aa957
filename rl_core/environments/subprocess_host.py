"""Subprocess pool for code that executes model output or may never return.

Unlike a thread, a process can be killed. Children stay alive between requests, since their imports take seconds. They
are limited in time and memory and see only a few environment variables, but are no sandbox: they run as the same user,
with its files and its network.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rl_core.errors import PosttrainError

__all__ = ["ChildFailed", "ChildPool", "ChildTimeout"]

_START_S = 600.0  # importing a large package from a cold disk, downloading what it needs
# Environment variables passed to a child: no tokens, keys or server addresses.
_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "HF_HOME", "HF_DATASETS_CACHE", "XDG_CACHE_HOME")


class ChildFailed(PosttrainError):
    """A child's function raised, or the child died; the message gives the cause."""


class ChildTimeout(ChildFailed):
    """A child exceeded its time limit and was killed."""


class ChildPool:
    """Up to `count` children that serve requests with the function `handle` of a script. Thread-safe."""

    def __init__(
        self,
        script: Path,
        *,
        setup: dict[str, Any],
        count: int,
        timeout_s: float,
        memory_gib: float | None = None,
        variables: Iterable[str] = (),
    ) -> None:
        """Children start on demand, with the first requests.

        Args:
            script: a Python file with `start(setup)`, called once in each child, and `handle(request)`.
            count: maximum number of children, hence of concurrent requests.
            timeout_s: time limit of one request, not counting the start of a child.
            memory_gib: address space of a child; None = no limit.
            variables: names of additional environment variables passed to children.
        """
        self._script, self._timeout_s = script, timeout_s
        self._options = {"setup": setup, "memory_gib": memory_gib, "last_resort_s": timeout_s + 30.0}
        self._variables = (*_VARIABLES, *variables)
        # Last in, first out: starts as few children as possible.
        self._places: queue.LifoQueue[_Child | None] = queue.LifoQueue()
        for _ in range(count):
            self._places.put(None)
        self._alive: list[_Child] = []
        weakref.finalize(self, _kill_all, self._alive)

    def ask(self, request: dict[str, Any]) -> Any:
        """Result of `handle(request)`, decoded from JSON; blocks while all children are busy.

        Raises: ChildTimeout if there is no reply within the limit; ChildFailed if it raised or the child died.
        """
        child = self._places.get()
        try:
            if child is None:
                child = self._start()
            reply = child.ask(request, self._timeout_s)
        except BaseException:  # an interrupted request would leave a stale reply in the pipe
            if child is not None:
                child.kill()
                self._alive.remove(child)
                child = None
            raise
        finally:
            self._places.put(child)
        if "error" in reply:
            raise ChildFailed(reply["error"])
        return reply["value"]

    def _start(self) -> _Child:
        variables = {name: os.environ[name] for name in self._variables if name in os.environ}
        variables |= {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", str(Path(__file__).with_name("subprocess_main.py")), str(self._script)]
        child = _Child([*command, json.dumps(self._options)], variables)
        try:
            reply = child.receive(_START_S)
            if "error" in reply:
                raise ChildFailed(reply["error"])
        except ChildFailed:
            child.kill()
            raise
        self._alive.append(child)
        return child


class _Child:
    """One process in its own process group, so that its descendants are killed with it."""

    def __init__(self, command: list[str], variables: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=tempfile.gettempdir(),
            env=variables,
            start_new_session=True,
        )
        self._buffer = b""

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a request and block for its reply."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ChildFailed(f"a child process died (exit status {self._process.poll()})") from error
        return self.receive(timeout_s)

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """Next reply of the child."""
        assert self._process.stdout is not None
        channel = self._process.stdout.fileno()
        end = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            readable, _, _ = select.select([channel], [], [], max(0.0, end - time.monotonic()))
            if not readable:
                raise ChildTimeout(f"no answer within {timeout_s:g} s")
            part = os.read(channel, 2**16)
            if not part:
                self._process.wait()
                raise ChildFailed(f"a child process died (exit status {self._process.returncode})")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def kill(self) -> None:
        """Kill the process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _kill_all(children: list[_Child]) -> None:
    for child in children:
        child.kill()
