"""Channel for large tensors between two processes through shared memory.

A message on the connection names a segment and the layout of its tensors; the bytes are in the segment. The receiver
copies them (into pinned memory if there is a GPU), unmaps the segment and acknowledges; the sender then removes it.
Unacknowledged segments count towards a limit, so a hanging receiver costs a bounded amount of memory. No segment is
left behind: `close` removes the rest, and after a crash either side removes stale segments at its next start.

The tensors are a shortcut, never the only copy: what must not be lost is in the log.
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

_ALIGNMENT_BYTES = 64  # a cache line
MAX_MESSAGE_BYTES = 1 << 20
_DTYPES_BY_NAME = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
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
    """Sending end of a channel; a context manager that leaves no segment behind."""

    def __init__(
        self, connection: Connection, *, max_bytes: int, folder: Path = SHARED_MEMORY
    ) -> None:
        """Configure the sender.

        Args:
            max_bytes: of all unacknowledged segments.
        """
        self.connection = connection
        self.max_bytes = max_bytes
        self.folder = folder
        self.token = generate_sender_token()
        self.num_refused = 0  # sends without enough space
        self._pending_segments: OrderedDict[int, SharedSegment] = OrderedDict()
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
        """Total size of the unacknowledged segments."""
        return sum(segment.size for segment in self._pending_segments.values())

    def send_tensors(
        self, tensors: Mapping[str, torch.Tensor], tag: str = "", *, timeout_s: float = 0.0
    ) -> bool:
        """Send tensors under a tag; return False if there is no space within `timeout_s`, or no receiver any more.

        Raises: DataError for an unsupported dtype, or more bytes than the channel can hold.
        """
        layout, size = _plan_layout(tensors)
        if size > self.max_bytes:
            raise DataError(
                f"tensors of {size} bytes do not fit into a channel of {self.max_bytes}"
            )
        if not self._wait_for_space(size, time.monotonic() + timeout_s):
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
        except OSError:  # the receiver has closed the connection
            segment.close()
            self.num_refused += 1
            return False
        except BaseException:
            segment.close()
            raise
        self._pending_segments[self._number] = segment
        self._number += 1
        return True

    def collect_acknowledgements(self, timeout_s: float = 0.0) -> int:
        """Process acknowledgements, remove their segments and return their number."""
        count = 0
        try:
            while self._pending_segments and self.connection.poll(0.0 if count else timeout_s):
                data = self.connection.recv_bytes(MAX_MESSAGE_BYTES)
                segment = self._pending_segments.pop(_read_acknowledged_number(data), None)
                if segment is not None:
                    segment.close()
                    count += 1
        except (OSError, EOFError):  # the receiver has gone away and will acknowledge nothing
            self._remove_segments()
        return count

    def close(self) -> None:
        """Remove every segment and close the connection."""
        self._remove_segments()
        self.connection.close()

    def _remove_segments(self) -> None:
        while self._pending_segments:
            self._pending_segments.popitem()[1].close()

    def _wait_for_space(self, size: int, deadline: float) -> bool:
        self.collect_acknowledgements()
        while self.unacknowledged_bytes + size > self.max_bytes:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return False
            num_acknowledged = self.collect_acknowledgements(remaining_s)
            if not num_acknowledged and self.unacknowledged_bytes + size > self.max_bytes:
                return False
        return True


class TensorReceiver:
    """Receiving end of a channel; a context manager."""

    def __init__(
        self, connection: Connection, *, pin: bool | None = None, folder: Path = SHARED_MEMORY
    ) -> None:
        """Configure the receiver.

        Args:
            pin: copy into pinned memory; None = if there is a GPU.
        """
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
        remove_stale_segments(folder=self.folder)  # left by a killed sender

    def receive_tensors(
        self, timeout_s: float | None = 0.0
    ) -> tuple[str, dict[str, torch.Tensor]] | None:
        """Return the next (tag, tensors), copied and acknowledged; None on timeout, or if the sender has gone away.

        Raises: CorruptError for an invalid message; the channel stays usable.
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
            tensors = message["tensors"]
            return {name: self._copy_tensor(memory, layout) for name, layout in tensors.items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptError(f"message of a tensor channel: {error}") from error
        finally:
            memory.close()

    def _copy_tensor(self, memory: Any, layout: Mapping[str, Any]) -> torch.Tensor:
        dtype, start = _DTYPES_BY_NAME[layout["dtype"]], int(layout["start"])
        shape = [int(size) for size in layout["shape"]]
        size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        if start < 0 or min(shape, default=0) < 0 or start + size > len(memory):
            raise ValueError(f"a tensor of shape {shape} lies outside the segment")
        if size:
            data = bytearray(memory[start : start + size])
            tensor = torch.frombuffer(data, dtype=dtype).reshape(shape)
        else:
            tensor = torch.empty(shape, dtype=dtype)
        return tensor.pin_memory() if self.pin else tensor

    def _acknowledge_message(self, message: Mapping[str, Any]) -> None:
        try:
            self.connection.send_bytes(json.dumps({"done": message.get("number")}).encode())
        except OSError:  # the sender has gone away, and its segments with it
            return


def _plan_layout(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, dict[str, Any]], int]:
    """Return the position of each tensor in the segment, and the segment's size in bytes."""
    layout: dict[str, dict[str, Any]] = {}
    size = 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _DTYPES_BY_NAME:
            raise DataError(
                f"{name}: dtype {dtype} cannot be sent; known: {', '.join(_DTYPES_BY_NAME)}"
            )
        layout[name] = {"dtype": dtype, "shape": list(tensor.shape), "start": size}
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
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"message of a tensor channel: {error}") from error
    if not isinstance(message, dict):
        raise CorruptError("message of a tensor channel: not an object")
    return message


def _read_acknowledged_number(data: bytes) -> int:
    try:
        return int(_parse_message(data).get("done", -1))
    except (CorruptError, TypeError, ValueError):
        return -1
