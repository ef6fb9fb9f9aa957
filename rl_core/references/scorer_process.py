"""Reference model in a separate process.

The process ends with its owner's connection, so it never outlives the owner. Messages are a JSON head and an array of
numbers; nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
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
from rl_core.processes.process_pool import ConnectedChild, MessageChannel, ProcessPool
from rl_core.references.scorer import RowScores, TokenRows

_ERROR_TYPES = {
    kind.__name__: kind
    for kind in (CheckpointError, CorruptError, DataError, ModelError, OutOfMemory, SettingsError)
}


class ScorerProcess(ProcessPool[ConnectedChild]):
    """Scorer that passes rows to a child process; a child that dies is restarted once."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        """Start the child and load the model in it.

        Args:
            setup: arguments of `process_main.load_requested_scorer`.
        Raises: the error of loading, with its type and message.
        """
        super().__init__(1)
        self._setup = dict(setup)
        with self.use_child():
            pass

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
        try:
            reply, values = self._exchange_messages(head, tokens)
        except (EOFError, OSError):
            try:
                reply, values = self._exchange_messages(head, tokens)
            except (EOFError, OSError) as error:
                raise BackendError(
                    f"the process of the reference model died, and so did another (out of memory?): {error}"
                ) from error
        _raise_child_error(reply)
        return reply, values

    def _exchange_messages(
        self, head: Mapping[str, Any], values: np.ndarray
    ) -> tuple[dict[str, Any], np.ndarray]:
        with self.use_child() as child:
            send_message(child, head, values)
            return receive_message(child)

    @property
    def bytes(self) -> int:
        """Bytes of the model's weights."""
        return int(self._load_reply["bytes"])

    def _start_child(self) -> ConnectedChild:
        return ConnectedChild("rl_core.references.process_main")

    def _set_up_child(self, child: ConnectedChild) -> None:
        try:
            send_message(child, self._setup, np.zeros(0))
            self._load_reply, _ = receive_message(child)
        except (EOFError, OSError) as error:
            raise BackendError(
                "the process of the reference model died during loading (out of memory?)"
            ) from error
        _raise_child_error(self._load_reply)


def send_message(connection: MessageChannel, head: Mapping[str, Any], values: np.ndarray) -> None:
    """Send a message."""
    connection.send_bytes(json.dumps({**head, "dtype": str(values.dtype)}).encode())
    connection.send_bytes(np.ascontiguousarray(values).tobytes())


def receive_message(connection: MessageChannel) -> tuple[dict[str, Any], np.ndarray]:
    """Wait for a message. Raises: EOFError if the other side has closed the connection."""
    head: dict[str, Any] = json.loads(connection.recv_bytes())
    return head, np.frombuffer(connection.recv_bytes(), dtype=head.pop("dtype"))


def split_rows(values: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    """Split concatenated rows into rows of these lengths."""
    return [values[begin:end] for begin, end in pairwise(np.cumsum([0, *lengths]).tolist())]


def _raise_child_error(reply: Mapping[str, Any]) -> None:
    if "error" in reply:
        raise _ERROR_TYPES.get(reply["kind"], BackendError)(reply["error"])
