"""The place of a training request in its run's order, read from the bytes: what is large is not unpacked for it.

A few bytes can claim to hold millions of messages, so their number is counted before they are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.message import DecodeError

from flows.service.wire.message_table import message
from rl_core.errors import ServiceError

__all__ = ["forward_backward_head", "parse_forward_backward"]

MOST_FIELDS = 1 << 20  # of a request and its datums together
_MODEL_ID, _SEQ_ID, _DATA = 1, 2, 3  # fields
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types


class _Truncated(Exception):
    """The bytes end within a field, or are none."""


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number and the place behind it."""
    number = shift = 0
    while shift < 70 and at < len(data):
        byte = data[at]
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return number, at
    raise _Truncated


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """(field, number, start, end) of each field of a message; the number of those that are one, else 0."""
    while at < end:
        tag, at = _varint(data, at)
        number, start, kind = 0, at, tag & 7
        if kind == _VARINT:
            number, at = _varint(data, at)
        elif kind == _BYTES:
            size, start = _varint(data, at)
            at = start + size
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            raise _Truncated
        yield tag >> 3, number, start, at
        if at > end:
            raise _Truncated


def forward_backward_head(payload: bytes, *, is_whole: bool = True) -> tuple[str, int]:
    """(training run, seq_id) of a message, or of the first bytes of one. Raises: ServiceError (user)."""
    model_id, seq_id, count = b"", 0, 0
    try:
        for field, number, start, end in _fields(payload, 0, len(payload)):
            count += 1
            if field == _MODEL_ID:
                model_id = payload[start:end]
            elif field == _SEQ_ID:
                seq_id = number
            elif field == _DATA and is_whole:
                if end > len(payload):
                    raise _Truncated
                for _ in _fields(payload, start, end):
                    count += 1
                    _check_number(count)
            _check_number(count)
    except _Truncated:
        if is_whole:
            raise ServiceError("forward_backward: the body is cut off, or no ForwardBackwardRequest", "user") from None
    if not 0 < len(model_id) <= 200 or b"\0" in model_id:
        raise ServiceError("forward_backward: model_id is missing, too long, or no text", "user")
    if not 1 <= seq_id < 1 << 31:
        raise ServiceError(f"forward_backward: seq_id is {seq_id}, expected 1 or more", "user")
    return model_id.decode(errors="replace"), seq_id


def _check_number(count: int) -> None:
    if count > MOST_FIELDS:
        raise ServiceError(f"forward_backward: the body holds more than {MOST_FIELDS} parts", "user")


def parse_forward_backward(payload: bytes) -> Any:
    """The protobuf message. Raises: ServiceError (user) for bytes that are none."""
    forward_backward_head(payload)
    found = message("ForwardBackwardRequest")
    try:
        found.ParseFromString(payload)
    except (DecodeError, ValueError) as error:
        raise ServiceError(f"forward_backward: the body is no ForwardBackwardRequest ({error})", "user") from None
    return found
