"""Routes of the rating page: static files, which hold no data, and requests, which need the token."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from flows.runtime.prefect_access import LoopbackOnlyMiddleware
from posttrain.preferences.rating_session import QUESTIONS, OutdatedQuestion, RatingSession
from posttrain.web.errors import HTTPError
from posttrain.web.page_assets import load_page_asset
from posttrain.web.request_body import describe_first_error, read_body_prefix
from posttrain.web.tokens import has_bearer_token
from rl_core.errors import DataError, PosttrainError

Handler = Callable[[Request], Coroutine[Any, Any, Response]]

MAX_BODY_BYTES = 64 * 1024
BODY_SECONDS = 15.0  # for a body to arrive
_CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'"
)
_SECURITY_HEADERS = {
    "Content-Security-Policy": _CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class _RaterBody(BaseModel):
    """A request of one rater."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    rater: Annotated[
        str, Field(min_length=1, max_length=40, pattern=r"^[^\x00-\x1f\x7f]*\S[^\x00-\x1f\x7f]*$")
    ]


class _RatingBody(_RaterBody):
    """A rating of the open question."""

    item: Annotated[str, Field(max_length=64)]
    count: Annotated[int, Field(ge=0)]
    choice: Literal["left", "right", "tie", "both_bad", "skip"] | None = None
    score: Annotated[float, Field(ge=0, le=5)] | None = None
    reason: Annotated[str, Field(max_length=60)] = ""
    comment: Annotated[str, Field(max_length=2000)] = ""
    seconds: Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)] = 0.0


def build_rating_app(session: RatingSession, token: str) -> LoopbackOnlyMiddleware:
    """Build the application (ASGI)."""
    app = FastAPI(
        title="posttrain label",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        exception_handlers={HTTPError: _write_error_response},
    )
    requests = _RequestHandlers(session)

    def add_file(path: str, name: str, media_type: str) -> None:
        app.router.routes.append(Route(path, _build_file_handler(name, media_type)))

    def add_request(path: str, method: str, respond: Callable[[bytes], Any]) -> None:
        handler = _build_request_handler(token, respond)
        app.router.routes.append(Route(path, handler, methods=[method]))

    add_file("/", "rating.html", "text/html")
    add_file("/rating.js", "rating.js", "text/javascript")
    add_file("/rating.css", "rating.css", "text/css")
    add_request("/api/page", "GET", requests.describe_page)
    add_request("/api/question", "POST", requests.describe_question)
    add_request("/api/rate", "POST", requests.record_rating)
    add_request("/api/undo", "POST", requests.undo_rating)
    add_request("/api/agreement", "GET", requests.describe_agreement)
    return LoopbackOnlyMiddleware(app)


def _build_file_handler(name: str, media_type: str) -> Handler:
    """Build the handler of a static file."""

    async def serve_file(request: Request) -> Response:
        content = load_page_asset(__package__, name)
        media = f"{media_type}; charset=utf-8"
        return Response(content, media_type=media, headers=_SECURITY_HEADERS)

    return serve_file


def _build_request_handler(token: str, respond: Callable[[bytes], Any]) -> Handler:
    """Build the handler of a request: check token and size, respond as JSON. `respond` takes the body."""

    async def handle_request(request: Request) -> Response:
        if not has_bearer_token(request, token):
            raise HTTPError(
                401, "the token is missing or wrong; open the link that `posttrain label` printed"
            )
        body, num_bytes = await read_body_prefix(request, MAX_BODY_BYTES, BODY_SECONDS)
        if num_bytes > MAX_BODY_BYTES:
            raise HTTPError(413, f"a request has at most {MAX_BODY_BYTES} bytes")
        # On a thread: a rating waits for the disk.
        content = await asyncio.to_thread(_run_handler, respond, body)
        return JSONResponse(content, headers=_SECURITY_HEADERS)

    return handle_request


def _run_handler(respond: Callable[[bytes], Any], body: bytes) -> Any:
    """Run the handler of a request. Raises: HTTPError (422, 503)."""
    try:
        return respond(body)
    except ValidationError as error:
        name, message = describe_first_error(error)
        raise HTTPError(422, f"{name or 'body'}: {message}") from None
    except DataError as error:
        raise HTTPError(422, str(error)) from None
    except (
        PosttrainError
    ) as error:  # the disk failed and nothing was stored: the page keeps the input
        raise HTTPError(503, str(error)) from None


async def _write_error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPError)
    return JSONResponse({"error": str(error)}, error.status, headers=_SECURITY_HEADERS)


class _RequestHandlers:
    """Handlers of the page's requests."""

    def __init__(self, session: RatingSession) -> None:
        self._session = session

    def describe_page(self, body: bytes) -> dict[str, Any]:
        """Describe texts and choices of the page."""
        settings = self._session.settings
        return {
            "ask": settings.ask,
            "question": settings.question or QUESTIONS[settings.ask],
            "reasons": list(settings.reasons),
        }

    def describe_question(self, body: bytes) -> dict[str, Any]:
        """Describe the rater's open question."""
        return self._session.describe_question(_RaterBody.model_validate_json(body).rater)

    def record_rating(self, body: bytes) -> dict[str, Any]:
        """Record a rating and describe the next question; for an outdated rating, describe the open one."""
        rating = _RatingBody.model_validate_json(body).model_dump()
        outdated = False
        try:
            self._session.record_rating(rating["rater"], rating, time.time())
        except OutdatedQuestion:
            outdated = True
        return {**self._session.describe_question(rating["rater"]), "outdated": outdated}

    def undo_rating(self, body: bytes) -> dict[str, Any]:
        """Undo the rater's last rating and describe its question again."""
        rater = _RaterBody.model_validate_json(body).rater
        rating = self._session.undo_rating(rater, time.time())
        undone = None
        if rating is not None:
            undone = {"comment": rating.comment, "reason": rating.reason}
        return {**self._session.describe_question(rater), "undone": undone}

    def describe_agreement(self, body: bytes) -> dict[str, Any]:
        """Describe Krippendorff's alpha, by rater and over time."""
        return dataclasses.asdict(self._session.compute_agreement())
