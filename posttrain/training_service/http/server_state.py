"""Shared state of all routes, and what they have in common: authentication, ownership checks, acceptance of requests.

Every request is durable before its acceptance is acknowledged.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse

from posttrain.training_service.http.group_commit import GroupCommit, IntakeQueue
from posttrain.training_service.http.result_waiter import ResultWaiter
from posttrain.training_service.store import (
    ApiKey,
    NewRequest,
    RequestKind,
    ServiceStore,
    StoredRequest,
)
from posttrain.training_service.wire.request_bodies import (
    RequestBody,
    TrainingRequestBody,
    parse_request_body,
)
from posttrain.web.errors import HTTPError
from posttrain.web.request_body import read_request_payload
from posttrain.web.signed_urls import UrlSigner
from rl_core.errors import suggest_name
from rl_core.settings import ServiceSettings

T = TypeVar("T")
KEY_CACHE_SECONDS = 2.0  # a revoked key keeps working for this long
MAX_CACHE_ENTRIES = 100_000  # a cache is emptied beyond this size
# Few threads: many short SQLite calls in many threads wait for the interpreter's lock, 5 ms each time.
NUM_STORE_THREADS = 3
DEADLINE_HEADER = "x-deadline-seconds"  # extension of this service: cancel if not started by then


def parse_session_id(target: str) -> str:
    """Return the session id with which the id of a training run or sampling session begins."""
    return target.partition(":")[0]


@dataclass(frozen=True, slots=True)
class _CachedKey:
    key: ApiKey | None
    until: float


class ServiceServer:
    """Shared state of all routes."""

    def __init__(self, settings: ServiceSettings, store: ServiceStore) -> None:
        self.settings, self.store = settings, store
        self.folder = Path(settings.folder)
        self._group_commit = GroupCommit(store)
        self._intake_queue = IntakeQueue(store, self._group_commit)
        self.result_waiter = ResultWaiter(store, self._group_commit)
        self.signer = UrlSigner(self.folder)
        self.fetched_at: dict[
            str, float
        ] = {}  # request id -> monotonic time at which its result was sent
        self._threads = ThreadPoolExecutor(NUM_STORE_THREADS, thread_name_prefix="service-store")
        self._keys: dict[bytes, _CachedKey] = {}  # by SHA-256 of the secret
        self._owners: dict[str, str] = {}  # session id -> key id

    async def call_store(self, function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
        """Call a store function in a thread."""
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, partial(function, *arguments, **keywords)
        )

    async def store_request(self, new: NewRequest) -> StoredRequest:
        """Store a request together with those that arrive at the same time. Raises: ServiceError and its subclasses."""
        stored = await self._intake_queue.accept_request(new)
        self.result_waiter.track_request(stored)
        return stored

    async def wait_until_durable(self) -> None:
        """Wait until everything read from the store so far is on disk. Raises: BackendError."""
        await self._group_commit.wait_for_commit()

    async def drop_results(self, request_ids: Sequence[str], owner: str | None = None) -> None:
        """Drop results, optionally only those of one owner. Raises: BackendError."""
        await self.call_store(self.store.drop_results, request_ids, owner)
        self.result_waiter.evict_results(request_ids)

    def start_threads(self) -> None:
        """Start all threads, in the running event loop."""
        self._group_commit.start_thread()
        self._intake_queue.start_thread()
        self.result_waiter.start_thread()

    def stop_threads(self) -> None:
        """Stop all threads and wake waiting clients."""
        self.result_waiter.stop_thread()
        self._intake_queue.stop_thread()
        self._group_commit.stop_thread()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def authenticate_caller(self, request: Request) -> ApiKey:
        """Return the API key of a request. Raises: HTTPError (401) without a valid key."""
        secret = request.headers.get("x-api-key", "")
        # A digest has a fixed size, so callers without a key cannot fill memory with long secrets.
        digest = hashlib.sha256(secret.encode()).digest()
        cached = self._keys.get(digest)
        if cached is None or cached.until < time.monotonic():
            key = await self.call_store(self.store.find_key, secret) if secret else None
            if len(self._keys) > MAX_CACHE_ENTRIES:
                self._keys.clear()
            cached = self._keys[digest] = _CachedKey(key, time.monotonic() + KEY_CACHE_SECONDS)
        if cached.key is None:
            problem = "unknown or revoked" if secret else "missing"
            raise HTTPError(
                401, f"X-API-Key is {problem}; create one with `posttrain service key create NAME`"
            )
        return cached.key

    async def check_session_owner(self, caller: ApiKey, session_id: str) -> None:
        """Refuse a session that does not exist (HTTPError 404) or belongs to another key (403)."""
        owner = self._owners.get(session_id)
        if owner is None:
            session = None
            if "\0" not in session_id:
                session = await self.call_store(self.store.find_session, session_id)
            if session is None:
                raise HTTPError(404, f"there is no session '{session_id[:200]}'")
            if len(self._owners) > MAX_CACHE_ENTRIES:
                self._owners.clear()
            owner = self._owners[session_id] = session.owner
        if owner != caller.key_id:
            raise HTTPError(403, f"session '{session_id}' belongs to another API key")

    async def check_target_owner(self, caller: ApiKey, target: str) -> str:
        """Return the session of the caller's training run or sampling session. Raises: HTTPError (404, 403)."""
        if "\0" in target:  # PostgreSQL cannot store NUL
            raise HTTPError(404, f"there is no '{target[:200]}'")
        session_id = parse_session_id(target)
        await self.check_session_owner(caller, session_id)
        return session_id

    def check_base_model(self, name: str) -> None:
        """Refuse a base model that is not served. Raises: HTTPError (404)."""
        bases = self.settings.engine.bases
        if name not in bases:
            raise HTTPError(
                404, f"base_model: there is no '{name[:200]}' here; {suggest_name(name, bases)}"
            )

    async def record_audit_entry(
        self, caller: ApiKey, action: str, subject: str, detail: str = ""
    ) -> None:
        """Record an action of the caller in the audit."""
        await self.call_store(self.store.record_audit_entry, caller.key_id, action, subject, detail)


async def authenticate_request(request: Request) -> tuple[ServiceServer, ApiKey]:
    """Return the server of a request and its caller. Raises: HTTPError (401)."""
    server = find_service_server(request)
    return server, await server.authenticate_caller(request)


def find_service_server(request: Request) -> ServiceServer:
    """Return the server that handles a request."""
    server: ServiceServer = request.app.state.server
    return server


B = TypeVar("B", bound=RequestBody)


class JsonRequest(NamedTuple, Generic[B]):
    """Request with a JSON body: server, caller, parsed body and raw bytes."""

    server: ServiceServer
    caller: ApiKey
    body: B
    payload: bytes


def draw_seed() -> int:
    """Draw a seed, once, at acceptance."""
    return secrets.randbits(63)


async def read_full_payload(server: ServiceServer, request: Request) -> bytes:
    """Read the bytes of a JSON body. Raises: HTTPError (413, 415)."""
    limits = server.settings.server
    payload = await read_request_payload(request, limits.max_body_bytes, limits.body_seconds)
    if payload.rejection_reason:
        raise HTTPError(413, payload.rejection_reason)
    return payload.body


async def read_json_request(request: Request, kind: type[B]) -> JsonRequest[B]:
    """Authenticate a request and parse its body. Raises: HTTPError (401, 413); ServiceError (user)."""
    server, caller = await authenticate_request(request)
    payload = await read_full_payload(server, request)
    return JsonRequest(server, caller, parse_request_body(kind, payload), payload)


async def read_json_body(server: ServiceServer, request: Request, kind: type[B]) -> B:
    """Parse a request's body. Raises: HTTPError (413); ServiceError (user)."""
    return parse_request_body(kind, await read_full_payload(server, request))


def _parse_deadline(server: ServiceServer, request: Request) -> float | None:
    text = request.headers.get(DEADLINE_HEADER)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e9:
        raise HTTPError(
            422, f"{DEADLINE_HEADER}: {text[:40]!r} is not a positive number of seconds"
        )
    return server.store.read_clock() + seconds


async def accept_request(
    server: ServiceServer,
    request: Request,
    caller: ApiKey,
    kind: RequestKind,
    target: str,
    seq: int,
    payload: bytes,
    facts: Mapping[str, Any],
    *,
    is_protobuf: bool = False,
) -> StoredRequest:
    """Store a request for a target that belongs to the caller. Raises: ServiceError and its subclasses."""
    new = NewRequest(
        kind=kind,
        owner=caller.key_id,
        session_id=parse_session_id(target),
        target=target,
        seq=seq,
        payload=payload,
        content_type="protobuf" if is_protobuf else "json",
        facts=facts,
        deadline=_parse_deadline(server, request),
    )
    return await server.store_request(new)


async def accept_training_request(
    server: ServiceServer,
    request: Request,
    kind: RequestKind,
    read_facts: Callable[[bytes, str], Mapping[str, Any]] = lambda payload, model_id: {},
) -> StoredRequest:
    """Store a JSON request in a training run's order. `read_facts` receives payload and run id.

    Once caller and sequence number are known, the request is accepted whatever else is wrong with it: the client has
    used the number and would wait for ever behind a gap. The error then becomes the request's result.
    """
    caller = await server.authenticate_caller(request)
    payload = await read_full_payload(server, request)
    header = parse_request_body(TrainingRequestBody, payload)
    await server.check_target_owner(caller, header.model_id)
    return await accept_request(
        server,
        request,
        caller,
        kind,
        header.model_id,
        header.seq_id,
        payload,
        read_facts(payload, header.model_id),
    )


def accepted_response(accepted: StoredRequest, **fields: Any) -> JSONResponse:
    """Build the response to an accepted request: the id under which its result will be available."""
    return JSONResponse({"request_id": accepted.request_id, **fields})
