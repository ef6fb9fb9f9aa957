"""Routes of the page: its files, which hold no data, and its requests, which need the token."""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from flows.runtime.prefect_access import LoopbackOnlyMiddleware
from posttrain.preferences.page_assets import PAGE, SCRIPT, STYLE
from posttrain.preferences.rating_session import QUESTIONS, OutdatedQuestion, RatingSession
from rl_core.errors import DataError, PosttrainError

T = TypeVar("T")
MAX_BODY_BYTES = 64 * 1024
_CONTENT_SECURITY_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'"
_SECURITY_HEADERS = {
    "Content-Security-Policy": _CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class _RaterBody(BaseModel):
    """A request of one person."""

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
    """The application (ASGI)."""

    def served(text: str, kind: str) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            return Response(text, media_type=f"{kind}; charset=utf-8", headers=_SECURITY_HEADERS)

        return answer

    def asked(function: Callable[[Request, bytes], T]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            if not _has_token(request, token):
                return _format_error(
                    401,
                    "the token is missing or another one; open the link that `posttrain prefer` printed",
                )
            body = await _read_body(request)
            if body is None:
                return _format_error(413, f"a request has at most {MAX_BODY_BYTES} bytes")
            # On a thread: a rating waits for the disk.
            return await asyncio.to_thread(_run_handler, function, request, body)

        return answer

    app = FastAPI(title="posttrain prefer", docs_url=None, redoc_url=None, openapi_url=None)
    requests = _RequestHandlers(session)
    app.router.routes.extend(
        [
            Route("/", served(PAGE, "text/html")),
            Route("/rating.js", served(SCRIPT, "text/javascript")),
            Route("/rating.css", served(STYLE, "text/css")),
            Route("/api/page", asked(requests.describe_page), methods=["GET"]),
            Route("/api/question", asked(requests.describe_question), methods=["POST"]),
            Route("/api/rate", asked(requests.record_rating), methods=["POST"]),
            Route("/api/undo", asked(requests.undo_rating), methods=["POST"]),
            Route("/api/agreement", asked(requests.describe_agreement), methods=["GET"]),
        ]
    )
    return LoopbackOnlyMiddleware(app)


class _RequestHandlers:
    """Answers of the room to each request."""

    def __init__(self, session: RatingSession) -> None:
        self._session = session

    def describe_page(self, request: Request, body: bytes) -> dict[str, Any]:
        """Texts and choices of the page."""
        settings = self._session.settings
        return {
            "ask": settings.ask,
            "question": settings.question or QUESTIONS[settings.ask],
            "reasons": list(settings.reasons),
        }

    def describe_question(self, request: Request, body: bytes) -> dict[str, Any]:
        """The person's open question."""
        return self._session.describe_question(_RaterBody.model_validate_json(body).rater)

    def record_rating(self, request: Request, body: bytes) -> dict[str, Any]:
        """Keep a rating, and ask the next question; of an outdated one the open question alone."""
        given = _RatingBody.model_validate_json(body).model_dump()
        try:
            self._session.record_rating(given["rater"], given, time.time())
            outdated = False
        except OutdatedQuestion:
            outdated = True
        return {**self._session.describe_question(given["rater"]), "outdated": outdated}

    def undo_rating(self, request: Request, body: bytes) -> dict[str, Any]:
        """Take back the person's last rating, and show its question again."""
        rater = _RaterBody.model_validate_json(body).rater
        taken = self._session.undo_rating(rater, time.time())
        said = None if taken is None else {"comment": taken.comment, "reason": taken.reason}
        return {**self._session.describe_question(rater), "undone": said}

    def describe_agreement(self, request: Request, body: bytes) -> dict[str, Any]:
        """Krippendorff's alpha, by rater and over time."""
        return dataclasses.asdict(self._session.compute_agreement())


def _run_handler(
    function: Callable[[Request, bytes], Any], request: Request, body: bytes
) -> Response:
    try:
        return JSONResponse(function(request, body), headers=_SECURITY_HEADERS)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        return _format_error(422, f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}")
    except DataError as error:
        return _format_error(422, str(error))
    except (
        PosttrainError
    ) as error:  # a disk that refuses: nothing was kept, so the page keeps what was typed
        return _format_error(503, str(error))


def _has_token(request: Request, token: str) -> bool:
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    return kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token.encode())


async def _read_body(request: Request) -> bytes | None:
    """The body; None = too long."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            return None
    return body


def _format_error(status: int, message: str) -> Response:
    return JSONResponse({"error": message}, status, headers=_SECURITY_HEADERS)
