"""A reference model in a process of its own.

The process ends with its owner's connection, so it never outlives the one who asks. Messages are a JSON head and an
array of numbers; nothing is pickled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from itertools import pairwise
from multiprocessing.connection import Connection, Pipe
from typing import Any

import numpy as np

from rl_core.errors import (
    BackendError,
    CheckpointError,
    CorruptError,
    DataError,
    ModelError,
    OutOfMemory,
    SettingsError,
)
from rl_core.importing import child_import_path
from rl_core.references.scorer import Answer, Rows

__all__ = ["ScorerProcess", "receive", "send", "split"]

_ERRORS = {
    kind.__name__: kind for kind in (CheckpointError, CorruptError, DataError, ModelError, OutOfMemory, SettingsError)
}
_POLL_S = 1.0
END_SECONDS = 10.0


class ScorerProcess:
    """A `Scorer` that hands rows to a child process; started again once where the child dies."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        """Start the child and load the model in it.

        Args:
            setup: arguments of `process_main.start`.
        Raises: what loading raised, by its kind and message.
        """
        self._setup = dict(setup)
        self._lock = threading.Lock()
        self._start()

    def score(self, rows: Rows, temperature: float = 1.0) -> Answer:
        """See `Scorer`. Raises: BackendError where the process died twice."""
        reply, values = self._answer(rows, {"temperature": temperature})
        return split(values, reply["lengths"])

    def logits(self, rows: Rows, begin: int, end: int) -> np.ndarray:
        """See `ModelScorer.logits`. Raises: as `score`."""
        _, values = self._answer(rows, {"begin": begin, "end": end})
        return values.reshape(end - begin, -1).copy()

    def _answer(self, rows: Rows, question: Mapping[str, Any]) -> tuple[dict[str, Any], np.ndarray]:
        """The child's answer about some rows; a child that died is started again once."""
        tokens = np.array([token for row in rows for token in row], dtype=np.int64)
        head = {"lengths": [len(row) for row in rows], **question}
        with self._lock:
            try:
                reply, values = self._ask(head, tokens)
            except (EOFError, OSError):
                self.close()
                self._start()
                try:
                    reply, values = self._ask(head, tokens)
                except (EOFError, OSError) as error:
                    raise BackendError("the process of the reference model died twice (out of memory?)") from error
        _raise(reply)
        return reply, values

    def close(self) -> None:
        """End the process; it is waited for."""
        self._end()

    @property
    def bytes(self) -> int:
        """Bytes of the model's weights."""
        return int(self._loaded["bytes"])

    def _start(self) -> None:
        ours, theirs = Pipe()
        command = [sys.executable, "-P", "-m", "rl_core.references.process_main", str(theirs.fileno())]
        child = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": child_import_path()},
        )
        theirs.close()
        self._connection, self._child = ours, child
        self._end = weakref.finalize(self, _end, ours, child)
        try:
            self._loaded, _ = self._ask(self._setup, np.zeros(0))
        except (EOFError, OSError) as error:
            self.close()
            raise BackendError("the process of the reference model died while it loaded (out of memory?)") from error
        if "error" in self._loaded:
            self.close()
        _raise(self._loaded)

    def _ask(self, head: Mapping[str, Any], values: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
        send(self._connection, head, values)
        while not self._connection.poll(_POLL_S):
            if self._child.poll() is not None and not self._connection.poll(0):
                raise EOFError
        return receive(self._connection)


def send(connection: Connection, head: Mapping[str, Any], values: np.ndarray) -> None:
    """Send a message."""
    connection.send_bytes(json.dumps({**head, "dtype": str(values.dtype)}).encode())
    connection.send_bytes(np.ascontiguousarray(values).tobytes())


def receive(connection: Connection) -> tuple[dict[str, Any], np.ndarray]:
    """Wait for a message. Raises: EOFError where the other side is gone."""
    head: dict[str, Any] = json.loads(connection.recv_bytes())
    return head, np.frombuffer(connection.recv_bytes(), dtype=head.pop("dtype"))


def split(values: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    """The rows of these lengths that lie one after the other."""
    return [values[begin:end] for begin, end in pairwise(np.cumsum([0, *lengths]).tolist())]


def _raise(reply: Mapping[str, Any]) -> None:
    if "error" in reply:
        raise _ERRORS.get(reply["kind"], BackendError)(reply["error"])


def _end(connection: Connection, child: subprocess.Popen[bytes]) -> None:
    connection.close()  # which ends it
    try:
        child.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
