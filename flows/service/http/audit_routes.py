"""The route of the audit: what the caller's own key did on one day."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from flows.service.http.callers import called
from flows.service.http.refusals import Refused
from flows.service.http.session_routes import iso

__all__ = ["AUDIT_ROUTES"]

MOST_ENTRIES = 1_000_000  # of a day
_RESOURCES = {"checkpoints": "checkpoint_", "projects": "project_", "teams": "team_", "organizations": "organization_"}


async def _audit(request: Request) -> Response:
    server, caller = await called(request)
    kind = request.query_params.get("event_type", "all")
    if kind != "all" and kind not in _RESOURCES:
        raise Refused(422, f"event_type: {kind[:40]!r}, expected all, {', '.join(_RESOURCES)}")
    day = request.query_params.get("day")
    try:
        start = datetime.fromisoformat(day) if day else datetime.fromtimestamp(server.store.now(), UTC)
        start = start.replace(hour=0, minute=0, second=0, microsecond=0, tzinfo=UTC)
        first, last = start.timestamp(), (start + timedelta(days=1)).timestamp()
    except (ValueError, OverflowError):
        raise Refused(422, f"day: {day!r:.40}, expected YYYY-MM-DD") from None
    page = await server.ask(server.store.audit, caller.key_id, MOST_ENTRIES, first=first, last=last)
    entries = [
        {
            "timestamp": iso(entry.time),
            "event": entry.action,
            "event_details": {"key": caller.name, "subject": entry.subject, "detail": entry.detail},
        }
        for entry in reversed(page.items)
        if entry.action.startswith(_RESOURCES.get(kind, ""))
    ]
    return JSONResponse({"entries": entries})


AUDIT_ROUTES = [Route("/audit", _audit, methods=["GET"])]
