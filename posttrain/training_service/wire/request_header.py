"""Header of a protobuf training request: its run and sequence id, read without unpacking the large fields.

A few bytes can claim to hold millions of messages, so the messages are counted before they are created.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.message import DecodeError

from posttrain.training_service.wire.protobuf_messages import create_message
from rl_core.errors import ServiceError

MAX_FIELDS = 1 << 20  # fields of a request and its datums together
_MODEL_ID, _SEQ_ID, _DATA = 1, 2, 3  # field numbers
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types


class _Truncated(Exception):
    """Bytes that end within a field, or are no message."""


def _read_varint(data: bytes, offset: int) -> tuple[int, int]:
    """Read a varint; return it and the offset after it."""
    number = shift = 0
    while shift < 70 and offset < len(data):
        byte = data[offset]
        number |= (byte & 127) << shift
        offset, shift = offset + 1, shift + 7
        if byte < 128:
            return number, offset
    raise _Truncated


def _scan_fields(data: bytes, offset: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (field number, varint value, start, end) of each field of a message; the value is 0 for other types."""
    while offset < end:
        tag, offset = _read_varint(data, offset)
        value, start, wire_type = 0, offset, tag & 7
        if wire_type == _VARINT:
            value, offset = _read_varint(data, offset)
        elif wire_type == _BYTES:
            size, start = _read_varint(data, offset)
            offset = start + size
        elif wire_type in (_FIXED64, _FIXED32):
            offset += 8 if wire_type == _FIXED64 else 4
        else:
            raise _Truncated
        yield tag >> 3, value, start, offset
        if offset > end:
            raise _Truncated


def read_request_header(payload: bytes, *, is_complete: bool = True) -> tuple[str, int]:
    """Return (training run, seq_id) of a message, or of the first bytes of one. Raises: ServiceError (user)."""
    model_id, seq_id, count = b"", 0, 0
    try:
        for field, number, start, end in _scan_fields(payload, 0, len(payload)):
            count += 1
            if field == _MODEL_ID:
                model_id = payload[start:end]
            elif field == _SEQ_ID:
                seq_id = number
            elif field == _DATA and is_complete:
                if end > len(payload):
                    raise _Truncated
                for _ in _scan_fields(payload, start, end):
                    count += 1
                    _check_field_count(count)
            _check_field_count(count)
    except _Truncated:
        if is_complete:
            raise ServiceError(
                "forward_backward: the body is truncated, or no ForwardBackwardRequest", "user"
            ) from None
    if not 0 < len(model_id) <= 200 or b"\0" in model_id:
        raise ServiceError("forward_backward: model_id is missing, too long, or no text", "user")
    if not 1 <= seq_id < 1 << 31:
        raise ServiceError(f"forward_backward: seq_id is {seq_id}, expected 1 or more", "user")
    return model_id.decode(errors="replace"), seq_id


def _check_field_count(count: int) -> None:
    if count > MAX_FIELDS:
        raise ServiceError(f"forward_backward: the body holds more than {MAX_FIELDS} parts", "user")


def parse_forward_backward(payload: bytes) -> Any:
    """Parse the protobuf message. Raises: ServiceError (user) for invalid bytes."""
    read_request_header(payload)
    message = create_message("ForwardBackwardRequest")
    try:
        message.ParseFromString(payload)
    except (DecodeError, ValueError) as error:
        raise ServiceError(
            f"forward_backward: the body is no ForwardBackwardRequest ({error})", "user"
        ) from None
    return message
