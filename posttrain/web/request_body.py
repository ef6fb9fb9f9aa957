"""Bodies of requests within bounds: read piece by piece, decompressed piece by piece."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from posttrain.web.errors import HTTPError

REJECTED_HEAD_BYTES = (
    4096  # bytes that are kept of a body that is refused: enough to know whose it is
)
MAX_DRAIN_FACTOR = (
    8  # times the limit that is read and thrown away, so that a client sees the refusal
)


@dataclass(frozen=True, slots=True)
class RequestPayload:
    """A decompressed body, or the head of one that is refused."""

    body: bytes
    rejection_reason: str = ""


async def read_request_payload(request: Request, max_bytes: int) -> RequestPayload:
    """The body of a request, at most `most` bytes before and after decompression.

    Raises: Refused (415) for an unknown encoding, (400) for compressed bytes that are none.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "", "zstd"):
        raise HTTPError(
            415, f"Content-Encoding {encoding[:40]!r} is not supported; use zstd or none"
        )
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= max_bytes or not parts:
            parts.append(part[: max_bytes + 1])
        elif size > MAX_DRAIN_FACTOR * max_bytes:
            break
    body = b"".join(parts)
    if encoding == "zstd":
        body, is_whole = decompress_zstd(
            body, REJECTED_HEAD_BYTES if size > max_bytes else max_bytes
        )
        if size <= max_bytes and not is_whole:
            return RequestPayload(
                body[:REJECTED_HEAD_BYTES],
                f"the body is larger than {max_bytes} bytes, decompressed",
            )
    if size > max_bytes:
        return RequestPayload(
            body[:REJECTED_HEAD_BYTES],
            f"the body has {size} bytes or more; at most {max_bytes} are taken",
        )
    return RequestPayload(body)


def decompress_zstd(body: bytes, max_bytes: int) -> tuple[bytes, bool]:
    """The first `most` bytes of zstd frames; True = there are no more. Raises: Refused (400)."""
    import pyarrow as pa  # a decoder that gives as much as is asked for

    try:
        with pa.CompressedInputStream(pa.BufferReader(body), "zstd") as stream:
            found = stream.read(max_bytes + 1)
    except (OSError, pa.ArrowException) as error:
        raise HTTPError(400, f"the body is no zstd ({str(error)[:200]})") from None
    return found[:max_bytes], len(found) <= max_bytes
