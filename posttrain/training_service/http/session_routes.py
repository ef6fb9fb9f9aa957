"""Routes before any training: configuration of clients, sessions, telemetry, capabilities, the key itself."""

from __future__ import annotations

import json
import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from posttrain.training_service.http.server_state import (
    ServiceServer,
    authenticate_request,
    find_service_server,
    read_full_payload,
    read_json_body,
    read_json_request,
)
from posttrain.training_service.store import DEFAULT_PROJECT, ApiKey, Page, SessionRecord
from posttrain.training_service.wire.request_bodies import (
    CreateSession,
    FinishSession,
    SearchSessions,
    SessionHeartbeat,
    SetProject,
    StatusQuery,
)
from posttrain.web.errors import HTTPError

MAX_LISTED = 1000
# One chunk after the other: nothing has to be put in order. Loopback needs no compression. One poller for each sampling
# session takes the place of a connection for each sample.
CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "parallel_fwdbwd_chunks": False,
    "proto_compress_fwdbwd": False,
    "sample_use_retrieve_futures": True,
    "sample_join_sampling_session": True,
    "custom_loss_server_side": False,
}
DYNAMIC_CONFIG = {
    "refresh_interval_sec": 300,
    "sample_cancel_enabled": True,
    "sample_cancel_max_batch_size": 64,
}


def format_timestamp(seconds: float) -> str:
    """A time since 1970 as ISO 8601 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def parse_page_bounds(request: Request) -> tuple[int, int]:
    """(limit, offset) of a list. Raises: Refused (422)."""
    found = []
    for name, default, low, high in (("limit", "20", 1, MAX_LISTED), ("offset", "0", 0, 1 << 31)):
        text = request.query_params.get(name, default)
        if not text.isascii() or not text.isdigit() or not low <= int(text[:12]) <= high:
            raise HTTPError(422, f"{name}: {text[:40]!r}, expected {low} to {high}")
        found.append(int(text))
    return found[0], found[1]


async def _authorize_session_path(request: Request) -> tuple[ServiceServer, ApiKey, str]:
    """Server, caller, and the caller's session that the path names. Raises: Refused (401, 403, 404)."""
    server, caller = await authenticate_request(request)
    session_id = request.path_params["session_id"]
    await server.check_session_owner(caller, session_id)
    return server, caller, session_id


async def _report_health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _send_client_config(request: Request) -> Response:
    await find_service_server(request).authenticate_caller(request)
    return JSONResponse(CLIENT_CONFIG)


async def _send_dynamic_config(request: Request) -> Response:
    await find_service_server(request).authenticate_caller(request)
    return JSONResponse(DYNAMIC_CONFIG)


async def _create_session(request: Request) -> Response:
    server, caller, body, _ = await read_json_request(request, CreateSession)
    session_id = secrets.token_hex(16)
    await server.call_store(
        server.store.create_session, session_id, caller.key_id, body.model_dump()
    )
    await server.record_audit_entry(caller, "session_create", session_id, body.sdk_version[:100])
    return JSONResponse({"type": "create_session", "session_id": session_id})


async def _record_heartbeat(request: Request) -> Response:
    server, caller, body, _ = await read_json_request(request, SessionHeartbeat)
    await server.check_session_owner(caller, body.session_id)
    if not await server.call_store(server.store.mark_session_active, body.session_id):
        raise HTTPError(410, f"session '{body.session_id}' is finished")
    return JSONResponse({"type": "session_heartbeat"})


async def _finish_session(request: Request) -> Response:
    server, caller, session_id = await _authorize_session_path(request)
    body = await read_json_body(server, request, FinishSession)
    end = {"type": "client_finished", "reason": {"type": body.reason.type}, "detail": body.detail}
    await server.call_store(server.store.finish_session, session_id, {"status": end})
    await server.record_audit_entry(caller, "session_finish", session_id, body.reason.type)
    return JSONResponse({"session_id": session_id})


async def _drop_telemetry(request: Request) -> Response:
    """Taken and dropped: the service keeps no telemetry of its users."""
    server = find_service_server(request)
    await server.authenticate_caller(request)
    await read_full_payload(server, request)
    return JSONResponse({"status": "accepted"})


def _read_context_length(model_folder: str) -> int | None:
    """Context of a local model folder, read from its config alone."""
    try:
        config = json.loads((Path(model_folder) / "config.json").read_text())
        return int(config["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


async def _describe_capabilities(request: Request) -> Response:
    server = find_service_server(request)
    await server.authenticate_caller(request)
    models = [
        {
            "model_name": name,
            "max_context_length": _read_context_length(str(place)),
            "trainable": True,
            "sampleable": True,
        }
        for name, place in sorted(server.settings.engine.bases.items())
    ]
    return JSONResponse({"supported_models": models})


async def _list_sessions(request: Request) -> Response:
    server, caller = await authenticate_request(request)
    limit, offset = parse_page_bounds(request)
    page: Page[SessionRecord] = await server.call_store(
        server.store.list_sessions, caller.key_id, limit, offset
    )
    return JSONResponse({"sessions": [session.session_id for session in page.items]})


async def _describe_session(request: Request) -> Response:
    server, _, session_id = await _authorize_session_path(request)
    session = await server.call_store(server.store.find_session, session_id)
    runs = await server.call_store(server.store.list_runs, None, MAX_LISTED, 0, session_id)
    samplers = await server.call_store(server.store.list_samplers, None, MAX_LISTED, 0, session_id)
    assert session is not None
    return JSONResponse(
        {
            "training_run_ids": [run.model_id for run in runs.items],
            "sampler_ids": [sampler.sampler_id for sampler in samplers.items],
            "user_metadata": format_metadata(session.facts.get("user_metadata")),
            "display_name": session.facts.get("display_name"),
        }
    )


def format_metadata(metadata: Any) -> dict[str, str]:
    """Metadata as the client's types have it: values that are no texts as JSON."""
    return {str(k): v if isinstance(v, str) else json.dumps(v) for k, v in (metadata or {}).items()}


def _describe_session_status(session: SessionRecord) -> dict[str, Any] | None:
    found: dict[str, Any] | None = session.facts.get("status")
    return {"type": "active"} if session.finished is None else found


def _is_search_match(session: SessionRecord, query: SearchSessions) -> bool:
    facts = session.facts
    if query.session_id is not None or query.display_name is not None:
        name = str(facts.get("display_name") or "").lower()
        named = query.display_name is not None and all(
            word in name for word in query.display_name.lower().split()
        )
        if session.session_id != query.session_id and not named:
            return False
    if (
        query.project_ids is not None
        and str(facts.get("project_id") or DEFAULT_PROJECT) not in query.project_ids
    ):
        return False
    metadata = format_metadata(facts.get("user_metadata"))
    if any(metadata.get(key) != value for key, value in query.user_metadata.items()):
        return False
    if query.statuses is None:
        return True
    status = _describe_session_status(session)
    return any(_has_status(status, one) for one in query.statuses)


def _has_status(status: dict[str, Any] | None, query: StatusQuery) -> bool:
    if not status or query.type != status["type"]:
        return False
    return query.reasons is None or status.get("reason", {}).get("type") in query.reasons


async def _search_sessions(request: Request) -> Response:
    """Own sessions with some properties, the newest first."""
    server, caller, asked, _ = await read_json_request(request, SearchSessions)
    after = None if asked.cursor is None else asked.cursor.last_session_id
    found: list[SessionRecord] = []
    offset, is_behind = 0, after is None
    is_asked = asked.owner.type != "user" or caller.key_id in (asked.owner.owner_urns or ())
    while is_asked and len(found) <= asked.limit:
        page = await server.call_store(
            server.store.list_sessions, caller.key_id, MAX_LISTED, offset
        )
        for session in page.items:
            if is_behind and _is_search_match(session, asked):
                found.append(session)
            is_behind = is_behind or session.session_id == after
        offset += len(page.items)
        if offset >= page.total or not page.items:
            break
    shown, is_more = found[: asked.limit], len(found) > asked.limit
    rows = []
    for session in shown:
        runs = await server.call_store(
            server.store.list_runs, None, MAX_LISTED, 0, session.session_id
        )
        saved = [
            await server.call_store(server.store.list_checkpoints, None, 1, 0, run.model_id)
            for run in runs.items
        ]
        rows.append(
            {
                "session_id": session.session_id,
                "created_at": format_timestamp(session.created),
                "owner": caller.key_id,
                "project_id": str(session.facts.get("project_id") or DEFAULT_PROJECT),
                "status": _describe_session_status(session),
                "checkpoints_count": sum(page.total for page in saved),
                "display_name": session.facts.get("display_name"),
                "user_metadata": format_metadata(session.facts.get("user_metadata")),
            }
        )
    last = shown[-1] if shown and is_more else None
    cursor = (
        None
        if last is None
        else {"last_created_at": format_timestamp(last.created), "last_session_id": last.session_id}
    )
    return JSONResponse({"sessions": rows, "next_cursor": cursor})


async def _set_project(request: Request) -> Response:
    server, caller, session_id = await _authorize_session_path(request)
    body = await read_json_body(server, request, SetProject)
    await server.call_store(
        server.store.update_session, session_id, {"project_id": body.project_id}
    )
    await server.record_audit_entry(caller, "session_project", session_id, body.project_id[:100])
    return Response(status_code=204)


async def _describe_api_key(request: Request) -> Response:
    caller = await find_service_server(request).authenticate_caller(request)
    return JSONResponse(
        {
            "key_id": caller.key_id,
            "name": caller.name,
            "note": caller.name,
            "details": {
                "created": format_timestamp(caller.created),
                "requests_per_minute": caller.requests_per_minute,
                "queue": caller.queue,
            },
        }
    )


async def _revoke_api_key(request: Request) -> Response:
    server, caller = await authenticate_request(request)
    await server.call_store(server.store.revoke_key, caller.key_id)
    await server.record_audit_entry(caller, "key_revoke", caller.key_id)
    return Response(status_code=204)


SESSION_ROUTES = [
    Route("/healthz", _report_health, methods=["GET"]),
    Route("/client/config", _send_client_config, methods=["POST"]),
    Route("/client/dynamic_config", _send_dynamic_config, methods=["POST"]),
    Route("/create_session", _create_session, methods=["POST"]),
    Route("/session_heartbeat", _record_heartbeat, methods=["POST"]),
    Route("/telemetry", _drop_telemetry, methods=["POST"]),
    Route("/get_server_capabilities", _describe_capabilities, methods=["GET"]),
    Route("/sessions", _list_sessions, methods=["GET"]),
    Route("/sessions/search", _search_sessions, methods=["POST"]),
    Route("/sessions/{session_id}", _describe_session, methods=["GET"]),
    Route("/sessions/{session_id}/finish", _finish_session, methods=["POST"]),
    Route("/sessions/{session_id}/project", _set_project, methods=["PUT"]),
    Route("/auth/apikey/me", _describe_api_key, methods=["GET"]),
    Route("/auth/apikey/me", _revoke_api_key, methods=["DELETE"]),
]
