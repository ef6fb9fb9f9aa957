"""Routes of results: one, all of a sampling session, cancelling."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from flows.service.http.callers import Server
from flows.service.http.promises import called_with
from flows.service.http.refusals import Refused
from flows.service.http.sampling_routes import CLONE_SEQS
from flows.service.store import ApiKey, StoredRequest
from flows.service.wire.directory_bodies import CancelFuture, FuturesTarget, RetrieveFuture, RetrieveFutures

__all__ = ["FUTURE_ROUTES", "own_result", "within"]

INLINE_BYTES = 1 << 20  # larger results are announced first, where the client allows it
_TRY_AGAIN = {"type": "try_again", "queue_state": "active"}
_TYPES = {"json": "application/json", "protobuf": "application/x-protobuf"}


async def own_result(server: Server, caller: ApiKey, request_id: str) -> StoredRequest:
    """A request with its result, if it has one, which is on the disk then. Raises: Refused (410, 403); BackendError."""
    found = server.room.result(request_id)
    if found is None or _has_expired(server, found):
        found = None if "\0" in request_id else await server.ask(server.store.result, request_id)
        if found is None:
            raise Refused(410, f"request '{request_id[:100]}' is unknown; its result was fetched or has expired")
        if found.is_final and not server.room.is_told(request_id):
            await server.synced()
    _check_owner(caller, found.owner, request_id)
    return found


def _has_expired(server: Server, found: StoredRequest) -> bool:
    return (found.finished or 0.0) + server.settings.worker.result_seconds <= server.store.now()


def _check_owner(caller: ApiKey, owner: str, request_id: str) -> None:
    if owner != caller.key_id:
        raise Refused(403, f"request '{request_id[:100]}' belongs to another API key")


async def _retrieve(request: Request) -> Response:
    """Held until the result is there; 408 = ask again."""
    server, caller, body, _ = await called_with(request, RetrieveFuture)
    room, request_id, found = server.room, body.request_id, None
    with room.expecting(request_id) as event:
        if (owner := room.owner_of_open(request_id)) is not None:
            _check_owner(caller, owner, request_id)
        else:
            found = await own_result(server, caller, request_id)
        waits = (found is None or not found.is_final) and not room.is_over
        if waits and await within(event, server.settings.server.poll_seconds):
            found = await own_result(server, caller, request_id)
        elif found is None:
            room.doubt(request_id)
    return JSONResponse(_TRY_AGAIN, 408) if found is None else _result(server, found, body)


async def within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for the event, at most so long. True = it came."""
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True


def _result(server: Server, found: StoredRequest, asked: RetrieveFuture) -> Response:
    if not found.is_final:
        return JSONResponse(_TRY_AGAIN, 408)
    if found.state != "done":
        return JSONResponse({"error": found.error or found.state, "category": found.category or "server"})
    if found.answer is None or found.answer_type is None:
        raise Refused(410, f"the result of {found.request_id} was fetched, or has expired, and is forgotten")
    if asked.allow_metadata_only and len(found.answer) > INLINE_BYTES:
        return JSONResponse({"status": "complete_metadata", "response_payload_size": len(found.answer)})
    server.fetched[found.request_id] = time.monotonic()
    return Response(found.answer, media_type=_TYPES[found.answer_type])


async def _retrieve_many(request: Request) -> Response:
    """Held until a request of the sampling session becomes final; then all that did since the cursor."""
    server, caller, body, _ = await called_with(request, RetrieveFutures)
    target = body.target
    await server.own_target(caller, target.sampling_session_id)
    if body.retrieved_request_ids:
        await server.forget(body.retrieved_request_ids, caller.key_id)
    seconds = server.settings.server.poll_seconds
    end = time.monotonic() + (seconds if body.timeout is None else min(seconds, body.timeout))
    with server.room.expecting(target.sampling_session_id) as event:
        while True:
            event.clear()
            completions, cursor = await _finished(server, target, body.prev_cursor)
            left = end - time.monotonic()
            if completions or left <= 0 or server.room.is_over or not await within(event, left):
                return JSONResponse({"completions": completions, "cursor": cursor})


async def _finished(server: Server, target: FuturesTarget, cursor: int) -> tuple[list[dict[str, Any]], int]:
    first = target.cloned_sampler_id * CLONE_SEQS
    found, cursor = await server.ask(
        server.store.finished_of, target.sampling_session_id, first, first + CLONE_SEQS - 1, cursor
    )
    if cursor > server.room.told:
        await server.synced()
    completions = []
    for request_id, state, size in found:
        if state == "done":
            completions.append(
                {"state": "finished", "request_id": request_id, "response_payload_uncompressed_size": size}
            )
        else:
            completions.append({"state": "failed", "request_id": request_id})
    return completions, cursor


async def _cancel(request: Request) -> Response:
    server, caller, body, _ = await called_with(request, CancelFuture)
    await own_result(server, caller, body.request_id)
    is_cancelled = await server.ask(server.store.cancel, body.request_id)
    await server.note(caller, "request_cancel", body.request_id, "" if is_cancelled else "too late")
    return JSONResponse({"type": "cancel_future", "cancelled": is_cancelled})


FUTURE_ROUTES = [
    Route("/retrieve_future", _retrieve, methods=["POST"]),
    Route("/retrieve_futures", _retrieve_many, methods=["POST"]),
    Route("/cancel_future", _cancel, methods=["POST"]),
]
