"""JSON over kept-alive HTTP connections to one server, from any number of threads; all can be cut at once."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from rl_core.errors import BackendError

__all__ = ["JsonConnections", "ServerAway", "ServerRefusal", "StaleAnswer"]

MAX_ANSWER = 256 * 2**20  # bytes
CONNECT_S = 60.0  # for a connection to be made, which `close` cannot cut
_AWAY = (408, 425, 502, 503, 504)  # the request may be answered later
_STALE = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError, http.client.CannotSendRequest)


class ServerAway(BackendError):
    """A request was not answered: no connection, a broken one, or a server that says it is not ready."""


class StaleAnswer(ServerAway):
    """A request was answered by another process than the one that has the weights."""


class ServerRefusal(BackendError):
    """A request was answered by an error; `status` is that of the answer, `retry_after` in seconds (0 = not said)."""

    def __init__(self, message: str, status: int, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


class JsonConnections:
    """Requests to one server. Any thread; redirections and proxies are not followed."""

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None) -> None:
        """`base_url`: scheme, host and port. Nothing is sent yet."""
        self.base_url = base_url.rstrip("/")
        parts = urlsplit(self.base_url)
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port = parts.hostname or "", parts.port
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._busy: set[http.client.HTTPConnection] = set()
        self._cuts = 0

    def get(self, path: str, timeout_s: float) -> Any:
        """Decoded answer to a GET. Raises: as `post`."""
        return self._ask("GET", path, None, timeout_s)

    def post(self, path: str, body: Any, timeout_s: float, cuts: int | None = None) -> Any:
        """Decoded answer to a POST of JSON; None for an empty one.

        Args:
            cuts: `cuts` of the moment at which the request was decided on; None = now. It fails after a later `close`.
        Raises: ServerAway without a whole answer, or without a part of it for `timeout_s`; ServerRefusal for an error.
        """
        return self._ask("POST", path, json.dumps(body).encode(), timeout_s, cuts)

    @property
    def cuts(self) -> int:
        """Times that `close` was called; a request from before the last one is not sent."""
        return self._cuts

    def close(self) -> None:
        """Cut all connections: requests that wait for an answer fail at once, and later ones open new connections."""
        with self._lock:
            self._cuts += 1
            idle, busy, self._idle = self._idle, list(self._busy), []
        for connection in idle:
            connection.close()
        for connection in busy:
            sock = connection.sock  # its request may end, and close it, at any moment
            with contextlib.suppress(OSError):
                if sock is not None:
                    sock.shutdown(socket.SHUT_RDWR)

    def _ask(self, method: str, path: str, body: bytes | None, timeout_s: float, cuts: int | None = None) -> Any:
        cuts = self._cuts if cuts is None else cuts
        while True:
            connection, is_used = self._take()
            try:
                self._open(connection, cuts, timeout_s)
                answer, data = self._once(connection, method, path, body)
            except (OSError, http.client.HTTPException) as error:
                self._give_back(connection, is_open=False)
                if is_used and isinstance(error, _STALE) and self._cuts == cuts:  # the server closed it while idle
                    continue
                raise ServerAway(f"{self.base_url}{path}: {_words(error)}") from error
            except BaseException:
                self._give_back(connection, is_open=False)
                raise
            self._give_back(connection, is_open=not answer.will_close)
            return self._read(path, answer, data)

    def _open(self, connection: http.client.HTTPConnection, cuts: int, timeout_s: float) -> None:
        """Connect, if it is not. Raises: OSError, also where `close` was called meanwhile."""
        if connection.sock is None:
            connection.timeout = min(timeout_s, CONNECT_S)
            connection.connect()
        connection.sock.settimeout(timeout_s)
        if self._cuts != cuts:  # `close` may have looked at it before it had a socket
            raise ConnectionAbortedError("the connection was cut")

    def _once(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None
    ) -> tuple[http.client.HTTPResponse, bytes]:
        connection.request(method, path, body, self._headers)
        answer = connection.getresponse()
        data = answer.read(MAX_ANSWER + 1)
        if len(data) > MAX_ANSWER:
            raise OSError(f"the answer is longer than {MAX_ANSWER // 2**20} MiB")
        if answer.length:  # http.client says nothing of an end before it
            raise http.client.IncompleteRead(data, answer.length)
        return answer, data

    def _read(self, path: str, answer: http.client.HTTPResponse, data: bytes) -> Any:
        """Content of an answer. Raises: ServerAway, ServerRefusal."""
        if answer.status >= 300:
            self._refuse(path, answer, data)
        if not data.strip():
            return None
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            return data.decode(errors="replace")

    def _refuse(self, path: str, answer: http.client.HTTPResponse, data: bytes) -> None:
        text = " ".join(_message(data).split())[:500]
        problem = f"{self.base_url}{path}: {answer.status} {answer.reason}" + (f": {text}" if text else "")
        if answer.status in _AWAY:
            raise ServerAway(problem)
        wait = answer.getheader("Retry-After", "")
        raise ServerRefusal(problem, answer.status, float(wait) if wait.isdigit() else 0.0)

    def _take(self) -> tuple[http.client.HTTPConnection, bool]:
        """A connection for one request; True = it has served others before."""
        with self._lock:
            is_used = bool(self._idle)
            connection = self._idle.pop() if is_used else self._kind(self._host, self._port)
            self._busy.add(connection)
        return connection, is_used

    def _give_back(self, connection: http.client.HTTPConnection, *, is_open: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            if is_open and connection.sock is not None:
                self._idle.append(connection)
                return
        connection.close()


def _message(data: bytes) -> str:
    """Text of an error: the dialect's {"error": {"message"}}, FastAPI's {"detail"}, or as it stands."""
    text = data.decode(errors="replace")
    with contextlib.suppress(ValueError, RecursionError, TypeError, AttributeError):
        told = json.loads(text)
        found = told.get("error", told.get("detail", text))
        return str(found.get("message", found) if isinstance(found, dict) else found)
    return text


def _words(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
