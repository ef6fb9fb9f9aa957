"""The server's application: routes, errors in the dialect's form."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from flows.runtime.prefect_access import OnlyFromHere
from flows.serving.chat_bodies import FeedbackBody, read_json_body
from flows.serving.chat_routes import chat_completions, whole_body
from flows.serving.chat_server import ChatServer, server_of
from flows.serving.completion_routes import completions
from flows.serving.order_routes import ORDER_ROUTES
from flows.serving.refused import RefusedRequest, refused_response
from flows.serving.rollout_orders import RolloutOrders
from rl_core.errors import DataError, PosttrainError, UnknownAnswer
from rl_core.inference.served_answers import FeedbackLabel

__all__ = ["make_chat_app"]


def make_chat_app(server: ChatServer) -> OnlyFromHere:
    """The application (ASGI); it closes the server when it ends."""

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        yield
        server.close()

    app = FastAPI(
        title="posttrain serve", lifespan=life, docs_url=None, redoc_url=None, openapi_url=None,
        exception_handlers={RefusedRequest: refused_response, HTTPException: _unknown},
    )  # fmt: skip
    app.state.server, app.state.orders = server, RolloutOrders(server)
    app.router.routes.extend([
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/models", _models, methods=["GET"]),
        Route("/v1/models/{name:path}", _model, methods=["GET"]),
        Route("/v1/feedback", _feedback, methods=["POST"]),
        *ORDER_ROUTES,
        Route("/healthz", _health, methods=["GET"]),
        Route("/health", _health, methods=["GET"]),
        Route("/readyz", _ready, methods=["GET"]),
        Route("/metrics", _metrics, methods=["GET"]),
    ])  # fmt: skip
    return OnlyFromHere(app)


async def _unknown(request: Request, error: Exception) -> Response:
    """A path or method that is not served, in the dialect's form."""
    assert isinstance(error, HTTPException)
    what = "is not served here" if error.status_code == 404 else str(error.detail)
    return await refused_response(
        request, RefusedRequest(error.status_code, f"{request.method} {request.url.path[:200]}: {what}")
    )


def _listed(server: ChatServer) -> dict[str, object]:
    version = server.answering.loop.state.policy_version if server.answering is not None else None
    name = server.model.name if server.model is not None else None
    return {"id": server.name, "object": "model", "created": 0, "owned_by": "posttrain", "policy_version": version,
            "model_version": name}  # fmt: skip


async def _models(request: Request) -> Response:
    server = server_of(request)
    server.check_token(request)
    return JSONResponse({"object": "list", "data": [_listed(server)]})


async def _model(request: Request) -> Response:
    server = server_of(request)
    server.check_token(request)
    server.check_model(request.path_params["name"])
    return JSONResponse(_listed(server))


async def _feedback(request: Request) -> Response:
    """Take a label; it is durable when the caller is told so."""
    server = server_of(request)
    server.check_token(request)
    body = read_json_body(FeedbackBody, await whole_body(server, request))
    if body.answer is None and body.score is None and body.thumb is None:
        raise RefusedRequest(422, "answer, score, thumb: give at least one of them")
    if not server.is_own_id(body.id):
        raise RefusedRequest(404, f"id: this server gave no answer '{body.id}'", param="id", code="answer_not_found")
    label = FeedbackLabel(body.answer, body.score, body.thumb, body.comment, body.user or "")
    try:
        await server.wait_for(server.wait_recorded)
        await server.wait_for(server.feedback.accept, body.id, body.choice, label)
    except UnknownAnswer as error:
        raise RefusedRequest(404, f"id: {error}", param="id", code="answer_not_found") from None
    except DataError as error:
        raise RefusedRequest(422, str(error)) from None
    except PosttrainError as error:
        raise RefusedRequest(503, str(error), retry_after=5) from None
    server.metrics.feedback.inc()
    return JSONResponse({"id": body.id, "object": "feedback", "choice": body.choice, "created": int(time.time())})


async def _health(request: Request) -> Response:
    server = server_of(request)
    if server.answering is not None and not server.answering.is_alive:
        return PlainTextResponse("the engine has ended\n", 503)
    return PlainTextResponse("ok\n")


async def _ready(request: Request) -> Response:
    server = server_of(request)
    if not server.is_ready:
        return PlainTextResponse(f"{server.waits_for}\n", 503)
    return PlainTextResponse("ready\n")


async def _metrics(request: Request) -> Response:
    server = server_of(request)
    server.check_token(request)
    state = (lambda loop: lambda: loop.state)(server.answering.loop) if server.answering is not None else None
    return PlainTextResponse(server.metrics.text(state), media_type="text/plain; version=0.0.4; charset=utf-8")
