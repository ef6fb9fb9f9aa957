"""ASGI application of `posttrain serve`: routes and error handlers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from flows.runtime.prefect_access import LoopbackOnlyMiddleware
from posttrain.serving.chat_routes import create_chat_completion, read_full_body
from posttrain.serving.chat_server import ChatServer, find_chat_server
from posttrain.serving.completion_routes import create_completion
from posttrain.serving.errors import ServingHTTPError, build_error_response
from posttrain.serving.request_bodies import FeedbackBody, parse_json_body
from posttrain.serving.response_routes import (
    RESPONSE_ROUTES,
    ResponseStore,
    convert_to_answer_id,
)
from posttrain.serving.session_routes import SESSION_ROUTES
from posttrain.serving.trainer_routes import TRAINER_ROUTES
from posttrain.serving.weight_control import WeightController
from rl_core.errors import DataError, PosttrainError, UnknownAnswer
from rl_core.inference.serving_requests import FeedbackLabel


def build_chat_app(server: ChatServer) -> LoopbackOnlyMiddleware:
    """Build the application (ASGI); it closes the server when it shuts down."""

    @contextlib.asynccontextmanager
    async def close_at_shutdown(app: FastAPI) -> AsyncIterator[None]:
        yield
        server.close()

    app = FastAPI(
        title="posttrain serve",
        lifespan=close_at_shutdown,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        exception_handlers={
            ServingHTTPError: build_error_response,
            HTTPException: _refuse_unknown_path,
        },
    )
    app.state.server, app.state.weight_controller = server, WeightController(server)
    app.state.response_store = ResponseStore(server.settings.stored_responses)
    app.router.routes.extend(
        [
            Route("/v1/chat/completions", create_chat_completion, methods=["POST"]),
            Route("/v1/completions", create_completion, methods=["POST"]),
            Route("/v1/models", _list_models, methods=["GET"]),
            Route("/v1/models/{name:path}", _describe_model, methods=["GET"]),
            Route("/v1/feedback", _accept_feedback, methods=["POST"]),
            *RESPONSE_ROUTES,
            *SESSION_ROUTES,
            *TRAINER_ROUTES,
            Route("/healthz", _report_health, methods=["GET"]),
            Route("/health", _report_health, methods=["GET"]),
            Route("/readyz", _report_readiness, methods=["GET"]),
            Route("/metrics", _export_metrics, methods=["GET"]),
        ]
    )
    return LoopbackOnlyMiddleware(app)


async def _refuse_unknown_path(request: Request, error: Exception) -> Response:
    """Answer a request for an unknown path or method in OpenAI's error format."""
    assert isinstance(error, HTTPException)
    reason = "is not served here" if error.status_code == 404 else str(error.detail)
    message = f"{request.method} {request.url.path[:200]}: {reason}"
    return await build_error_response(request, ServingHTTPError(error.status_code, message))


def _format_model_entry(server: ChatServer) -> dict[str, object]:
    version = server.engine.loop.state.policy_version if server.engine is not None else None
    name = server.model.name if server.model is not None else None
    return {
        "id": server.name,
        "object": "model",
        "created": 0,
        "owned_by": "posttrain",
        "policy_version": version,
        "model_version": name,
    }


async def _list_models(request: Request) -> Response:
    server = find_chat_server(request)
    server.check_token(request)
    return JSONResponse({"object": "list", "data": [_format_model_entry(server)]})


async def _describe_model(request: Request) -> Response:
    server = find_chat_server(request)
    server.check_token(request)
    server.check_model(request.path_params["name"])
    return JSONResponse(_format_model_entry(server))


async def _accept_feedback(request: Request) -> Response:
    """Accept a label; it is on the disk before the request is acknowledged."""
    server = find_chat_server(request)
    server.check_token(request)
    body = parse_json_body(FeedbackBody, await read_full_body(server, request))
    if body.answer is None and body.score is None and body.thumb is None:
        raise ServingHTTPError(422, "answer, score, thumb: give at least one of them")
    answer_id = convert_to_answer_id(body.id)
    if not server.is_issued_id(answer_id):
        raise ServingHTTPError(
            404, f"id: this server gave no answer '{body.id}'", param="id", code="answer_not_found"
        )
    label = FeedbackLabel(body.answer, body.score, body.thumb, body.comment, body.user or "")
    try:
        await server.run_blocking(server.wait_until_recorded)
        await server.run_blocking(server.feedback.accept_label, answer_id, body.choice, label)
    except UnknownAnswer as error:
        raise ServingHTTPError(404, f"id: {error}", param="id", code="answer_not_found") from None
    except DataError as error:
        raise ServingHTTPError(422, str(error)) from None
    except PosttrainError as error:
        raise ServingHTTPError(503, str(error), retry_after=5) from None
    server.metrics.feedback.inc()
    return JSONResponse(
        {"id": body.id, "object": "feedback", "choice": body.choice, "created": int(time.time())}
    )


async def _report_health(request: Request) -> Response:
    server = find_chat_server(request)
    if server.engine is not None and not server.engine.is_alive:
        return PlainTextResponse("the engine has ended\n", 503)
    return PlainTextResponse("ok\n")


async def _report_readiness(request: Request) -> Response:
    server = find_chat_server(request)
    if not server.is_ready:
        return PlainTextResponse(f"{server.not_ready_reason}\n", 503)
    return PlainTextResponse("ready\n")


async def _export_metrics(request: Request) -> Response:
    server = find_chat_server(request)
    server.check_token(request)
    state = server.engine.loop.state if server.engine is not None else None
    return PlainTextResponse(
        server.metrics.render_metrics(state),
        media_type="text/plain; version=0.0.4; charset=utf-8",
    )
