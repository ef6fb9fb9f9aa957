"""Refused requests as responses `{"detail": ...}`, which clients print."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from posttrain.training_service.store import KeyLimitExceeded, RequestForgotten, SequenceIdReused
from rl_core.errors import BackendError, ServiceError


class HTTPError(Exception):
    """A response other than success."""

    def __init__(self, status: int, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.headers = status, dict(headers or {})


def translate_service_error(error: Exception) -> HTTPError:
    """The status that makes the public client do the right thing.

    It sends the same again after 408, 409, 429 and 5xx, so a repeated number with another payload is 422; 410 tells it
    that a result is lost.
    """
    if isinstance(error, HTTPError):
        return error
    if isinstance(error, KeyLimitExceeded):
        return HTTPError(429, str(error), {"Retry-After": f"{error.retry_after:.0f}"})
    if isinstance(error, RequestForgotten):
        return HTTPError(410, str(error))
    if isinstance(error, BackendError):
        return HTTPError(503, str(error), {"Retry-After": "2"})
    assert isinstance(error, ServiceError), error
    return HTTPError(
        422 if error.category == "user" or isinstance(error, SequenceIdReused) else 500, str(error)
    )


async def write_error_response(request: Request, error: Exception) -> Response:
    """An exception handler of the application."""
    refused = translate_service_error(error)
    return JSONResponse({"detail": str(refused)}, refused.status, headers=refused.headers)
