"""Client for JSON servers over HTTP: single requests, and connections that stay open.

`fetch_json` sends one request, `post_with_retries` repeats it, `post_adapted` leaves out what an OpenAI-compatible
server's model does not take. `JsonConnections` keeps connections to one server alive
for any number of threads and can close all of them at once. Common to all: loopback addresses are never requested
through a proxy, a timeout is that of a whole attempt from the connection to the last byte, and failures are
`RequestError`s.
"""

from __future__ import annotations

import contextlib
import http.client
import http.cookies
import importlib.util
import ipaddress
import json
import logging
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit, urlunsplit

from rl_core.errors import BackendError

logger = logging.getLogger(__name__)

T = TypeVar("T")
_PROXY_VARIABLES = (
    "http_proxy",
    "https_proxy",
    "all_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
)
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
MAX_RESPONSE_BYTES = 256 * 2**20
MAX_REPLY_BYTES = 64 * 2**20  # of a single request
MAX_RETRY_WAIT_S = 60.0  # between two attempts
CONNECT_TIMEOUT_S = 60.0  # for a connection to be made, which `close` cannot interrupt
_TRANSIENT_STATUSES = {408, 409, 425, 429}  # and 500 or above: another attempt may succeed
_UNAVAILABLE_STATUSES = (408, 425, 502, 503, 504)  # a later request may succeed
_PARAMETER_STATUSES = (400, 422)  # a parameter that the server's model does not take
_STALE_CONNECTION_ERRORS = (
    http.client.RemoteDisconnected,
    ConnectionResetError,
    BrokenPipeError,
    http.client.CannotSendRequest,
)

# Parameters that an address and model do not take, by what the server said.
_refused_parameters: dict[tuple[str, str], frozenset[str]] = {}
_refused_parameters_lock = threading.Lock()


class RequestError(BackendError):
    """A request failed.

    `status` of the response (0 = no complete one), `reason` without the address, `retry_after` in seconds (0 = not
    specified). After a timeout, `__cause__` is a TimeoutError.
    """

    def __init__(
        self, message: str, status: int = 0, retry_after: float = 0.0, *, reason: str = ""
    ) -> None:
        super().__init__(message)
        self.status, self.retry_after, self.reason = status, retry_after, reason or message


class ServerUnavailable(RequestError):
    """A request got no response: no connection, a broken one, or a server that is not ready."""


class StaleServerResponse(ServerUnavailable):
    """A request was answered by a different process than the one that holds the weights."""


class ServerErrorResponse(RequestError):
    """A request was answered with an error."""


class JsonConnections:
    """Connections to one server. Thread-safe; redirects and proxies are not followed."""

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str] | None = None,
        *,
        stores_cookies: bool = False,
    ) -> None:
        """Configure the connections; nothing is sent yet.

        Args:
            base_url: scheme, host and port.
            stores_cookies: send back the cookies that the server sets, as servers with sessions expect.
        """
        self._cookies = http.cookies.SimpleCookie() if stores_cookies else None
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
        Raises: ServerUnavailable without a complete response after `timeout_s`; ServerErrorResponse for an error.
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
                response, data = self._send_request(connection, method, path, body, timeout_s)
            except (OSError, http.client.HTTPException) as error:
                self._release_connection(connection, is_open=False)
                # The server may have closed an idle connection.
                is_stale = is_used and isinstance(error, _STALE_CONNECTION_ERRORS)
                if is_stale and self._num_closes == num_closes:
                    continue
                raise _build_connection_error(self.base_url + path, error) from error
            except BaseException:
                self._release_connection(connection, is_open=False)
                raise
            self._release_connection(connection, is_open=not response.will_close)
            if response.status >= 300:
                retry_after = response.getheader("Retry-After", "")
                raise _build_response_error(
                    self.base_url + path, response.status, response.reason, retry_after, data
                )
            return _decode_body(data)

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
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: bytes | None,
        timeout_s: float,
    ) -> tuple[http.client.HTTPResponse, bytes]:
        deadline = time.monotonic() + timeout_s
        headers = self._headers
        if self._cookies:
            pairs = "; ".join(f"{name}={cookie.value}" for name, cookie in self._cookies.items())
            headers = {**headers, "Cookie": pairs}
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        if self._cookies is not None:
            for text in response.headers.get_all("Set-Cookie", []):
                self._cookies.load(text)
        data = _read_body(response, MAX_RESPONSE_BYTES, deadline)
        response.close()  # its end need not have been read, and the connection is to be used again
        return response, data

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


def fetch_json(
    url: str,
    body: Any = None,
    *,
    timeout_s: float = 5.0,
    headers: Mapping[str, str] | None = None,
) -> Any:
    """Send a GET, or a POST of JSON, and return the decoded response; None for an empty one, text if it is not JSON.

    Proxies of the environment are used, except for loopback addresses. Redirects of a GET are followed.
    Args:
        timeout_s: of the attempt, from the connection to the last byte.
    Raises: ServerUnavailable without a complete response; ServerErrorResponse for an error.
    """
    encoded = None if body is None else json.dumps(body).encode()
    all_headers = {"Content-Type": "application/json", **(headers or {})}
    handlers: list[urllib.request.BaseHandler] = [_ProxyUnlessLoopback()]
    if encoded is not None:
        handlers.append(_NoRedirects())
    opener = urllib.request.build_opener(*handlers)
    deadline = time.monotonic() + timeout_s
    try:
        if urlsplit(url).scheme not in ("http", "https"):
            raise ValueError("the address has to begin with http:// or https://")
        request = urllib.request.Request(url, encoded, all_headers)
        with opener.open(request, timeout=timeout_s) as response:
            return _decode_body(_read_body(response, MAX_REPLY_BYTES, deadline))
    except urllib.error.HTTPError as error:
        data = b""
        with contextlib.suppress(OSError, http.client.HTTPException), error:
            data = _read_body(error, MAX_REPLY_BYTES, deadline)
        retry_after = error.headers.get("Retry-After", "")
        raise _build_response_error(url, error.code, error.reason, retry_after, data) from error
    # ValueError: an invalid address.
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        cause = reason if isinstance(reason, BaseException) else error
        raise _build_connection_error(url, cause) from cause


def is_loopback_address(url: str) -> bool:
    """Return whether a URL names this machine by a loopback address or as localhost."""
    host = urlsplit(url).hostname or ""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def exempt_loopback_from_proxies() -> None:
    """Let other libraries of this process and its children request loopback addresses directly (NO_PROXY).

    The clients of Prefect (httpx, websockets) and MLflow (requests) obey the variables of the environment, and a proxy
    does not reach this machine's servers. Without a proxy in the environment nothing is changed. httpx refuses to work
    at all with a SOCKS proxy and without the package socksio; such variables are then removed, with a warning.
    """
    for name in _PROXY_VARIABLES:
        is_socks = os.environ.get(name, "").strip().lower().startswith("socks")
        if is_socks and importlib.util.find_spec("socksio") is None:
            logger.warning(
                "%s names a SOCKS proxy, which needs the package socksio; it is not used", name
            )
            del os.environ[name]
    if not any(os.environ.get(name) for name in _PROXY_VARIABLES):
        return
    # The lower-case variable comes first in all of these libraries.
    text = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = [host.strip() for host in text.split(",") if host.strip()]
    if "*" not in hosts:
        hosts += [host for host in LOOPBACK_HOSTS if host not in hosts]
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(hosts)


def find_health_problem(url: str, timeout_s: float = 5.0) -> str:
    """Return why a server's health check fails; "" = it is up, as is one that requires a token."""
    try:
        fetch_json(url, timeout_s=timeout_s)
    except RequestError as error:
        if error.status in (401, 403):
            return ""
        return f"answered {error.status}" if error.status else f"no answer ({error.reason})"
    return ""


class _ProxyUnlessLoopback(urllib.request.ProxyHandler):
    """Handler of the environment's proxies that leaves out loopback addresses, also those of redirects."""

    def proxy_open(self, req: urllib.request.Request, proxy: str, type: str) -> Any:
        """Return None, so that the next handler connects directly, for a loopback address."""
        if is_loopback_address(req.full_url):
            return None
        return super().proxy_open(req, proxy, type)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Handler that makes redirects errors: they would send the key elsewhere, and turn a POST into a GET."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Return None, so that the response itself is reported."""


def _read_body(response: Any, max_bytes: int, deadline: float) -> bytes:
    """Read the whole body of a response until `deadline`, of the monotonic clock.

    Raises: OSError, http.client.IncompleteRead.
    """
    parts: list[bytes] = []
    size = 0
    while part := response.read1(2**16):
        parts.append(part)
        size += len(part)
        if size > max_bytes:
            raise OSError(f"the response is longer than {max_bytes // 2**20} MiB")
        if response.length != 0 and time.monotonic() > deadline:
            raise TimeoutError("the response was not complete in time")
    if response.length:  # http.client does not report a premature end
        raise http.client.IncompleteRead(b"".join(parts), response.length)
    return b"".join(parts)


def _decode_body(data: bytes) -> Any:
    if not data.strip():
        return None
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return data.decode(errors="replace")


def _build_response_error(
    url: str, status: int, phrase: str, retry_after: str, data: bytes
) -> RequestError:
    reason = f"{status} {phrase}"
    if text := " ".join(_extract_error_message(data).split())[:500]:
        reason += f": {text}"
    kind = ServerUnavailable if status in _UNAVAILABLE_STATUSES else ServerErrorResponse
    # a date in Retry-After counts as not specified
    seconds = float(retry_after) if retry_after.isdigit() else 0.0
    return kind(f"{url}: {reason}", status, seconds, reason=reason)


def _build_connection_error(url: str, error: BaseException) -> ServerUnavailable:
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, TimeoutError):
        reason = "no response in time"
    return ServerUnavailable(f"{url}: {reason}", reason=reason)


def _extract_error_message(data: bytes) -> str:
    """Return the text of an error: OpenAI's {"error": {"message"}}, FastAPI's {"detail"}, or the raw text."""
    text = data.decode(errors="replace")
    with contextlib.suppress(ValueError, RecursionError, TypeError, AttributeError):
        content = json.loads(text)
        error = content.get("error", content.get("detail", text))
        if not isinstance(error, dict):
            return str(error)
        message, parameter = str(error.get("message", error)), error.get("param")
        is_named = not isinstance(parameter, str) or parameter in message
        return message if is_named else f"{message} ({parameter})"
    return text


class RequestLimits(NamedTuple):
    """Limits of one request with its retries."""

    timeout_s: float  # of one attempt, from the connection to the last byte
    retries: int
    retry_delay_s: float  # doubled with each retry


def post_with_retries(
    url: str,
    body: Mapping[str, Any],
    limits: RequestLimits,
    *,
    parse_response: Callable[[Any], T],
    headers: Mapping[str, str] | None = None,
    stop: threading.Event | None = None,
    before_attempt: Callable[[], None] | None = None,
) -> T:
    """Send a POST of JSON and return the parsed response.

    Args:
        parse_response: takes the decoded response; raises ValueError, KeyError, IndexError or TypeError for one that
            is worth a retry.
        stop: if set, stop retrying.
        before_attempt: called before each attempt; what it raises ends the request.
    Raises: BackendError after the last attempt, or immediately for a request that the server refuses.
    """
    stop, problem = stop or threading.Event(), "nothing was sent"
    attempts = 0
    while attempts <= limits.retries and not stop.is_set():
        attempts += 1
        wait_s = 0.0
        if before_attempt is not None:
            before_attempt()
        try:
            return parse_response(
                fetch_json(url, body, timeout_s=limits.timeout_s, headers=headers)
            )
        except RequestError as error:
            if 0 < error.status < 500 and error.status not in _TRANSIENT_STATUSES:
                raise BackendError(f"{url} refuses the request: {error.reason}") from error
            problem, wait_s = error.reason, error.retry_after
        except (ValueError, KeyError, IndexError, TypeError) as error:
            problem = f"unexpected response ({type(error).__name__}: {str(error)[:200]})"
        if attempts <= limits.retries:
            logger.warning("%s: %s; retrying", url, problem)
            backoff_s = limits.retry_delay_s * 2 ** (attempts - 1)
            stop.wait(min(MAX_RETRY_WAIT_S, max(wait_s, backoff_s)))
    raise BackendError(f"{url} did not answer in {attempts} tries (the last: {problem})")


def build_openai_address(url: str, path: str) -> str:
    """Build the address of an end point of a base address.

    '/v1' is added to a base without a path; any other path, as '/v1beta/openai' or Azure's '/openai/deployments/NAME',
    is taken as it is, with its query. A base that already ends in the end point is the address.
    """
    parts = urlsplit(url.strip())
    base = parts.path.rstrip("/") or "/v1"
    full = base if base.endswith(f"/{path}") else f"{base}/{path}"
    return urlunsplit(parts._replace(path=full))


def post_adapted(
    url: str,
    body: Mapping[str, Any],
    limits: RequestLimits,
    *,
    parse_response: Callable[[Any], T],
    headers: Mapping[str, str] | None = None,
    stop: threading.Event | None = None,
    before_attempt: Callable[[], None] | None = None,
) -> T:
    """Send a chat completion without the parameters that its model does not take; see `post_with_retries`.

    If the server refuses a request and names `max_tokens` or `temperature`, it is sent once more with
    `max_completion_tokens`, or without temperature. What then worked is used for later requests to this address and
    model.
    """
    key = (url, str(body.get("model")))
    with _refused_parameters_lock:
        refused = _refused_parameters.get(key, frozenset())
    while True:
        try:
            response = post_with_retries(
                url,
                _drop_parameters(body, refused),
                limits,
                parse_response=parse_response,
                headers=headers,
                stop=stop,
                before_attempt=before_attempt,
            )
        except BackendError as error:
            named = _find_refused_parameters(error, body) - refused
            if not named:
                raise
            logger.warning("%s refuses %s; sending without", url, " and ".join(sorted(named)))
            refused |= named
            continue
        if refused:
            with _refused_parameters_lock:
                _refused_parameters[key] = refused
        return response


def _find_refused_parameters(error: BackendError, body: Mapping[str, Any]) -> frozenset[str]:
    """Return the parameters of a request that a server's refusal names."""
    cause = error.__cause__
    if not isinstance(cause, RequestError) or cause.status not in _PARAMETER_STATUSES:
        return frozenset()
    names = frozenset(("max_tokens", "temperature"))
    return frozenset(name for name in names if name in body and name in cause.reason)


def _drop_parameters(body: Mapping[str, Any], refused: frozenset[str]) -> dict[str, Any]:
    adapted = {name: value for name, value in body.items() if name not in refused}
    if "max_tokens" in refused:
        adapted["max_completion_tokens"] = body["max_tokens"]
    return adapted
