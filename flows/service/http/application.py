"""The service's application: the clients' routes under /api/v1, its own beside them, and what all of them share."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from flows.runtime.prefect_access import OnlyFromHere
from flows.service.http.audit_routes import AUDIT_ROUTES
from flows.service.http.callers import Server
from flows.service.http.checkpoint_routes import CHECKPOINT_ROUTES
from flows.service.http.copy_routes import COPY_ROUTES
from flows.service.http.file_routes import FILE_ROUTES
from flows.service.http.future_routes import FUTURE_ROUTES
from flows.service.http.own_routes import add_own_routes
from flows.service.http.refusals import Refused, refused_response
from flows.service.http.sampling_routes import SAMPLING_ROUTES
from flows.service.http.session_routes import SESSION_ROUTES
from flows.service.http.training_routes import TRAINING_ROUTES
from flows.service.http.usage_routes import USAGE_ROUTES
from flows.service.store import ServiceStore
from rl_core.errors import BackendError, PosttrainError, ServiceError
from rl_core.settings import ServiceSettings

__all__ = ["make_service_app"]

log = logging.getLogger(__name__)
TIDY_SECONDS = 30.0
COPY_SECONDS = 2.0  # between two copies of SQLite's log into its file
LOG_BYTES = 32 << 20  # of that log, after which it begins anew

# Parts of the public interface that this service has not, by name.
_ABSENT = {
    "billing/{rest:path}": "there is no billing here",
    "auth/token": "API keys are used as they are; pjwt_auth_enabled is false",
    "create_custom_loss": "custom losses run in the client; custom_loss_server_side is false",
    "unload_model": "a run that is not used leaves memory by itself",
}


def _absent(why: str) -> Route:
    async def refuse(request: Request) -> Response:
        return JSONResponse({"detail": f"{request.url.path} is not served here: {why}"}, 404)

    return refuse  # type: ignore[return-value]


def make_service_app(settings: ServiceSettings, store: ServiceStore) -> OnlyFromHere:
    """The application (ASGI) over an open store."""
    server = Server(settings, store)

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        server.open()
        tasks = [asyncio.create_task(_tidy(server)), asyncio.create_task(_copy_log(server))]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            server.close()

    app = FastAPI(
        title="posttrain training service", lifespan=life, docs_url=None, redoc_url=None,
        exception_handlers={kind: refused_response for kind in (Refused, ServiceError, BackendError)},
    )  # fmt: skip
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
        Route(f"/{path}", _absent(why), methods=["GET", "POST", "PUT", "DELETE"]) for path, why in _ABSENT.items()
    ]
    add_own_routes(app, server)
    app.router.routes.extend(Route(f"/api/v1{r.path}", r.endpoint, methods=list(r.methods or ())) for r in routes)
    return OnlyFromHere(app)


async def _tidy(server: Server) -> None:
    """Forget results some time after they were fetched."""
    while True:
        await asyncio.sleep(min(TIDY_SECONDS, server.settings.server.fetched_seconds + 1))
        old = time.monotonic() - server.settings.server.fetched_seconds
        chosen = [name for name, when in server.fetched.items() if when < old]
        try:
            await server.forget(chosen)
        except PosttrainError as error:
            log.warning("results that were fetched are still kept: %s", error)
            continue
        for name in chosen:
            server.fetched.pop(name, None)


async def _copy_log(server: Server) -> None:
    """Keep SQLite's log short, so that no transaction has to."""
    while True:
        await asyncio.sleep(COPY_SECONDS)
        try:
            await server.ask(server.store.copy_log, LOG_BYTES)
        except PosttrainError as error:
            log.warning("the store's log is not copied: %s", error)
