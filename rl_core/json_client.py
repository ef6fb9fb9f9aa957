"""JSON over kept-alive HTTP connections to one server, from any number of threads; all can be cut at once.

Requests to a JSON server over HTTP: tried again a bounded number of times, bounded in time and size.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from rl_core.errors import BackendError

MAX_RESPONSE_BYTES = 256 * 2**20  # bytes
CONNECT_TIMEOUT_S = 60.0  # for a connection to be made, which `close` cannot cut
_UNAVAILABLE_STATUSES = (408, 425, 502, 503, 504)  # the request may be answered later
_STALE_CONNECTION_ERRORS = (
    http.client.RemoteDisconnected,
    ConnectionResetError,
    BrokenPipeError,
    http.client.CannotSendRequest,
)


class ServerUnavailable(BackendError):
    """A request was not answered: no connection, a broken one, or a server that says it is not ready."""


class StaleServerResponse(ServerUnavailable):
    """A request was answered by another process than the one that has the weights."""


class ServerErrorResponse(BackendError):
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
        self._connection_class = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        self._host, self._port = parts.hostname or "", parts.port
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._busy: set[http.client.HTTPConnection] = set()
        self._num_closes = 0

    def get_json(self, path: str, timeout_s: float) -> Any:
        """Decoded answer to a GET. Raises: as `post`."""
        return self._send_with_retry("GET", path, None, timeout_s)

    def post_json(
        self, path: str, body: Any, timeout_s: float, num_closes: int | None = None
    ) -> Any:
        """Decoded answer to a POST of JSON; None for an empty one.

        Args:
            cuts: `cuts` of the moment at which the request was decided on; None = now. It fails after a later `close`.
        Raises: ServerAway without a whole answer, or without a part of it for `timeout_s`; ServerRefusal for an error.
        """
        return self._send_with_retry("POST", path, json.dumps(body).encode(), timeout_s, num_closes)

    @property
    def num_closes(self) -> int:
        """Times that `close` was called; a request from before the last one is not sent."""
        return self._num_closes

    def close(self) -> None:
        """Cut all connections: requests that wait for an answer fail at once, and later ones open new connections."""
        with self._lock:
            self._num_closes += 1
            idle, busy, self._idle = self._idle, list(self._busy), []
        for connection in idle:
            connection.close()
        for connection in busy:
            sock = connection.sock  # its request may end, and close it, at any moment
            with contextlib.suppress(OSError):
                if sock is not None:
                    sock.shutdown(socket.SHUT_RDWR)

    def _send_with_retry(
        self, method: str, path: str, body: bytes | None, timeout_s: float, cuts: int | None = None
    ) -> Any:
        cuts = self._num_closes if cuts is None else cuts
        while True:
            connection, is_used = self._acquire_connection()
            try:
                self._connect_socket(connection, cuts, timeout_s)
                answer, data = self._send_request(connection, method, path, body)
            except (OSError, http.client.HTTPException) as error:
                self._release_connection(connection, is_open=False)
                # the server closed it while idle
                if (
                    is_used
                    and isinstance(error, _STALE_CONNECTION_ERRORS)
                    and self._num_closes == cuts
                ):
                    continue
                raise ServerUnavailable(
                    f"{self.base_url}{path}: {_describe_error(error)}"
                ) from error
            except BaseException:
                self._release_connection(connection, is_open=False)
                raise
            self._release_connection(connection, is_open=not answer.will_close)
            return self._decode_response(path, answer, data)

    def _connect_socket(
        self, connection: http.client.HTTPConnection, cuts: int, timeout_s: float
    ) -> None:
        """Connect, if it is not. Raises: OSError, also where `close` was called meanwhile."""
        if connection.sock is None:
            connection.timeout = min(timeout_s, CONNECT_TIMEOUT_S)
            connection.connect()
        connection.sock.settimeout(timeout_s)
        if self._num_closes != cuts:  # `close` may have looked at it before it had a socket
            raise ConnectionAbortedError("the connection was cut")

    def _send_request(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None
    ) -> tuple[http.client.HTTPResponse, bytes]:
        connection.request(method, path, body, self._headers)
        answer = connection.getresponse()
        data = answer.read(MAX_RESPONSE_BYTES + 1)
        if len(data) > MAX_RESPONSE_BYTES:
            raise OSError(f"the answer is longer than {MAX_RESPONSE_BYTES // 2**20} MiB")
        if answer.length:  # http.client says nothing of an end before it
            raise http.client.IncompleteRead(data, answer.length)
        return answer, data

    def _decode_response(self, path: str, answer: http.client.HTTPResponse, data: bytes) -> Any:
        """Content of an answer. Raises: ServerAway, ServerRefusal."""
        if answer.status >= 300:
            self._raise_error_response(path, answer, data)
        if not data.strip():
            return None
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            return data.decode(errors="replace")

    def _raise_error_response(
        self, path: str, answer: http.client.HTTPResponse, data: bytes
    ) -> None:
        text = " ".join(_extract_error_message(data).split())[:500]
        problem = f"{self.base_url}{path}: {answer.status} {answer.reason}" + (
            f": {text}" if text else ""
        )
        if answer.status in _UNAVAILABLE_STATUSES:
            raise ServerUnavailable(problem)
        wait = answer.getheader("Retry-After", "")
        raise ServerErrorResponse(problem, answer.status, float(wait) if wait.isdigit() else 0.0)

    def _acquire_connection(self) -> tuple[http.client.HTTPConnection, bool]:
        """A connection for one request; True = it has served others before."""
        with self._lock:
            is_used = bool(self._idle)
            connection = (
                self._idle.pop() if is_used else self._connection_class(self._host, self._port)
            )
            self._busy.add(connection)
        return connection, is_used

    def _release_connection(self, connection: http.client.HTTPConnection, *, is_open: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            if is_open and connection.sock is not None:
                self._idle.append(connection)
                return
        connection.close()


def _extract_error_message(data: bytes) -> str:
    """Text of an error: the dialect's {"error": {"message"}}, FastAPI's {"detail"}, or as it stands."""
    text = data.decode(errors="replace")
    with contextlib.suppress(ValueError, RecursionError, TypeError, AttributeError):
        told = json.loads(text)
        found = told.get("error", told.get("detail", text))
        return str(found.get("message", found) if isinstance(found, dict) else found)
    return text


def _describe_error(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


logger = logging.getLogger(__name__)

T = TypeVar("T")
MAX_REPLY_BYTES = 64 * 2**20  # bytes
MAX_RETRY_WAIT_S = 60.0  # between two tries
_TRANSIENT_STATUSES = {408, 409, 425, 429}  # and all above 499: another try may succeed


class RequestLimits(NamedTuple):
    """Bounds of one request with its tries."""

    timeout_s: float  # of one try, from the connection to the last byte
    retries: int
    retry_delay_s: float  # doubled with each further try


class _RetryableError(Exception):
    """A try without a usable answer; another one may have it."""

    def __init__(self, problem: str, wait_s: float = 0.0) -> None:
        super().__init__(problem)
        self.wait_s = wait_s  # that the server asks for


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Redirections are errors: they would carry the key elsewhere, and turn a POST into a GET."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """None: the answer stands as it is."""


def build_v1_address(url: str, path: str) -> str:
    """Address of an OpenAI-compatible end point, for a base with or without /v1."""
    base = url.rstrip("/")
    return f"{base if base.endswith('/v1') else f'{base}/v1'}/{path}"


def post_with_retries(
    url: str,
    body: Mapping[str, Any],
    limits: RequestLimits,
    *,
    parse_response: Callable[[Any], T],
    headers: Mapping[str, str] | None = None,
    stop: threading.Event | None = None,
) -> T:
    """The server's answer, as `read` makes it.

    Args:
        read: takes the decoded JSON; raises ValueError, KeyError, IndexError or TypeError for an answer that is worth
            another try.
        stop: set = no further tries.
    Raises: BackendError after the last try, or at once for a request that the server refuses.
    """
    encoded = json.dumps(body).encode()
    sent = {"Content-Type": "application/json", **(headers or {})}
    stop, problem = stop or threading.Event(), "nothing was sent"
    tries = 0
    while tries <= limits.retries and not stop.is_set():
        tries += 1
        try:
            answer = _post_once(urllib.request.Request(url, encoded, sent), limits.timeout_s)
        except _RetryableError as unanswered:
            problem, wait_s = str(unanswered), unanswered.wait_s
        else:
            try:
                return parse_response(answer)
            except (ValueError, KeyError, IndexError, TypeError) as error:
                problem, wait_s = (
                    f"no answer to the question ({type(error).__name__}: {str(error)[:200]})",
                    0.0,
                )
        if tries <= limits.retries:
            logger.warning("%s: %s; asked again", url, problem)
            stop.wait(min(MAX_RETRY_WAIT_S, max(wait_s, limits.retry_delay_s * 2 ** (tries - 1))))
    raise BackendError(f"{url} did not answer in {tries} tries (the last: {problem})")


def _post_once(request: urllib.request.Request, timeout_s: float) -> Any:
    """One try. Raises: _Unanswered; BackendError for a request that is refused."""
    end = time.monotonic() + timeout_s
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=timeout_s) as answer:
            return json.loads(_read_body(answer, end, timeout_s))
    except urllib.error.HTTPError as error:
        text = _read_body(error, end, timeout_s, 500).decode(errors="replace")
        problem = f"{error.code} {error.reason}: {text}"
        if error.code < 500 and error.code not in _TRANSIENT_STATUSES:
            raise BackendError(f"{request.full_url} refuses the request: {problem}") from error
        wait = error.headers.get("Retry-After", "")
        raise _RetryableError(problem, float(wait) if wait.isdigit() else 0.0) from error
    # ValueError: half an answer is no JSON. RecursionError: nor is one of a thousand brackets
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        raise _RetryableError(f"{type(error).__name__}: {error}") from error


def _read_body(answer: Any, end: float, timeout_s: float, max_bytes: int = 0) -> bytes:
    """Body of an answer; `most`: bytes that are enough. Raises: OSError for one that is too long or too slow."""
    parts, size = [], 0
    while part := answer.read1(2**16):
        parts.append(part)
        size += len(part)
        if max_bytes and size >= max_bytes:
            break
        if size > MAX_REPLY_BYTES:
            raise OSError(f"the answer is longer than {MAX_REPLY_BYTES // 2**20} MiB")
        if time.monotonic() > end:
            raise OSError(f"the answer was not complete within {timeout_s:g} s")
    return b"".join(parts)[: max_bytes or None]
