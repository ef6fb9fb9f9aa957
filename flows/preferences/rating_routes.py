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

from flows.preferences.rating_page import PAGE
from flows.preferences.rating_room import QUESTIONS, OutdatedQuestion, RatingRoom
from flows.preferences.rating_script import SCRIPT
from flows.preferences.rating_style import STYLE
from flows.runtime.prefect_access import OnlyFromHere
from rl_core.errors import DataError, PosttrainError

__all__ = ["make_rating_app"]

T = TypeVar("T")
MAX_BODY = 64 * 1024
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'"
_HEADERS = {
    "Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}  # fmt: skip


class _Body(BaseModel):
    """A request of one person."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    rater: Annotated[str, Field(min_length=1, max_length=40, pattern=r"^[^\x00-\x1f\x7f]*\S[^\x00-\x1f\x7f]*$")]


class _RatingBody(_Body):
    """A rating of the open question."""

    item: Annotated[str, Field(max_length=64)]
    count: Annotated[int, Field(ge=0)]
    choice: Literal["left", "right", "tie", "both_bad", "skip"] | None = None
    score: Annotated[float, Field(ge=0, le=5)] | None = None
    reason: Annotated[str, Field(max_length=60)] = ""
    comment: Annotated[str, Field(max_length=2000)] = ""
    seconds: Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)] = 0.0


def make_rating_app(room: RatingRoom, token: str) -> OnlyFromHere:
    """The application (ASGI)."""

    def served(text: str, kind: str) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            return Response(text, media_type=f"{kind}; charset=utf-8", headers=_HEADERS)

        return answer

    def asked(function: Callable[[Request, bytes], T]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            if not _has_token(request, token):
                return _said(401, "the token is missing or another one; open the link that `posttrain prefer` printed")
            body = await _read(request)
            if body is None:
                return _said(413, f"a request has at most {MAX_BODY} bytes")
            # On a thread: a rating waits for the disk.
            return await asyncio.to_thread(_answered, function, request, body)

        return answer

    app = FastAPI(title="posttrain prefer", docs_url=None, redoc_url=None, openapi_url=None)
    requests = _Requests(room)
    app.router.routes.extend([
        Route("/", served(PAGE, "text/html")),
        Route("/rating.js", served(SCRIPT, "text/javascript")),
        Route("/rating.css", served(STYLE, "text/css")),
        Route("/api/page", asked(requests.page), methods=["GET"]),
        Route("/api/question", asked(requests.question), methods=["POST"]),
        Route("/api/rate", asked(requests.rate), methods=["POST"]),
        Route("/api/undo", asked(requests.undo), methods=["POST"]),
        Route("/api/agreement", asked(requests.agreement), methods=["GET"]),
    ])  # fmt: skip
    return OnlyFromHere(app)


class _Requests:
    """Answers of the room to each request."""

    def __init__(self, room: RatingRoom) -> None:
        self._room = room

    def page(self, request: Request, body: bytes) -> dict[str, Any]:
        """Texts and choices of the page."""
        settings = self._room.settings
        return {
            "ask": settings.ask, "question": settings.question or QUESTIONS[settings.ask],
            "reasons": list(settings.reasons),
        }  # fmt: skip

    def question(self, request: Request, body: bytes) -> dict[str, Any]:
        """The person's open question."""
        return self._room.question(_Body.model_validate_json(body).rater)

    def rate(self, request: Request, body: bytes) -> dict[str, Any]:
        """Keep a rating, and ask the next question; of an outdated one the open question alone."""
        given = _RatingBody.model_validate_json(body).model_dump()
        try:
            self._room.rate(given["rater"], given, time.time())
            outdated = False
        except OutdatedQuestion:
            outdated = True
        return {**self._room.question(given["rater"]), "outdated": outdated}

    def undo(self, request: Request, body: bytes) -> dict[str, Any]:
        """Take back the person's last rating, and show its question again."""
        rater = _Body.model_validate_json(body).rater
        taken = self._room.undo(rater, time.time())
        said = None if taken is None else {"comment": taken.comment, "reason": taken.reason}
        return {**self._room.question(rater), "undone": said}

    def agreement(self, request: Request, body: bytes) -> dict[str, Any]:
        """Krippendorff's alpha, by rater and over time."""
        return dataclasses.asdict(self._room.agreement())


def _answered(function: Callable[[Request, bytes], Any], request: Request, body: bytes) -> Response:
    try:
        return JSONResponse(function(request, body), headers=_HEADERS)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        return _said(422, f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}")
    except DataError as error:
        return _said(422, str(error))
    except PosttrainError as error:  # a disk that refuses: nothing was kept, so the page keeps what was typed
        return _said(503, str(error))


def _has_token(request: Request, token: str) -> bool:
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    return kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token.encode())


async def _read(request: Request) -> bytes | None:
    """The body; None = too long."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            return None
    return body


def _said(status: int, message: str) -> Response:
    return JSONResponse({"error": message}, status, headers=_HEADERS)
