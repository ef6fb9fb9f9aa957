"""Clients for JSON servers over HTTP.

`JsonConnections` keeps connections to one server alive for any number of threads and can close all of them at once.
`post_with_retries` sends single requests, with bounded retries, time and size.
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

logger = logging.getLogger(__name__)

T = TypeVar("T")
MAX_RESPONSE_BYTES = 256 * 2**20
MAX_REPLY_BYTES = 64 * 2**20  # of `post_with_retries`
MAX_RETRY_WAIT_S = 60.0  # between two attempts
CONNECT_TIMEOUT_S = 60.0  # for a connection to be made, which `close` cannot interrupt
_TRANSIENT_STATUSES = {408, 409, 425, 429}  # and 500 or above: another attempt may succeed
_UNAVAILABLE_STATUSES = (408, 425, 502, 503, 504)  # a later request may succeed
_STALE_CONNECTION_ERRORS = (
    http.client.RemoteDisconnected,
    ConnectionResetError,
    BrokenPipeError,
    http.client.CannotSendRequest,
)


class ServerUnavailable(BackendError):
    """A request got no response: no connection, a broken one, or a server that is not ready."""


class StaleServerResponse(ServerUnavailable):
    """A request was answered by a different process than the one that holds the weights."""


class ServerErrorResponse(BackendError):
    """A request was answered with an error: `status` of the response, `retry_after` in seconds (0 = not specified)."""

    def __init__(self, message: str, status: int, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


class JsonConnections:
    """Connections to one server. Thread-safe; redirects and proxies are not followed."""

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None) -> None:
        """Configure the connections; nothing is sent yet.

        Args:
            base_url: scheme, host and port.
        """
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
        """Send a GET and return the decoded response. Raises: as `post_json`."""
        return self._send_with_retry("GET", path, None, timeout_s)

    def post_json(
        self, path: str, body: Any, timeout_s: float, num_closes: int | None = None
    ) -> Any:
        """Send a POST of JSON and return the decoded response; None for an empty one.

        Args:
            num_closes: value of `num_closes` when the request was decided; None = now. The request fails after a later
                `close`.
        Raises: ServerUnavailable without a complete response, or if no part of it arrives for `timeout_s`;
            ServerErrorResponse for an error.
        """
        return self._send_with_retry("POST", path, json.dumps(body).encode(), timeout_s, num_closes)

    @property
    def num_closes(self) -> int:
        """Number of calls of `close`; a request from before the last one is not sent."""
        return self._num_closes

    def close(self) -> None:
        """Close all connections: waiting requests fail immediately, and later ones open new connections."""
        with self._lock:
            self._num_closes += 1
            idle, busy, self._idle = self._idle, list(self._busy), []
        for connection in idle:
            connection.close()
        for connection in busy:
            sock = connection.sock  # its request may end, and close it, at any time
            with contextlib.suppress(OSError):
                if sock is not None:
                    sock.shutdown(socket.SHUT_RDWR)

    def _send_with_retry(
        self,
        method: str,
        path: str,
        body: bytes | None,
        timeout_s: float,
        num_closes: int | None = None,
    ) -> Any:
        num_closes = self._num_closes if num_closes is None else num_closes
        while True:
            connection, is_used = self._acquire_connection()
            try:
                self._connect_socket(connection, num_closes, timeout_s)
                response, data = self._send_request(connection, method, path, body)
            except (OSError, http.client.HTTPException) as error:
                self._release_connection(connection, is_open=False)
                # The server may have closed an idle connection.
                is_stale = is_used and isinstance(error, _STALE_CONNECTION_ERRORS)
                if is_stale and self._num_closes == num_closes:
                    continue
                raise ServerUnavailable(
                    f"{self.base_url}{path}: {_describe_error(error)}"
                ) from error
            except BaseException:
                self._release_connection(connection, is_open=False)
                raise
            self._release_connection(connection, is_open=not response.will_close)
            return self._decode_response(path, response, data)

    def _connect_socket(
        self, connection: http.client.HTTPConnection, num_closes: int, timeout_s: float
    ) -> None:
        """Connect if necessary. Raises: OSError, also if `close` was called meanwhile."""
        if connection.sock is None:
            connection.timeout = min(timeout_s, CONNECT_TIMEOUT_S)
            connection.connect()
        connection.sock.settimeout(timeout_s)
        if self._num_closes != num_closes:  # `close` may have seen it before it had a socket
            raise ConnectionAbortedError("the connection was closed")

    def _send_request(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None
    ) -> tuple[http.client.HTTPResponse, bytes]:
        connection.request(method, path, body, self._headers)
        response = connection.getresponse()
        data = response.read(MAX_RESPONSE_BYTES + 1)
        if len(data) > MAX_RESPONSE_BYTES:
            raise OSError(f"the response is longer than {MAX_RESPONSE_BYTES // 2**20} MiB")
        if response.length:  # http.client does not report a premature end
            raise http.client.IncompleteRead(data, response.length)
        return response, data

    def _decode_response(self, path: str, response: http.client.HTTPResponse, data: bytes) -> Any:
        """Return the content of a response. Raises: ServerUnavailable, ServerErrorResponse."""
        if response.status >= 300:
            self._raise_error_response(path, response, data)
        if not data.strip():
            return None
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            return data.decode(errors="replace")

    def _raise_error_response(
        self, path: str, response: http.client.HTTPResponse, data: bytes
    ) -> None:
        text = " ".join(_extract_error_message(data).split())[:500]
        problem = f"{self.base_url}{path}: {response.status} {response.reason}"
        if text:
            problem += f": {text}"
        if response.status in _UNAVAILABLE_STATUSES:
            raise ServerUnavailable(problem)
        retry_after = _parse_retry_after(response.getheader("Retry-After", ""))
        raise ServerErrorResponse(problem, response.status, retry_after)

    def _acquire_connection(self) -> tuple[http.client.HTTPConnection, bool]:
        """Return a connection for one request, and whether it has been used before."""
        with self._lock:
            if self._idle:
                connection, is_used = self._idle.pop(), True
            else:
                connection, is_used = self._connection_class(self._host, self._port), False
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
    """Return the text of an error: OpenAI's {"error": {"message"}}, FastAPI's {"detail"}, or the raw text."""
    text = data.decode(errors="replace")
    with contextlib.suppress(ValueError, RecursionError, TypeError, AttributeError):
        content = json.loads(text)
        error = content.get("error", content.get("detail", text))
        return str(error.get("message", error) if isinstance(error, dict) else error)
    return text


def _parse_retry_after(text: str) -> float:
    """Return the seconds of a Retry-After header; 0 if it is missing or a date."""
    return float(text) if text.isdigit() else 0.0


def _describe_error(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no response in time"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class RequestLimits(NamedTuple):
    """Limits of one request with its retries."""

    timeout_s: float  # of one attempt, from the connection to the last byte
    retries: int
    retry_delay_s: float  # doubled with each retry


class _RetryableError(Exception):
    """An attempt without a usable response; another one may succeed."""

    def __init__(self, problem: str, wait_s: float = 0.0) -> None:
        super().__init__(problem)
        self.wait_s = wait_s  # requested by the server


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Handler that makes redirects errors: they would send the key elsewhere, and turn a POST into a GET."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Return None, so that the response itself is reported."""


def build_v1_address(url: str, path: str) -> str:
    """Build the address of an OpenAI-compatible end point, for a base with or without /v1."""
    base = url.rstrip("/")
    if not base.endswith("/v1"):
        base += "/v1"
    return f"{base}/{path}"


def post_with_retries(
    url: str,
    body: Mapping[str, Any],
    limits: RequestLimits,
    *,
    parse_response: Callable[[Any], T],
    headers: Mapping[str, str] | None = None,
    stop: threading.Event | None = None,
) -> T:
    """Send a POST of JSON and return the parsed response.

    Args:
        parse_response: takes the decoded JSON; raises ValueError, KeyError, IndexError or TypeError for a response that
            is
            worth a retry.
        stop: if set, stop retrying.
    Raises: BackendError after the last attempt, or immediately for a request that the server refuses.
    """
    encoded = json.dumps(body).encode()
    all_headers = {"Content-Type": "application/json", **(headers or {})}
    stop, problem = stop or threading.Event(), "nothing was sent"
    attempts = 0
    while attempts <= limits.retries and not stop.is_set():
        attempts += 1
        request = urllib.request.Request(url, encoded, all_headers)
        try:
            response = _post_once(request, limits.timeout_s)
        except _RetryableError as error:
            problem, wait_s = str(error), error.wait_s
        else:
            try:
                return parse_response(response)
            except (ValueError, KeyError, IndexError, TypeError) as error:
                reason, wait_s = f"{type(error).__name__}: {str(error)[:200]}", 0.0
                problem = f"unexpected response ({reason})"
        if attempts <= limits.retries:
            logger.warning("%s: %s; retrying", url, problem)
            backoff_s = limits.retry_delay_s * 2 ** (attempts - 1)
            stop.wait(min(MAX_RETRY_WAIT_S, max(wait_s, backoff_s)))
    raise BackendError(f"{url} did not answer in {attempts} tries (the last: {problem})")


def _post_once(request: urllib.request.Request, timeout_s: float) -> Any:
    """Make one attempt. Raises: _RetryableError; BackendError for a refused request."""
    deadline = time.monotonic() + timeout_s
    opener = urllib.request.build_opener(_NoRedirects)
    try:
        with opener.open(request, timeout=timeout_s) as response:
            return json.loads(_read_body(response, deadline, timeout_s))
    except urllib.error.HTTPError as error:
        text = _read_body(error, deadline, timeout_s, 500).decode(errors="replace")
        problem = f"{error.code} {error.reason}: {text}"
        if error.code < 500 and error.code not in _TRANSIENT_STATUSES:
            raise BackendError(f"{request.full_url} refuses the request: {problem}") from error
        wait_s = _parse_retry_after(error.headers.get("Retry-After", ""))
        raise _RetryableError(problem, wait_s) from error
    # ValueError: a truncated response is not JSON. RecursionError: nor is one with a thousand brackets.
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        raise _RetryableError(f"{type(error).__name__}: {error}") from error


def _read_body(response: Any, deadline: float, timeout_s: float, max_bytes: int = 0) -> bytes:
    """Read the body of a response, at most `max_bytes` if set. Raises: OSError if it is too long or too slow."""
    parts, size = [], 0
    while part := response.read1(2**16):
        parts.append(part)
        size += len(part)
        if max_bytes and size >= max_bytes:
            break
        if size > MAX_REPLY_BYTES:
            raise OSError(f"the response is longer than {MAX_REPLY_BYTES // 2**20} MiB")
        if time.monotonic() > deadline:
            raise OSError(f"the response was not complete within {timeout_s:g} s")
    return b"".join(parts)[: max_bytes or None]
