"""Reference model in a separate process.

The process ends with its owner's connection, so it never outlives the owner. Messages are a JSON head and an array of
numbers; nothing is pickled.
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
from rl_core.references.scorer import RowScores, TokenRows
from rl_core.user_code.load import build_child_import_path

_ERROR_TYPES = {
    kind.__name__: kind
    for kind in (CheckpointError, CorruptError, DataError, ModelError, OutOfMemory, SettingsError)
}
_POLL_SECONDS = 1.0
SHUTDOWN_SECONDS = 10.0


class ScorerProcess:
    """Scorer that passes rows to a child process; a child that dies is restarted once."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        """Start the child and load the model in it.

        Args:
            setup: arguments of `process_main.load_requested_scorer`.
        Raises: the error of loading, with its type and message.
        """
        self._setup = dict(setup)
        self._lock = threading.Lock()
        self._start_child()

    def score_rows(self, rows: TokenRows, temperature: float = 1.0) -> RowScores:
        """See `RowScorer`. Raises: BackendError if the process died twice."""
        reply, values = self._request_with_restart(rows, {"temperature": temperature})
        return split_rows(values, reply["lengths"])

    def compute_logits(self, rows: TokenRows, begin: int, end: int) -> np.ndarray:
        """See `ModelScorer.compute_logits`. Raises: as `score_rows`."""
        _, values = self._request_with_restart(rows, {"begin": begin, "end": end})
        return values.reshape(end - begin, -1).copy()

    def _request_with_restart(
        self, rows: TokenRows, options: Mapping[str, Any]
    ) -> tuple[dict[str, Any], np.ndarray]:
        """Return the child's reply about some rows; restart a dead child once."""
        tokens = np.array([token for row in rows for token in row], dtype=np.int64)
        head = {"lengths": [len(row) for row in rows], **options}
        with self._lock:
            try:
                reply, values = self._exchange_messages(head, tokens)
            except (EOFError, OSError):
                self.close()
                self._start_child()
                try:
                    reply, values = self._exchange_messages(head, tokens)
                except (EOFError, OSError) as error:
                    raise BackendError(
                        "the process of the reference model died twice (out of memory?)"
                    ) from error
        _raise_child_error(reply)
        return reply, values

    def close(self) -> None:
        """End the process and wait for it."""
        self._end()

    @property
    def bytes(self) -> int:
        """Bytes of the model's weights."""
        return int(self._load_reply["bytes"])

    def _start_child(self) -> None:
        connection, child_connection = Pipe()
        descriptor = child_connection.fileno()
        program = ["-P", "-m", "rl_core.references.process_main"]
        child = subprocess.Popen(
            [sys.executable, *program, str(descriptor)],
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": build_child_import_path()},
        )
        child_connection.close()
        self._connection, self._child = connection, child
        self._end = weakref.finalize(self, _stop_child, connection, child)
        try:
            self._load_reply, _ = self._exchange_messages(self._setup, np.zeros(0))
        except (EOFError, OSError) as error:
            self.close()
            raise BackendError(
                "the process of the reference model died during loading (out of memory?)"
            ) from error
        if "error" in self._load_reply:
            self.close()
        _raise_child_error(self._load_reply)

    def _exchange_messages(
        self, head: Mapping[str, Any], values: np.ndarray
    ) -> tuple[dict[str, Any], np.ndarray]:
        send_message(self._connection, head, values)
        while not self._connection.poll(_POLL_SECONDS):
            if self._child.poll() is not None and not self._connection.poll(0):
                raise EOFError
        return receive_message(self._connection)


def send_message(connection: Connection, head: Mapping[str, Any], values: np.ndarray) -> None:
    """Send a message."""
    connection.send_bytes(json.dumps({**head, "dtype": str(values.dtype)}).encode())
    connection.send_bytes(np.ascontiguousarray(values).tobytes())


def receive_message(connection: Connection) -> tuple[dict[str, Any], np.ndarray]:
    """Wait for a message. Raises: EOFError if the other side has closed the connection."""
    head: dict[str, Any] = json.loads(connection.recv_bytes())
    return head, np.frombuffer(connection.recv_bytes(), dtype=head.pop("dtype"))


def split_rows(values: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    """Split concatenated rows into rows of these lengths."""
    return [values[begin:end] for begin, end in pairwise(np.cumsum([0, *lengths]).tolist())]


def _raise_child_error(reply: Mapping[str, Any]) -> None:
    if "error" in reply:
        raise _ERROR_TYPES.get(reply["kind"], BackendError)(reply["error"])


def _stop_child(connection: Connection, child: subprocess.Popen[bytes]) -> None:
    connection.close()  # ends the child
    try:
        child.wait(SHUTDOWN_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
