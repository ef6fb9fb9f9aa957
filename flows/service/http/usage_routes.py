"""Routes about the use of the service: storage of saved weights, and the timeline of a session's requests."""

from __future__ import annotations

import math

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from flows.service.http.callers import Server, called, server_of
from flows.service.http.refusals import Refused
from flows.service.http.session_routes import iso
from flows.service.http.session_trace import session_trace
from flows.service.store.records import storable

__all__ = ["USAGE_ROUTES"]

GIGABYTE = 1e9  # bytes, as storage is told in
MOST_TARGETS, MOST_REQUESTS = 1000, 100_000  # of one trace


async def _storage(request: Request) -> Response:
    """Number and size of the caller's saved weights by project; there is no price."""
    server, caller = await called(request)
    project = request.query_params.get("project_id")
    found = await server.ask(server.store.storage, caller.key_id, None if project is None else storable(project))
    data = [
        {"project_id": name, "org_user_urn": caller.key_id, "user_name": caller.name, "checkpoint_count": count,
         "size_bytes": size, "size_gigabytes": size / GIGABYTE}
        for name, count, size in found
    ]  # fmt: skip
    return JSONResponse({"data": data, "effective_rate_usd_per_gigabyte_month": None})


def _subject(session_id: str) -> str:
    return f"traces/{session_id}"


async def _trace_address(request: Request) -> Response:
    """A signed address of a session's trace, which is made when it is fetched."""
    server, caller = await called(request)
    session_id = request.path_params["session_id"]
    await server.own_session(caller, session_id)
    expires = math.ceil(server.store.now() + server.settings.server.url_seconds)
    signature = server.signer.sign(_subject(session_id), expires)
    await server.note(caller, "session_trace", session_id)
    url = f"{str(request.base_url).rstrip('/')}/api/v1/traces/{expires}/{signature}/{session_id}"
    return JSONResponse({"status": "ready", "url": url, "expires": iso(expires)})


async def _trace(request: Request) -> Response:
    server, parts = server_of(request), request.path_params
    session_id = parts["session_id"]
    if not server.signer.is_valid(_subject(session_id), parts["expires"], parts["signature"], server.store.now()):
        raise Refused(403, "the address is not signed by this service, or has expired; ask for a new one")
    return JSONResponse(await server.ask(_made, server, session_id))


def _made(server: Server, session_id: str) -> dict[str, object]:
    """The trace of the session's runs and samplers, the newest requests where there are too many."""
    store = server.store
    runs = store.runs(None, MOST_TARGETS, 0, session_id).items
    samplers = store.samplers(None, MOST_TARGETS, 0, session_id).items
    targets, left, found = [*(one.model_id for one in runs), *(one.sampler_id for one in samplers)], MOST_REQUESTS, {}
    for target in targets:
        found[target] = store.requests_of(target, left)
        left -= len(found[target])
    return session_trace(session_id, found, store.now())


USAGE_ROUTES = [
    Route("/billing/usage/checkpoints/current", _storage, methods=["GET"]),
    Route("/sessions/{session_id}/trace_export", _trace_address, methods=["GET"]),
    Route("/traces/{expires:int}/{signature}/{session_id}", _trace, methods=["GET"]),
]
