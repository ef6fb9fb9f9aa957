"""Application of the service's HTTP server: client routes under /api/v1, management routes, background tasks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from flows.runtime.prefect_access import LoopbackOnlyMiddleware
from posttrain.training_service.http.checkpoint_routes import (
    CHECKPOINT_ROUTES,
    COPY_ROUTES,
    FILE_ROUTES,
)
from posttrain.training_service.http.compute_routes import (
    FUTURE_ROUTES,
    SAMPLING_ROUTES,
    TRAINING_ROUTES,
)
from posttrain.training_service.http.management_routes import add_management_routes
from posttrain.training_service.http.server_state import ServiceServer
from posttrain.training_service.http.session_routes import SESSION_ROUTES
from posttrain.training_service.http.usage_routes import AUDIT_ROUTES, USAGE_ROUTES
from posttrain.training_service.store import (
    KeyLimitExceeded,
    RequestForgotten,
    SequenceIdReused,
    ServiceStore,
    open_service_store,
)
from posttrain.web.errors import HTTPError
from posttrain.web.server_setup import (
    limit_connections,
    raise_open_file_limit,
    shorten_switch_interval,
)
from rl_core.errors import BackendError, PosttrainError, ServiceError
from rl_core.settings import ServiceSettings

log = logging.getLogger(__name__)
DROP_INTERVAL_SECONDS = 30.0
LOG_CHECKPOINT_SECONDS = 2.0  # between two checkpoints of SQLite's log
MAX_LOG_BYTES = 32 << 20  # SQLite's log is restarted beyond this size
MAX_OPEN_FILES = 16_384  # each client that waits for a result holds a connection
RESERVED_FILES = 256  # for the store and its log

# Parts of the public interface that this service does not offer.
_UNSUPPORTED_PATHS = {
    "billing/{rest:path}": "there is no billing here",
    "auth/token": "API keys are used directly; pjwt_auth_enabled is false",
    "create_custom_loss": "custom losses run in the client; custom_loss_server_side is false",
    "unload_model": "a run leaves memory after worker.idle_seconds, and its next request loads it again",
}


def _refuse_unsupported_path(reason: str) -> Route:
    async def refuse(request: Request) -> Response:
        return JSONResponse({"detail": f"{request.url.path} is not served here: {reason}"}, 404)

    return refuse  # type: ignore[return-value]


def build_service_app(settings: ServiceSettings, store: ServiceStore) -> LoopbackOnlyMiddleware:
    """Build the ASGI application over an open store."""
    server = ServiceServer(settings, store)

    @contextlib.asynccontextmanager
    async def run_background_tasks(app: FastAPI) -> AsyncIterator[None]:
        server.start_threads()
        tasks = [
            asyncio.create_task(_drop_fetched_results(server)),
            asyncio.create_task(_checkpoint_store_log(server)),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            server.stop_threads()

    app = FastAPI(
        title="posttrain training service",
        lifespan=run_background_tasks,
        docs_url=None,
        redoc_url=None,
        exception_handlers={
            kind: build_error_response for kind in (HTTPError, ServiceError, BackendError)
        },
    )
    app.state.server = server
    routes = [
        *SESSION_ROUTES,
        *TRAINING_ROUTES,
        *SAMPLING_ROUTES,
        *FUTURE_ROUTES,
        *CHECKPOINT_ROUTES,
        *FILE_ROUTES,
        *COPY_ROUTES,
        *AUDIT_ROUTES,
        *USAGE_ROUTES,
    ]
    routes += [
        Route(
            f"/{path}", _refuse_unsupported_path(reason), methods=["GET", "POST", "PUT", "DELETE"]
        )
        for path, reason in _UNSUPPORTED_PATHS.items()
    ]
    add_management_routes(app, server)
    app.router.routes.extend(
        Route(f"/api/v1{route.path}", route.endpoint, methods=list(route.methods or ()))
        for route in routes
    )
    return LoopbackOnlyMiddleware(app)


async def _drop_fetched_results(server: ServiceServer) -> None:
    """Drop results some time after they were fetched in an endless loop."""
    while True:
        await asyncio.sleep(min(DROP_INTERVAL_SECONDS, server.settings.server.fetched_seconds + 1))
        fetched_before = time.monotonic() - server.settings.server.fetched_seconds
        request_ids = [
            request_id
            for request_id, fetched_at in server.fetched_at.items()
            if fetched_at < fetched_before
        ]
        try:
            await server.drop_results(request_ids)
        except PosttrainError as error:
            log.warning("fetched results could not be dropped: %s", error)
            continue
        for request_id in request_ids:
            server.fetched_at.pop(request_id, None)


async def _checkpoint_store_log(server: ServiceServer) -> None:
    """Checkpoint SQLite's log regularly so that no transaction has to."""
    while True:
        await asyncio.sleep(LOG_CHECKPOINT_SECONDS)
        try:
            await server.call_store(server.store.checkpoint_log, MAX_LOG_BYTES)
        except PosttrainError as error:
            log.warning("the store's log could not be checkpointed: %s", error)


def serve_http(settings: ServiceSettings) -> None:
    """Serve until SIGTERM or Ctrl-C. Raises: SettingsError; BackendError if the store cannot be opened."""
    import uvicorn

    limits = settings.server
    num_files = raise_open_file_limit(max(MAX_OPEN_FILES, limits.max_connections + RESERVED_FILES))
    max_connections = min(limits.max_connections, max(1, num_files - RESERVED_FILES))
    http: Any = limit_connections(max_connections, limits.idle_seconds)
    shorten_switch_interval()
    store = open_service_store(settings)
    server = uvicorn.Server(
        uvicorn.Config(
            build_service_app(settings, store),
            http=http,
            host=settings.server.host,
            port=settings.server.port,
            log_level="warning",
            access_log=False,
            timeout_keep_alive=max(1, int(limits.idle_seconds)),
            backlog=2048,
            timeout_graceful_shutdown=3,
            lifespan="on",
        )
    )
    try:
        # uvicorn has shut down and re-raises the signal
        with contextlib.suppress(KeyboardInterrupt):
            server.run()
    finally:
        store.close()


def translate_service_error(error: Exception) -> HTTPError:
    """Return the HTTP status to which the public client reacts correctly.

    The client retries after 408, 409, 429 and 5xx, so a reused sequence id with another payload is 422; 410 tells it
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


async def build_error_response(request: Request, error: Exception) -> Response:
    """Build the answer to a request whose handler raised: its status and message."""
    http_error = translate_service_error(error)
    return JSONResponse({"detail": str(http_error)}, http_error.status, headers=http_error.headers)
