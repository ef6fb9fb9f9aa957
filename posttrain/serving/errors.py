"""Refused requests in the dialect's form: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

_ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    504: "timeout_error",
}


class ServingHTTPError(Exception):
    """A response other than success.

    `retry_after`: seconds after which the client should try again; None: official clients are told not to.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response; `x-should-retry` is what the official clients look at first."""
        if self.retry_after is not None:
            return {"Retry-After": f"{max(1.0, self.retry_after):.0f}", "x-should-retry": "true"}
        return {"x-should-retry": "false"}


def format_error_body(error: ServingHTTPError) -> dict[str, Any]:
    """The body of a refusal."""
    kind = _ERROR_TYPES.get(
        error.status, "invalid_request_error" if error.status < 500 else "server_error"
    )
    return {
        "error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    }


async def write_error_response(request: Request, error: Exception) -> Response:
    """An exception handler of the application."""
    assert isinstance(error, ServingHTTPError)
    return JSONResponse(format_error_body(error), error.status, headers=error.headers)
