"""The place of a training request in its run's order, read without computing anything else of it."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError

from flows.service.wire.message_table import message
from rl_core.errors import ServiceError

__all__ = ["forward_backward_head", "parse_forward_backward"]

_MODEL_ID, _SEQ_ID = 0x0A, 0x10  # tags of fields 1 (text) and 2 (number)


def parse_forward_backward(payload: bytes) -> Any:
    """The protobuf message. Raises: ServiceError (user) for bytes that are none."""
    found = message("ForwardBackwardRequest")
    try:
        found.ParseFromString(payload)
    except (DecodeError, ValueError) as error:
        raise ServiceError(f"forward_backward: the body is no ForwardBackwardRequest ({error})", "user") from None
    return found


def forward_backward_head(payload: bytes, *, is_whole: bool = True) -> tuple[str, int]:
    """(training run, seq_id) of a message, or of the first bytes of one. Raises: ServiceError (user)."""
    if is_whole:
        found = parse_forward_backward(payload)
        model_id, seq_id = found.model_id, found.seq_id
    else:
        model_id, seq_id = _of_first_bytes(payload)
    if not model_id or len(model_id) > 200:
        raise ServiceError("forward_backward: model_id is missing or too long", "user")
    if seq_id < 1:
        raise ServiceError(f"forward_backward: seq_id is {seq_id}, expected 1 or more", "user")
    return model_id, seq_id


def _of_first_bytes(payload: bytes) -> tuple[str, int]:
    """Fields 1 and 2, which come first, as every encoder writes them; ("", 0) for anything else."""
    if len(payload) < 2 or payload[0] != _MODEL_ID or payload[1] > 127:
        return "", 0
    end = 2 + payload[1]
    if payload[end : end + 1] != bytes([_SEQ_ID]):
        return "", 0
    number = 0
    for place, byte in enumerate(payload[end + 1 : end + 6]):
        number |= (byte & 127) << (7 * place)
        if byte < 128:
            return payload[2:end].decode(errors="replace"), number
    return "", 0
