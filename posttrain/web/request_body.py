"""Request bodies within limits of size and time: read chunk by chunk, decompressed chunk by chunk, validated."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request

from posttrain.web.errors import HTTPError

# Bytes kept of a rejected body: enough to tell which session it belongs to.
REJECTED_HEAD_BYTES = 4096
# A body is read and discarded up to this multiple of its limit, so that the client sees the error.
MAX_DRAIN_FACTOR = 8
_WRONG_TYPE = re.compile(r".*_type|literal_error")  # of pydantic's errors


@dataclass(frozen=True, slots=True)
class RequestPayload:
    """A decompressed body, or the head of a rejected one."""

    body: bytes
    rejection_reason: str = ""


async def read_request_payload(
    request: Request, max_bytes: int, max_seconds: float
) -> RequestPayload:
    """Read the body of a request: at most `max_bytes`, before and after decompression.

    Raises: HTTPError (408) for a body that is not complete in time, (415) for an unknown encoding, (400) for invalid
        compressed bytes.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "", "zstd"):
        raise HTTPError(
            415, f"Content-Encoding {encoding[:40]!r} is not supported; use zstd or none"
        )
    body, num_bytes = await read_body_prefix(request, max_bytes, max_seconds)
    is_too_large = num_bytes > max_bytes
    if encoding == "zstd":
        body, is_complete = decompress_zstd(
            body, REJECTED_HEAD_BYTES if is_too_large else max_bytes
        )
        if not is_too_large and not is_complete:
            reason = f"the body is larger than {max_bytes} bytes, decompressed"
            return RequestPayload(body[:REJECTED_HEAD_BYTES], reason)
    if is_too_large:
        reason = f"the body has {num_bytes} bytes or more; at most {max_bytes} are accepted"
        return RequestPayload(body[:REJECTED_HEAD_BYTES], reason)
    return RequestPayload(body)


async def read_body_prefix(
    request: Request, max_bytes: int, max_seconds: float
) -> tuple[bytes, int]:
    """Read a body as sent, without decompression, and keep about `max_bytes` of it.

    Returns: the bytes kept; the number of bytes received, above `max_bytes` if the body is too large.
    Raises: HTTPError (408) for a body that is not complete in `max_seconds`.
    """
    parts: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(max_seconds):
            async for part in request.stream():
                num_bytes += len(part)
                if num_bytes <= max_bytes or not parts:
                    parts.append(part[: max_bytes + 1])
                elif num_bytes > MAX_DRAIN_FACTOR * max_bytes:
                    break
    except TimeoutError:
        # The rest of the body would be taken for the next request.
        raise HTTPError(
            408, f"the body was not complete in {max_seconds:g} s", {"Connection": "close"}
        ) from None
    return b"".join(parts), num_bytes


def decompress_zstd(body: bytes, max_bytes: int) -> tuple[bytes, bool]:
    """Decompress zstd frames, up to `max_bytes`.

    Returns: the bytes; True = nothing was left out.
    Raises: HTTPError (400) for invalid frames.
    """
    import pyarrow as pa  # its decoder stops after the requested number of bytes

    try:
        with pa.CompressedInputStream(pa.BufferReader(body), "zstd") as stream:
            content = stream.read(max_bytes + 1)
    except (OSError, pa.ArrowException) as error:
        raise HTTPError(400, f"the body is not valid zstd ({str(error)[:200]})") from None
    return content[:max_bytes], len(content) <= max_bytes


def describe_first_error(error: ValidationError, body: Any = None) -> tuple[str, str]:
    """Return the dotted field name and the message of the first validation error; "" = the body itself.

    Args:
        body: that was validated; names of the types of a union, which pydantic adds to places, are left out.
    """
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    places = [_find_place(found["loc"], body, found["type"] == "missing") for found in errors]
    place, messages = places[0], [errors[0]["msg"]]
    if len(place) < len(errors[0]["loc"]):  # one error for each type of the union
        branches = [
            (other, found)
            for other, found in zip(places, errors, strict=True)
            if other[: len(place)] == place
        ]
        fitting = [pair for pair in branches if not _WRONG_TYPE.fullmatch(pair[1]["type"])]
        if fitting:
            place, messages = fitting[0][0], [fitting[0][1]["msg"]]
        else:
            messages = list(dict.fromkeys(found["msg"] for _, found in branches))
    return ".".join(str(part) for part in place), "; or: ".join(messages)


def _find_place(loc: Sequence[int | str], body: Any, is_missing: bool) -> tuple[int | str, ...]:
    """Return the parts of a place that are keys and indices of the body; the last one may be missing from it."""
    if body is None:
        return tuple(loc)
    place: list[int | str] = []
    for number, part in enumerate(loc):
        is_absent = is_missing and number == len(loc) - 1
        if isinstance(body, Mapping) and (part in body or is_absent):
            body = body.get(part)
        elif isinstance(body, list) and isinstance(part, int) and part < len(body):
            body = body[part]
        else:
            continue
        place.append(part)
    return tuple(place)
