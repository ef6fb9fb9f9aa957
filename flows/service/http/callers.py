"""Callers of the service: the API key of a request, and whose things it names."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request

from flows.service.http.disk_wait import Acceptance, DiskWait
from flows.service.http.refusals import Refused
from flows.service.http.signed_files import Signer
from flows.service.http.waiting_room import WaitingRoom
from flows.service.store import ApiKey, NewRequest, ServiceStore, StoredRequest
from rl_core.errors import nearest
from rl_core.settings import ServiceSettings

__all__ = ["Server", "called", "server_of", "session_of"]

T = TypeVar("T")
KEY_SECONDS = 2.0  # for which a key is believed without another look: a revoked one works as long
MAX_KNOWN = 100_000  # entries of a cache before it is emptied
# Many short calls of SQLite in many threads wait for the interpreter's lock, 5 ms each time.
THREADS = 3


def session_of(target: str) -> str:
    """Session of a training run or sampling session, which its id begins with."""
    return target.partition(":")[0]


@dataclass(frozen=True, slots=True)
class _CachedKey:
    key: ApiKey | None
    until: float


class Server:
    """Shared state of all routes."""

    def __init__(self, settings: ServiceSettings, store: ServiceStore) -> None:
        self.settings, self.store = settings, store
        self.folder = Path(settings.folder)
        self._disk = DiskWait(store)
        self._acceptance = Acceptance(store, self._disk)
        self.room = WaitingRoom(store, self._disk)
        self.signer = Signer(self.folder)
        self.fetched: dict[str, float] = {}  # request -> when its result was sent, monotonic
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="service-store")
        self._keys: dict[bytes, _CachedKey] = {}  # by SHA-256
        self._owners: dict[str, str] = {}  # of sessions

    async def ask(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """A call of the store, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *arguments, **named))

    async def accept(self, new: NewRequest) -> StoredRequest:
        """Store a request, together with those that come at the same time. Raises: ServiceError and its kinds."""
        found = await self._acceptance.accept(new)
        self.room.accepted(found)
        return found

    async def synced(self) -> None:
        """Until everything that was read in the store before is on the disk. Raises: BackendError."""
        await self._disk.wait()

    async def forget(self, request_ids: Sequence[str], owner: str | None = None) -> None:
        """Forget results (of one owner). Raises: BackendError."""
        await self.ask(self.store.forget, request_ids, owner)
        self.room.forget(request_ids)

    def open(self) -> None:
        """Begin, in the running event loop."""
        self._disk.open()
        self._acceptance.open()
        self.room.open()

    def close(self) -> None:
        """End threads and wake those who wait."""
        self.room.close()
        self._acceptance.close()
        self._disk.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def caller(self, request: Request) -> ApiKey:
        """The key of a request. Raises: Refused (401) without a valid one."""
        secret = request.headers.get("x-api-key", "")
        digest = hashlib.sha256(secret.encode()).digest()  # of a size that callers without a key do not choose
        known = self._keys.get(digest)
        if known is None or known.until < time.monotonic():
            key = await self.ask(self.store.key_of, secret) if secret else None
            if len(self._keys) > MAX_KNOWN:
                self._keys.clear()
            known = self._keys[digest] = _CachedKey(key, time.monotonic() + KEY_SECONDS)
        if known.key is None:
            what = "unknown or revoked" if secret else "missing"
            raise Refused(401, f"X-API-Key is {what}; make one with `posttrain service key create NAME`")
        return known.key

    async def own_session(self, caller: ApiKey, session_id: str) -> None:
        """Raises: Refused (404) for a session that does not exist, (403) for another key's."""
        owner = self._owners.get(session_id)
        if owner is None:
            session = None if "\0" in session_id else await self.ask(self.store.session, session_id)
            if session is None:
                raise Refused(404, f"there is no session '{session_id[:200]}'")
            if len(self._owners) > MAX_KNOWN:
                self._owners.clear()
            owner = self._owners[session_id] = session.owner
        if owner != caller.key_id:
            raise Refused(403, f"session '{session_id}' belongs to another API key")

    async def own_target(self, caller: ApiKey, target: str) -> str:
        """The session of a training run or sampling session. Raises: Refused (404, 403)."""
        if "\0" in target:  # PostgreSQL takes no such text
            raise Refused(404, f"there is no '{target[:200]}'")
        session_id = session_of(target)
        await self.own_session(caller, session_id)
        return session_id

    def known_base(self, name: str) -> None:
        """Raises: Refused (404) for a base model that is not served."""
        bases = self.settings.engine.bases
        if name not in bases:
            raise Refused(404, f"base_model: there is no '{name[:200]}' here; {nearest(name, bases)}")

    async def note(self, caller: ApiKey, action: str, subject: str, detail: str = "") -> None:
        """An entry of the audit."""
        await self.ask(self.store.note, caller.key_id, action, subject, detail)


async def called(request: Request) -> tuple[Server, ApiKey]:
    """The server of a request, and whose it is. Raises: Refused (401)."""
    server = server_of(request)
    return server, await server.caller(request)


def server_of(request: Request) -> Server:
    """The server of a request."""
    server: Server = request.app.state.server
    return server
