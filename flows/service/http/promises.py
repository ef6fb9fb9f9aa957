"""Accepting requests: everything is durable before its promise is sent."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse

from flows.service.http.callers import Server, called
from flows.service.http.payloads import read_payload
from flows.service.http.refusals import Refused
from flows.service.store import ApiKey, NewRequest, RequestKind, StoredRequest
from flows.service.wire.json_body import Body, TrainingHead, read_body

__all__ = ["accept", "accept_training", "called_with", "json_body", "new_seed", "promise", "whole_payload"]

B = TypeVar("B", bound=Body)
DEADLINE = "x-deadline-seconds"  # own header: not begun by then = cancelled


class JsonCall(NamedTuple, Generic[B]):
    """A request with a JSON body: its server, whose it is, what it says, and the bytes."""

    server: Server
    caller: ApiKey
    body: B
    payload: bytes


def new_seed() -> int:
    """A seed that is drawn once, at acceptance."""
    return secrets.randbits(63)


async def whole_payload(server: Server, request: Request) -> bytes:
    """A JSON body's bytes. Raises: Refused (413, 415)."""
    payload = await read_payload(request, server.settings.server.max_body_bytes)
    if payload.refused:
        raise Refused(413, payload.refused)
    return payload.body


async def called_with(request: Request, kind: type[B]) -> JsonCall[B]:
    """A request with its body as a class. Raises: Refused (401, 413); ServiceError (user)."""
    server, caller = await called(request)
    payload = await whole_payload(server, request)
    return JsonCall(server, caller, read_body(kind, payload), payload)


async def json_body(server: Server, request: Request, kind: type[B]) -> B:
    """A body as its class. Raises: Refused (413); ServiceError (user)."""
    return read_body(kind, await whole_payload(server, request))


def _deadline(server: Server, request: Request) -> float | None:
    text = request.headers.get(DEADLINE)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e9:
        raise Refused(422, f"{DEADLINE}: {text[:40]!r} is no number of seconds above 0")
    return server.store.now() + seconds


async def accept(
    server: Server, request: Request, caller: ApiKey, kind: RequestKind, target: str, seq: int, payload: bytes,
    facts: Mapping[str, Any], *, is_protobuf: bool = False,
) -> StoredRequest:  # fmt: skip
    """Store a request of a target that belongs to the caller. Raises: ServiceError and its kinds."""
    new = NewRequest(
        kind=kind,
        owner=caller.key_id,
        session_id=target.partition(":")[0],
        target=target,
        seq=seq,
        payload=payload,
        content_type="protobuf" if is_protobuf else "json",
        facts=facts,
        deadline=_deadline(server, request),
    )
    return await server.accept(new)


async def accept_training(
    server: Server,
    request: Request,
    kind: RequestKind,
    facts: Callable[[bytes, str], Mapping[str, Any]] = lambda payload, model_id: {},
) -> StoredRequest:
    """Store a JSON request of a training run's order; `facts` are made of payload and run.

    Once it is known whose it is and where it stands, it is accepted, whatever else is wrong with it: the client has
    used its number, and would wait for ever behind a hole. The fault is then its result.
    """
    caller = await server.caller(request)
    payload = await whole_payload(server, request)
    head = read_body(TrainingHead, payload)
    await server.own_target(caller, head.model_id)
    return await accept(
        server, request, caller, kind, head.model_id, head.seq_id, payload, facts(payload, head.model_id)
    )


def promise(taken: StoredRequest, **more: Any) -> JSONResponse:
    """The answer to an accepted request: where its result will be."""
    return JSONResponse({"request_id": taken.request_id, **more})
