"""Pool of child processes that answer requests, and children that exchange bytes over a connection.

The users differ in what they send: JSON lines through the pipes of a sandbox
(`rl_core/environments/subprocess_host.py`), pickles (`rl_core/data/tokenising.py`), arrays
(`rl_core/references/scorer_process.py`). A sweep's trials stay apart (`flows/sweep/trial_process.py`): one job sends
many events, and its process may run on another machine.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import subprocess
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection, Pipe
from typing import Any, Generic, Protocol, TypeVar

from rl_core.processes.children import start_child, wait_or_kill
from rl_core.user_code.load import build_child_import_path

_POLL_SECONDS = 1.0  # between checks whether a child has died without closing its connection
SHUTDOWN_SECONDS = 10.0  # for a child to end after its connection is closed


class PooledChild(Protocol):
    """Child process of a pool."""

    def end_process(self) -> None:
        """End the process, wait for it and free what belongs to it; a second call does nothing."""


Child = TypeVar("Child", bound=PooledChild)


class ProcessPool(ABC, Generic[Child]):
    """Up to `count` children, started on demand, each of which serves one thread at a time. Thread-safe.

    The children end with the pool.
    """

    def __init__(self, count: int) -> None:
        # Last in, first out: starts as few children as possible.
        self._child_slots: queue.LifoQueue[Child | None] = queue.LifoQueue()
        for _ in range(count):
            self._child_slots.put(None)
        self._live_children: list[Child] = []
        weakref.finalize(self, _end_children, self._live_children)

    @abstractmethod
    def _start_child(self) -> Child:
        """Start a child, without waiting for it."""

    @abstractmethod
    def _set_up_child(self, child: Child) -> None:
        """Wait until a new child accepts requests."""

    @contextlib.contextmanager
    def use_child(self) -> Iterator[Child]:
        """Lend a child for one request; block while all children are busy.

        A child whose request raises is ended, because it may be dead or have a stale reply in its pipe; the next
        request starts another one. Raises: errors of the start.
        """
        child = self._child_slots.get()
        try:
            if child is None:
                child = self._start_child()
                self._live_children.append(child)
                self._set_up_child(child)
            yield child
        except BaseException:
            if child is not None:
                child.end_process()
                with contextlib.suppress(ValueError):  # ended by `end_children`
                    self._live_children.remove(child)
                child = None
            raise
        finally:
            self._child_slots.put(child)

    def end_children(self) -> None:
        """End all children. The pool answers no request afterwards."""
        _end_children(self._live_children)


def _end_children(children: list[Child]) -> None:
    while children:
        children.pop().end_process()


class MessageChannel(Protocol):
    """One end of a connection: `ConnectedChild`, or `Connection` in the child."""

    def send_bytes(self, message: bytes, /) -> None:
        """Send a message."""

    def recv_bytes(self) -> bytes:
        """Wait for a message."""


class ConnectedChild:
    """Child that runs a module of this project and exchanges bytes with its owner; it ends with the connection.

    The module's program gets the descriptor of its end as argument and passes it to `connect_to_owner`.
    """

    def __init__(
        self, module: str, variables: Mapping[str, str] | None = None, *, quiet: bool = False
    ) -> None:
        """Start the child.

        Args:
            variables: environment variables in addition to those of this process.
            quiet: discard the child's output.
        Raises: OSError.
        """
        self.connection, child_end = Pipe()
        output = subprocess.DEVNULL if quiet else None
        with child_end:
            self.process = start_child(
                [sys.executable, "-P", "-m", module, str(child_end.fileno())],
                stdout=output,
                stderr=output,
                environment={
                    **os.environ,
                    **(variables or {}),
                    "PYTHONPATH": build_child_import_path(),
                },
                descriptors=[child_end.fileno()],
            )

    def send_bytes(self, message: bytes) -> None:
        """Send a message. Raises: OSError if the child has died."""
        self.connection.send_bytes(message)

    def recv_bytes(self) -> bytes:
        """Wait for a message and return it. Raises: EOFError if the child has died."""
        while not self.connection.poll(_POLL_SECONDS):
            if self.process.poll() is not None and not self.connection.poll(0):
                raise EOFError
        return self.connection.recv_bytes()

    def end_process(self) -> None:
        """Close the connection, which ends the child, and wait for it; kill it after `SHUTDOWN_SECONDS`."""
        self.connection.close()
        wait_or_kill(self.process, SHUTDOWN_SECONDS)


class OwnerConnection(Connection):
    """A child's end of the connection. Sending or receiving after the owner has closed it ends this process."""

    def recv_bytes(self, maxlength: int | None = None) -> bytes:
        """Wait for a message and return it."""
        try:
            return super().recv_bytes(maxlength)
        except (EOFError, OSError):
            os._exit(0)

    def send_bytes(self, buf: Any, offset: int = 0, size: int | None = None) -> None:
        """Send a message."""
        try:
            super().send_bytes(buf, offset, size)
        except OSError:
            os._exit(0)


def connect_to_owner(descriptor: int) -> OwnerConnection:
    """Return a child's connection to its owner; this process ends when the owner closes it, even during its work."""
    threading.Thread(target=_exit_with_owner, args=(descriptor,), daemon=True).start()
    return OwnerConnection(descriptor)


def _exit_with_owner(descriptor: int) -> None:
    poller = select.poll()
    poller.register(descriptor, select.POLLRDHUP)
    while not poller.poll():
        continue
    os._exit(0)
