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

from flows.service.http.callers import Server, called, server_of
from flows.service.http.promises import called_with, json_body, whole_payload
from flows.service.http.refusals import Refused
from flows.service.store import PROJECT, ApiKey, Page, SessionRecord
from flows.service.wire.directory_bodies import (
    CreateSession,
    FinishSession,
    Heartbeat,
    SearchSessions,
    SetProject,
    StatusQuery,
)

__all__ = ["SESSION_ROUTES", "iso", "page_bounds", "texts"]

MOST_LISTED = 1000
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
DYNAMIC_CONFIG = {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 64}


def iso(seconds: float) -> str:
    """A time since 1970 as ISO 8601 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def page_bounds(request: Request) -> tuple[int, int]:
    """(limit, offset) of a list. Raises: Refused (422)."""
    found = []
    for name, default, low, high in (("limit", "20", 1, MOST_LISTED), ("offset", "0", 0, 1 << 31)):
        text = request.query_params.get(name, default)
        if not text.isascii() or not text.isdigit() or not low <= int(text[:12]) <= high:
            raise Refused(422, f"{name}: {text[:40]!r}, expected {low} to {high}")
        found.append(int(text))
    return found[0], found[1]


async def _of_path(request: Request) -> tuple[Server, ApiKey, str]:
    """Server, caller, and the caller's session that the path names. Raises: Refused (401, 403, 404)."""
    server, caller = await called(request)
    session_id = request.path_params["session_id"]
    await server.own_session(caller, session_id)
    return server, caller, session_id


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _client_config(request: Request) -> Response:
    await server_of(request).caller(request)
    return JSONResponse(CLIENT_CONFIG)


async def _dynamic_config(request: Request) -> Response:
    await server_of(request).caller(request)
    return JSONResponse(DYNAMIC_CONFIG)


async def _create_session(request: Request) -> Response:
    server, caller, body, _ = await called_with(request, CreateSession)
    session_id = secrets.token_hex(16)
    await server.ask(server.store.create_session, session_id, caller.key_id, body.model_dump())
    await server.note(caller, "session_create", session_id, body.sdk_version[:100])
    return JSONResponse({"type": "create_session", "session_id": session_id})


async def _heartbeat(request: Request) -> Response:
    server, caller, body, _ = await called_with(request, Heartbeat)
    await server.own_session(caller, body.session_id)
    if not await server.ask(server.store.touch_session, body.session_id):
        raise Refused(410, f"session '{body.session_id}' is finished")
    return JSONResponse({"type": "session_heartbeat"})


async def _finish(request: Request) -> Response:
    server, caller, session_id = await _of_path(request)
    body = await json_body(server, request, FinishSession)
    end = {"type": "client_finished", "reason": {"type": body.reason.type}, "detail": body.detail}
    await server.ask(server.store.finish_session, session_id, {"status": end})
    await server.note(caller, "session_finish", session_id, body.reason.type)
    return JSONResponse({"session_id": session_id})


async def _telemetry(request: Request) -> Response:
    """Taken and dropped: the service keeps no telemetry of its users."""
    server = server_of(request)
    await server.caller(request)
    await whole_payload(server, request)
    return JSONResponse({"status": "accepted"})


def _context(place: str) -> int | None:
    """Context of a local model folder, read from its config alone."""
    try:
        config = json.loads((Path(place) / "config.json").read_text())
        return int(config["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


async def _capabilities(request: Request) -> Response:
    server = server_of(request)
    await server.caller(request)
    models = [
        {"model_name": name, "max_context_length": _context(str(place)), "trainable": True, "sampleable": True}
        for name, place in sorted(server.settings.engine.bases.items())
    ]
    return JSONResponse({"supported_models": models})


async def _sessions(request: Request) -> Response:
    server, caller = await called(request)
    limit, offset = page_bounds(request)
    page: Page[SessionRecord] = await server.ask(server.store.sessions, caller.key_id, limit, offset)
    return JSONResponse({"sessions": [session.session_id for session in page.items]})


async def _session(request: Request) -> Response:
    server, _, session_id = await _of_path(request)
    session = await server.ask(server.store.session, session_id)
    runs = await server.ask(server.store.runs, None, MOST_LISTED, 0, session_id)
    samplers = await server.ask(server.store.samplers, None, MOST_LISTED, 0, session_id)
    assert session is not None
    return JSONResponse(
        {
            "training_run_ids": [run.model_id for run in runs.items],
            "sampler_ids": [sampler.sampler_id for sampler in samplers.items],
            "user_metadata": texts(session.facts.get("user_metadata")),
            "display_name": session.facts.get("display_name"),
        }
    )


def texts(found: Any) -> dict[str, str]:
    """Metadata as the client's types have it: values that are no texts as JSON."""
    return {str(k): v if isinstance(v, str) else json.dumps(v) for k, v in (found or {}).items()}


def _status(session: SessionRecord) -> dict[str, Any] | None:
    found: dict[str, Any] | None = session.facts.get("status")
    return {"type": "active"} if session.finished is None else found


def _fits(session: SessionRecord, asked: SearchSessions) -> bool:
    facts = session.facts
    if asked.session_id is not None or asked.display_name is not None:
        name = str(facts.get("display_name") or "").lower()
        named = asked.display_name is not None and all(word in name for word in asked.display_name.lower().split())
        if session.session_id != asked.session_id and not named:
            return False
    if asked.project_ids is not None and str(facts.get("project_id") or PROJECT) not in asked.project_ids:
        return False
    metadata = texts(facts.get("user_metadata"))
    if any(metadata.get(key) != value for key, value in asked.user_metadata.items()):
        return False
    if asked.statuses is None:
        return True
    status = _status(session)
    return any(_has_status(status, one) for one in asked.statuses)


def _has_status(status: dict[str, Any] | None, asked: StatusQuery) -> bool:
    if not status or asked.type != status["type"]:
        return False
    return asked.reasons is None or status.get("reason", {}).get("type") in asked.reasons


async def _search(request: Request) -> Response:
    """Own sessions with some properties, the newest first."""
    server, caller, asked, _ = await called_with(request, SearchSessions)
    after = None if asked.cursor is None else asked.cursor.last_session_id
    found: list[SessionRecord] = []
    offset, is_behind = 0, after is None
    is_asked = asked.owner.type != "user" or caller.key_id in (asked.owner.owner_urns or ())
    while is_asked and len(found) <= asked.limit:
        page = await server.ask(server.store.sessions, caller.key_id, MOST_LISTED, offset)
        for session in page.items:
            if is_behind and _fits(session, asked):
                found.append(session)
            is_behind = is_behind or session.session_id == after
        offset += len(page.items)
        if offset >= page.total or not page.items:
            break
    shown, is_more = found[: asked.limit], len(found) > asked.limit
    rows = []
    for session in shown:
        runs = await server.ask(server.store.runs, None, MOST_LISTED, 0, session.session_id)
        saved = [await server.ask(server.store.checkpoints, None, 1, 0, run.model_id) for run in runs.items]
        rows.append(
            {
                "session_id": session.session_id,
                "created_at": iso(session.created),
                "owner": caller.key_id,
                "project_id": str(session.facts.get("project_id") or PROJECT),
                "status": _status(session),
                "checkpoints_count": sum(page.total for page in saved),
                "display_name": session.facts.get("display_name"),
                "user_metadata": texts(session.facts.get("user_metadata")),
            }
        )
    last = shown[-1] if shown and is_more else None
    cursor = None if last is None else {"last_created_at": iso(last.created), "last_session_id": last.session_id}
    return JSONResponse({"sessions": rows, "next_cursor": cursor})


async def _set_project(request: Request) -> Response:
    server, caller, session_id = await _of_path(request)
    body = await json_body(server, request, SetProject)
    await server.ask(server.store.change_session, session_id, {"project_id": body.project_id})
    await server.note(caller, "session_project", session_id, body.project_id[:100])
    return Response(status_code=204)


async def _own_key(request: Request) -> Response:
    caller = await server_of(request).caller(request)
    return JSONResponse(
        {
            "key_id": caller.key_id,
            "name": caller.name,
            "note": caller.name,
            "details": {"created": iso(caller.created), "requests_per_minute": caller.requests_per_minute,
                        "queue": caller.queue},
        }
    )  # fmt: skip


async def _revoke_own_key(request: Request) -> Response:
    server, caller = await called(request)
    await server.ask(server.store.revoke_key, caller.key_id)
    await server.note(caller, "key_revoke", caller.key_id)
    return Response(status_code=204)


SESSION_ROUTES = [
    Route("/healthz", _health, methods=["GET"]),
    Route("/client/config", _client_config, methods=["POST"]),
    Route("/client/dynamic_config", _dynamic_config, methods=["POST"]),
    Route("/create_session", _create_session, methods=["POST"]),
    Route("/session_heartbeat", _heartbeat, methods=["POST"]),
    Route("/telemetry", _telemetry, methods=["POST"]),
    Route("/get_server_capabilities", _capabilities, methods=["GET"]),
    Route("/sessions", _sessions, methods=["GET"]),
    Route("/sessions/search", _search, methods=["POST"]),
    Route("/sessions/{session_id}", _session, methods=["GET"]),
    Route("/sessions/{session_id}/finish", _finish, methods=["POST"]),
    Route("/sessions/{session_id}/project", _set_project, methods=["PUT"]),
    Route("/auth/apikey/me", _own_key, methods=["GET"]),
    Route("/auth/apikey/me", _revoke_own_key, methods=["DELETE"]),
]
