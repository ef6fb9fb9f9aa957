"""Routes about use of the service: storage, timelines of sessions, and the audit of the caller's key.

A timeline uses the Trace Event Format
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU),
which ui.perfetto.dev and chrome://tracing open. Each request is a group of nestable asynchronous events, from
acceptance to end, with the computation nested inside. Overlapping requests of a run appear next to each other, so the
trace shows which requests were in flight during which computation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from posttrain.training_service.http.server_state import (
    ServiceServer,
    authenticate_request,
    find_service_server,
)
from posttrain.training_service.http.session_routes import format_timestamp
from posttrain.training_service.store import StoredRequest
from posttrain.training_service.store.records import replace_unstorable
from posttrain.web.errors import HTTPError

MICROSECONDS_PER_SECOND = 1e6  # the trace format counts in microseconds
BYTES_PER_GIGABYTE = 1e9
MAX_TRACE_TARGETS, MAX_TRACE_REQUESTS = 1000, 100_000  # per trace
MAX_AUDIT_ENTRIES = 1_000_000  # per day
_RESOURCE_PREFIXES = {
    "checkpoints": "checkpoint_",
    "projects": "project_",
    "teams": "team_",
    "organizations": "organization_",
}


def build_session_trace(
    session_id: str, requests: Mapping[str, Sequence[StoredRequest]], now: float
) -> dict[str, Any]:
    """Build the trace of a session.

    Args:
        requests: by training run or sampler. An unfinished request extends to `now`.
    """
    events: list[dict[str, Any]] = []
    for process, (target, rows) in enumerate(requests.items(), 1):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": target}})
        for row in sorted(rows, key=lambda request: request.place):
            events += _format_request_events(process, row, now)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"session_id": session_id}}


def _format_request_events(
    process: int, request: StoredRequest, now: float
) -> list[dict[str, Any]]:
    """Format the begin and end events of a request and of its computation."""
    end = now if request.finished is None else request.finished
    details = {"request_id": request.request_id, "seq": request.seq, "state": request.state}
    if request.error:
        details["error"] = request.error
    spans = [(f"{request.kind} {request.seq}", request.accepted, end, details)]
    if request.started is not None:
        spans.append(("computing", request.started, end, {}))
    shared = {"cat": request.kind, "id": request.request_id, "pid": process, "tid": 0}
    begins = [
        {
            "ph": "b",
            "name": name,
            "ts": round(begin * MICROSECONDS_PER_SECOND),
            "args": args,
            **shared,
        }
        for name, begin, _, args in spans
    ]
    ends = [
        {"ph": "e", "name": name, "ts": round(last * MICROSECONDS_PER_SECOND), **shared}
        for name, _, last, _ in reversed(spans)
    ]
    return [*begins, *ends]


async def _report_storage(request: Request) -> Response:
    """Report number and size of the caller's saved weights by project. There is no price."""
    server, caller = await authenticate_request(request)
    project = request.query_params.get("project_id")
    rows = await server.call_store(
        server.store.summarize_storage,
        caller.key_id,
        None if project is None else replace_unstorable(project),
    )
    data = [
        {
            "project_id": name,
            "org_user_urn": caller.key_id,
            "user_name": caller.name,
            "checkpoint_count": count,
            "size_bytes": size,
            "size_gigabytes": size / BYTES_PER_GIGABYTE,
        }
        for name, count, size in rows
    ]
    return JSONResponse({"data": data, "effective_rate_usd_per_gigabyte_month": None})


def _format_trace_subject(session_id: str) -> str:
    return f"traces/{session_id}"


async def _sign_trace_url(request: Request) -> Response:
    """Return a signed address of a session's trace, which is built when it is fetched."""
    server, caller = await authenticate_request(request)
    session_id = request.path_params["session_id"]
    await server.check_session_owner(caller, session_id)
    expires = math.ceil(server.store.read_clock() + server.settings.server.url_seconds)
    signature = server.signer.sign_subject(_format_trace_subject(session_id), expires)
    await server.record_audit_entry(caller, "session_trace", session_id)
    url = f"{str(request.base_url).rstrip('/')}/api/v1/traces/{expires}/{signature}/{session_id}"
    return JSONResponse({"status": "ready", "url": url, "expires": format_timestamp(expires)})


async def _send_trace(request: Request) -> Response:
    server, parts = find_service_server(request), request.path_params
    session_id = parts["session_id"]
    if not server.signer.is_valid_signature(
        _format_trace_subject(session_id),
        parts["expires"],
        parts["signature"],
        server.store.read_clock(),
    ):
        raise HTTPError(
            403, "the address is not signed by this service, or has expired; ask for a new one"
        )
    return JSONResponse(await server.call_store(_collect_session_trace, server, session_id))


def _collect_session_trace(server: ServiceServer, session_id: str) -> dict[str, object]:
    """Build the trace of a session's runs and samplers, limited to the newest requests."""
    store = server.store
    runs = store.list_runs(None, MAX_TRACE_TARGETS, 0, session_id).items
    samplers = store.list_samplers(None, MAX_TRACE_TARGETS, 0, session_id).items
    targets = [*(run.model_id for run in runs), *(sampler.sampler_id for sampler in samplers)]
    remaining = MAX_TRACE_REQUESTS
    requests = {}
    for target in targets:
        requests[target] = store.list_requests(target, remaining)
        remaining -= len(requests[target])
    return build_session_trace(session_id, requests, store.read_clock())


USAGE_ROUTES = [
    Route("/billing/usage/checkpoints/current", _report_storage, methods=["GET"]),
    Route("/sessions/{session_id}/trace_export", _sign_trace_url, methods=["GET"]),
    Route("/traces/{expires:int}/{signature}/{session_id}", _send_trace, methods=["GET"]),
]


async def _list_audit_entries(request: Request) -> Response:
    """List what the caller's key did on one day."""
    server, caller = await authenticate_request(request)
    kind = request.query_params.get("event_type", "all")
    if kind != "all" and kind not in _RESOURCE_PREFIXES:
        raise HTTPError(
            422, f"event_type: {kind[:40]!r}, expected all, {', '.join(_RESOURCE_PREFIXES)}"
        )
    day = request.query_params.get("day")
    try:
        now = datetime.fromtimestamp(server.store.read_clock(), UTC)
        start = datetime.fromisoformat(day) if day else now
        start = start.replace(hour=0, minute=0, second=0, microsecond=0, tzinfo=UTC)
        first, last = start.timestamp(), (start + timedelta(days=1)).timestamp()
    except (ValueError, OverflowError):
        raise HTTPError(422, f"day: {day!r:.40}, expected YYYY-MM-DD") from None
    page = await server.call_store(
        server.store.list_audit_entries, caller.key_id, MAX_AUDIT_ENTRIES, first=first, last=last
    )
    entries = [
        {
            "timestamp": format_timestamp(entry.time),
            "event": entry.action,
            "event_details": {"key": caller.name, "subject": entry.subject, "detail": entry.detail},
        }
        for entry in reversed(page.items)
        if entry.action.startswith(_RESOURCE_PREFIXES.get(kind, ""))
    ]
    return JSONResponse({"entries": entries})


AUDIT_ROUTES = [Route("/audit", _list_audit_entries, methods=["GET"])]
