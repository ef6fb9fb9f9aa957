"""Bodies of requests within bounds: read piece by piece, decompressed piece by piece."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from flows.service.http.refusals import Refused

__all__ = ["Payload", "read_payload"]

HEAD = 4096  # bytes that are kept of a body that is refused: enough to know whose it is
MOST_DRAINED = 8  # times the limit that is read and thrown away, so that a client sees the refusal


@dataclass(frozen=True, slots=True)
class Payload:
    """A decompressed body, or the head of one that is refused."""

    body: bytes
    refused: str = ""


async def read_payload(request: Request, most: int) -> Payload:
    """The body of a request, at most `most` bytes before and after decompression.

    Raises: Refused (415) for an unknown encoding, (400) for compressed bytes that are none.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "", "zstd"):
        raise Refused(415, f"Content-Encoding {encoding[:40]!r} is not supported; use zstd or none")
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= most or not parts:
            parts.append(part[: most + 1])
        elif size > MOST_DRAINED * most:
            break
    body = b"".join(parts)
    if encoding == "zstd":
        body, is_whole = decompressed(body, HEAD if size > most else most)
        if size <= most and not is_whole:
            return Payload(body[:HEAD], f"the body is larger than {most} bytes, decompressed")
    if size > most:
        return Payload(body[:HEAD], f"the body has {size} bytes or more; at most {most} are taken")
    return Payload(body)


def decompressed(body: bytes, most: int) -> tuple[bytes, bool]:
    """The first `most` bytes of zstd frames; True = there are no more. Raises: Refused (400)."""
    import pyarrow as pa  # a decoder that gives as much as is asked for

    try:
        with pa.CompressedInputStream(pa.BufferReader(body), "zstd") as stream:
            found = stream.read(most + 1)
    except (OSError, pa.ArrowException) as error:
        raise Refused(400, f"the body is no zstd ({str(error)[:200]})") from None
    return found[:most], len(found) <= most
