"""Large tensors from one process to another through shared memory, each segment removed once it is acknowledged.

The message that travels over the connection names the segment and the layout of its tensors; the bytes are in the
segment. The receiver copies them out (into pinned memory where there is a GPU), lets go, and acknowledges; the sender
then removes the segment. What is not acknowledged counts towards a bound, so a receiver that hangs costs a bounded
amount. Nothing stays behind: `close` removes the rest, and after a kill the reaper does, at the next start of either.

The tensors are a short cut, never the only copy: what must not be lost is in the log.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from rl_core.errors import CheckpointError, CorruptError, DataError
from rl_core.storage.session_resources import (
    SHARED_MEMORY,
    SharedSegment,
    attach_segment,
    generate_sender_token,
    remove_stale_segments,
)

_ALIGNMENT_BYTES = 64  # bytes; a cache line
MAX_MESSAGE_BYTES = 1 << 20
_DTYPES_BY_NAME = {
    str(kind).removeprefix("torch."): kind
    for kind in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


class TensorSender:
    """One end of a channel. A context manager: at its end no segment of it is left."""

    def __init__(
        self, connection: Connection, *, max_bytes: int, folder: Path = SHARED_MEMORY
    ) -> None:
        """max_bytes: of all segments that are not acknowledged."""
        self.connection = connection
        self.max_bytes = max_bytes
        self.folder = folder
        self.token = generate_sender_token()
        self.num_refused = 0  # sends that found no room
        self._unacknowledged_segments: OrderedDict[int, SharedSegment] = OrderedDict()
        self._number = 0

    def __enter__(self) -> TensorSender:
        remove_stale_segments(folder=self.folder)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def unacknowledged_bytes(self) -> int:
        """Bytes of the segments that are not acknowledged."""
        return sum(segment.size for segment in self._unacknowledged_segments.values())

    def send_tensors(
        self, tensors: Mapping[str, torch.Tensor], tag: str = "", *, timeout_s: float = 0.0
    ) -> bool:
        """Send tensors under a tag; False = no room in `timeout_s`, or nobody is there any more: nothing was sent.

        Raises: DataError for a dtype that is not known, or more bytes than the channel may ever hold.
        """
        layout, size = _plan_layout(tensors)
        if size > self.max_bytes:
            raise DataError(
                f"tensors of {size} bytes do not fit into a channel of {self.max_bytes}"
            )
        if not self._make_room(size, time.monotonic() + timeout_s):
            self.num_refused += 1
            return False
        try:
            segment = SharedSegment(size, token=self.token, folder=self.folder)
        except CheckpointError:
            self.num_refused += 1
            return False
        try:
            for name, tensor in tensors.items():
                _write_tensor(segment, layout[name], tensor)
            message = {
                "number": self._number,
                "segment": segment.name,
                "size": size,
                "tag": tag,
                "tensors": layout,
            }
            self.connection.send_bytes(json.dumps(message).encode())
        except OSError:  # the receiver is gone
            segment.close()
            self.num_refused += 1
            return False
        except BaseException:
            segment.close()
            raise
        self._unacknowledged_segments[self._number] = segment
        self._number += 1
        return True

    def collect_acknowledgements(self, timeout_s: float = 0.0) -> int:
        """Take acknowledgements in, and remove their segments; returns how many."""
        count = 0
        try:
            while self._unacknowledged_segments and self.connection.poll(
                timeout_s if not count else 0.0
            ):
                segment = self._unacknowledged_segments.pop(
                    _read_acknowledged_number(self.connection.recv_bytes(MAX_MESSAGE_BYTES)), None
                )
                if segment is not None:
                    segment.close()
                    count += 1
        except (OSError, EOFError):  # the receiver is gone: it will acknowledge nothing any more
            self._remove_segments()
        return count

    def close(self) -> None:
        """Remove every segment."""
        self._remove_segments()
        self.connection.close()

    def _remove_segments(self) -> None:
        while self._unacknowledged_segments:
            self._unacknowledged_segments.popitem()[1].close()

    def _make_room(self, size: int, deadline: float) -> bool:
        self.collect_acknowledgements()
        while self.unacknowledged_bytes + size > self.max_bytes:
            left = deadline - time.monotonic()
            if left <= 0 or (
                not self.collect_acknowledgements(left)
                and self.unacknowledged_bytes + size > self.max_bytes
            ):
                return False
        return True


class TensorReceiver:
    """The other end. A context manager."""

    def __init__(
        self, connection: Connection, *, pin: bool | None = None, folder: Path = SHARED_MEMORY
    ) -> None:
        """pin: copy into pinned memory; None = where there is a GPU."""
        self.connection = connection
        self.folder = folder
        self.pin = torch.cuda.is_available() if pin is None else pin

    def __enter__(self) -> TensorReceiver:
        remove_stale_segments(folder=self.folder)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.connection.close()
        remove_stale_segments(folder=self.folder)  # of a sender that was killed

    def receive_tensors(
        self, timeout_s: float | None = 0.0
    ) -> tuple[str, dict[str, torch.Tensor]] | None:
        """The next (tag, tensors), copied and acknowledged; None = nothing in time, or the sender is gone.

        Raises: CorruptError for a message that no sender wrote; the channel can go on.
        """
        try:
            if not self.connection.poll(timeout_s):
                return None
            message = _parse_message(self.connection.recv_bytes(MAX_MESSAGE_BYTES))
        except (OSError, EOFError):
            return None
        try:
            tensors = self._read_tensors(message)
        finally:
            self._acknowledge_message(message)
        return str(message.get("tag", "")), tensors

    def _read_tensors(self, message: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        try:
            memory = attach_segment(
                str(message["segment"]), int(message["size"]), folder=self.folder
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptError(f"message of a tensor channel: {error}") from error
        try:
            return {
                name: self._copy_tensor(memory, place) for name, place in message["tensors"].items()
            }
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptError(f"message of a tensor channel: {error}") from error
        finally:
            memory.close()

    def _copy_tensor(self, memory: Any, layout: Mapping[str, Any]) -> torch.Tensor:
        kind, shape, start = (
            _DTYPES_BY_NAME[layout["dtype"]],
            [int(size) for size in layout["shape"]],
            int(layout["start"]),
        )
        size = torch.empty((), dtype=kind).element_size() * int(np.prod(shape, dtype=np.int64))
        if start < 0 or min(shape, default=0) < 0 or start + size > len(memory):
            raise ValueError(f"a tensor of shape {shape} lies outside the segment")
        data = bytearray(memory[start : start + size])
        tensor = (
            torch.frombuffer(data, dtype=kind).reshape(shape)
            if size
            else torch.empty(shape, dtype=kind)
        )
        return tensor.pin_memory() if self.pin else tensor

    def _acknowledge_message(self, message: Mapping[str, Any]) -> None:
        try:
            self.connection.send_bytes(json.dumps({"done": message.get("number")}).encode())
        except OSError:  # the sender is gone, and its segments with it
            return


def _plan_layout(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, dict[str, Any]], int]:
    """Place of each tensor in the segment, and its size in bytes."""
    layout: dict[str, dict[str, Any]] = {}
    size = 0
    for name, tensor in tensors.items():
        kind = str(tensor.dtype).removeprefix("torch.")
        if kind not in _DTYPES_BY_NAME:
            raise DataError(
                f"{name}: dtype {kind} does not travel; known: {', '.join(_DTYPES_BY_NAME)}"
            )
        layout[name] = {"dtype": kind, "shape": list(tensor.shape), "start": size}
        size += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return layout, max(1, size)


def _write_tensor(segment: SharedSegment, layout: Mapping[str, Any], tensor: torch.Tensor) -> None:
    if tensor.numel():
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy()
        start = int(layout["start"])
        segment.memory[start : start + len(data)] = data.tobytes()


def _parse_message(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"message of a tensor channel: {error}") from error
    if not isinstance(found, dict):
        raise CorruptError("message of a tensor channel: is no object")
    return found


def _read_acknowledged_number(data: bytes) -> int:
    try:
        return int(_parse_message(data).get("done", -1))
    except (CorruptError, TypeError, ValueError):
        return -1
