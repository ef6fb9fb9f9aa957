"""Refused requests as responses `{"detail": ...}`, which clients print."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from flows.service.store import OverLimit, RequestGone, SeqReused
from rl_core.errors import BackendError, ServiceError

__all__ = ["Refused", "refused_response"]


class Refused(Exception):
    """A response other than success."""

    def __init__(self, status: int, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.headers = status, dict(headers or {})


def as_refused(error: Exception) -> Refused:
    """The status that makes the public client do the right thing.

    It sends the same again after 408, 409, 429 and 5xx, so a repeated number with another payload is 422; 410 tells it
    that a result is lost.
    """
    if isinstance(error, Refused):
        return error
    if isinstance(error, OverLimit):
        return Refused(429, str(error), {"Retry-After": f"{error.retry_after:.0f}"})
    if isinstance(error, RequestGone):
        return Refused(410, str(error))
    if isinstance(error, BackendError):
        return Refused(503, str(error), {"Retry-After": "2"})
    assert isinstance(error, ServiceError), error
    return Refused(422 if error.category == "user" or isinstance(error, SeqReused) else 500, str(error))


async def refused_response(request: Request, error: Exception) -> Response:
    """An exception handler of the application."""
    refused = as_refused(error)
    return JSONResponse({"detail": str(refused)}, refused.status, headers=refused.headers)
