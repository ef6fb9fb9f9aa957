"""Error responses in OpenAI's format: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from posttrain.web.errors import HTTPError
from rl_core.errors import PosttrainError
from rl_core.inference.serving_requests import DeadlineExceeded, RequestCancelled, ServerOverloaded
from rl_core.inference.token_rules import RulesFailed

_ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    504: "timeout_error",
}


class ServingHTTPError(HTTPError):
    """A response with an error status.

    Args:
        param: the request parameter at fault.
        code: machine-readable reason.
        retry_after: seconds until a retry makes sense; None tells official clients not to retry.
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
        headers = {"x-should-retry": "false"}  # official clients check this header first
        if retry_after is not None:
            headers = {"Retry-After": f"{max(1.0, retry_after):.0f}", "x-should-retry": "true"}
        super().__init__(status, message, headers)
        self.param, self.code = param, code


def format_error_body(error: ServingHTTPError) -> dict[str, Any]:
    """Format the JSON body of an error response."""
    default = "invalid_request_error" if error.status < 500 else "server_error"
    return {
        "error": {
            "message": str(error),
            "type": _ERROR_TYPES.get(error.status, default),
            "param": error.param,
            "code": error.code,
        }
    }


async def build_error_response(request: Request, error: Exception) -> Response:
    """Build the answer to a request whose handler raised `ServingHTTPError` (an exception handler)."""
    assert isinstance(error, ServingHTTPError)
    return JSONResponse(format_error_body(error), error.status, headers=error.headers)


def convert_engine_error(error: BaseException) -> ServingHTTPError:
    """Convert an error of the serving loop to an error response."""
    if isinstance(error, ServerOverloaded):
        return ServingHTTPError(
            429, f"overloaded: {error}", code="overloaded", retry_after=error.retry_after
        )
    if isinstance(error, DeadlineExceeded):
        return ServingHTTPError(504, str(error), code="deadline")
    if isinstance(error, RequestCancelled):
        return ServingHTTPError(499, str(error))
    if isinstance(error, RulesFailed):
        return ServingHTTPError(400, str(error), code="unsupported_schema")
    if isinstance(error, PosttrainError):
        return ServingHTTPError(503, str(error), code="engine", retry_after=1)
    return ServingHTTPError(500, f"{type(error).__name__}: {error}"[:500])
