"""Routes for client configuration, sessions, telemetry, capabilities and the API key itself."""

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
# Sequential chunks need no reordering. Loopback needs no compression. One poller per sampling session replaces one
# connection per sample.
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
    """Format a Unix time as ISO 8601 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def parse_page_bounds(request: Request) -> tuple[int, int]:
    """Return (limit, offset) of a list request. Raises: HTTPError (422)."""
    bounds = []
    for name, default, low, high in (("limit", "20", 1, MAX_LISTED), ("offset", "0", 0, 1 << 31)):
        text = request.query_params.get(name, default)
        if not text.isascii() or not text.isdigit() or not low <= int(text[:12]) <= high:
            raise HTTPError(422, f"{name}: {text[:40]!r}, expected {low} to {high}")
        bounds.append(int(text))
    return bounds[0], bounds[1]


async def _authorize_session_path(request: Request) -> tuple[ServiceServer, ApiKey, str]:
    """Return server, caller, and the caller's session named by the path. Raises: HTTPError (401, 403, 404)."""
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
    status = {
        "type": "client_finished",
        "reason": {"type": body.reason.type},
        "detail": body.detail,
    }
    await server.call_store(server.store.finish_session, session_id, {"status": status})
    await server.record_audit_entry(caller, "session_finish", session_id, body.reason.type)
    return JSONResponse({"session_id": session_id})


async def _drop_telemetry(request: Request) -> Response:
    """Accept telemetry and drop it: the service keeps no telemetry of its users."""
    server = find_service_server(request)
    await server.authenticate_caller(request)
    await read_full_payload(server, request)
    return JSONResponse({"status": "accepted"})


def _read_context_length(model_folder: str) -> int | None:
    """Read the context length of a local model folder from its config."""
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
            "max_context_length": _read_context_length(str(path)),
            "trainable": True,
            "sampleable": True,
        }
        for name, path in sorted(server.settings.engine.bases.items())
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
    """Format metadata as the client's types expect it: values other than strings become JSON."""
    return {
        str(key): value if isinstance(value, str) else json.dumps(value)
        for key, value in (metadata or {}).items()
    }


def _describe_session_status(session: SessionRecord) -> dict[str, Any] | None:
    if session.finished is None:
        return {"type": "active"}
    status: dict[str, Any] | None = session.facts.get("status")
    return status


def _is_search_match(session: SessionRecord, query: SearchSessions) -> bool:
    facts = session.facts
    if query.session_id is not None or query.display_name is not None:
        name = str(facts.get("display_name") or "").lower()
        words = [] if query.display_name is None else query.display_name.lower().split()
        is_named = query.display_name is not None and all(word in name for word in words)
        if session.session_id != query.session_id and not is_named:
            return False
    project = str(facts.get("project_id") or DEFAULT_PROJECT)
    if query.project_ids is not None and project not in query.project_ids:
        return False
    metadata = format_metadata(facts.get("user_metadata"))
    if any(metadata.get(key) != value for key, value in query.user_metadata.items()):
        return False
    if query.statuses is None:
        return True
    status = _describe_session_status(session)
    return any(_has_status(status, wanted) for wanted in query.statuses)


def _has_status(status: dict[str, Any] | None, query: StatusQuery) -> bool:
    if not status or query.type != status["type"]:
        return False
    return query.reasons is None or status.get("reason", {}).get("type") in query.reasons


async def _search_sessions(request: Request) -> Response:
    """List the caller's sessions with the requested properties, newest first."""
    server, caller, query, _ = await read_json_request(request, SearchSessions)
    last_id = None if query.cursor is None else query.cursor.last_session_id
    matches: list[SessionRecord] = []
    offset, is_past_cursor = 0, last_id is None
    is_caller = query.owner.type != "user" or caller.key_id in (query.owner.owner_urns or ())
    while is_caller and len(matches) <= query.limit:
        page = await server.call_store(
            server.store.list_sessions, caller.key_id, MAX_LISTED, offset
        )
        for session in page.items:
            if is_past_cursor and _is_search_match(session, query):
                matches.append(session)
            is_past_cursor = is_past_cursor or session.session_id == last_id
        offset += len(page.items)
        if offset >= page.total or not page.items:
            break
    shown = matches[: query.limit]
    cursor = None
    if len(matches) > query.limit:
        created, session_id = shown[-1].created, shown[-1].session_id
        cursor = {"last_created_at": format_timestamp(created), "last_session_id": session_id}
    sessions = [await _format_search_result(server, caller, session) for session in shown]
    return JSONResponse({"sessions": sessions, "next_cursor": cursor})


async def _format_search_result(
    server: ServiceServer, caller: ApiKey, session: SessionRecord
) -> dict[str, Any]:
    runs = await server.call_store(server.store.list_runs, None, MAX_LISTED, 0, session.session_id)
    num_checkpoints = 0
    for run in runs.items:
        page = await server.call_store(server.store.list_checkpoints, None, 1, 0, run.model_id)
        num_checkpoints += page.total
    return {
        "session_id": session.session_id,
        "created_at": format_timestamp(session.created),
        "owner": caller.key_id,
        "project_id": str(session.facts.get("project_id") or DEFAULT_PROJECT),
        "status": _describe_session_status(session),
        "checkpoints_count": num_checkpoints,
        "display_name": session.facts.get("display_name"),
        "user_metadata": format_metadata(session.facts.get("user_metadata")),
    }


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
