"""Requests to a JSON server over HTTP: tried again a bounded number of times, bounded in time and size."""

from __future__ import annotations

import http.client
import json
import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from rl_core.errors import BackendError

__all__ = ["Limits", "ask_server", "v1_address"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
MAX_ANSWER = 64 * 2**20  # bytes
MAX_WAIT_S = 60.0  # between two tries
_TRANSIENT = {408, 409, 425, 429}  # and all above 499: another try may succeed


class Limits(NamedTuple):
    """Bounds of one request with its tries."""

    timeout_s: float  # of one try, from the connection to the last byte
    retries: int
    retry_delay_s: float  # doubled with each further try


class _Unanswered(Exception):
    """A try without a usable answer; another one may have it."""

    def __init__(self, problem: str, wait_s: float = 0.0) -> None:
        super().__init__(problem)
        self.wait_s = wait_s  # that the server asks for


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Redirections are errors: they would carry the key elsewhere, and turn a POST into a GET."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """None: the answer stands as it is."""


def v1_address(url: str, path: str) -> str:
    """Address of an OpenAI-compatible end point, for a base with or without /v1."""
    base = url.rstrip("/")
    return f"{base if base.endswith('/v1') else f'{base}/v1'}/{path}"


def ask_server(
    url: str,
    body: Mapping[str, Any],
    limits: Limits,
    *,
    read: Callable[[Any], T],
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
            answer = _post(urllib.request.Request(url, encoded, sent), limits.timeout_s)
        except _Unanswered as unanswered:
            problem, wait_s = str(unanswered), unanswered.wait_s
        else:
            try:
                return read(answer)
            except (ValueError, KeyError, IndexError, TypeError) as error:
                problem, wait_s = f"no answer to the question ({type(error).__name__}: {str(error)[:200]})", 0.0
        if tries <= limits.retries:
            logger.warning("%s: %s; asked again", url, problem)
            stop.wait(min(MAX_WAIT_S, max(wait_s, limits.retry_delay_s * 2 ** (tries - 1))))
    raise BackendError(f"{url} did not answer in {tries} tries (the last: {problem})")


def _post(request: urllib.request.Request, timeout_s: float) -> Any:
    """One try. Raises: _Unanswered; BackendError for a request that is refused."""
    end = time.monotonic() + timeout_s
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=timeout_s) as answer:
            return json.loads(_read(answer, end, timeout_s))
    except urllib.error.HTTPError as error:
        text = _read(error, end, timeout_s, 500).decode(errors="replace")
        problem = f"{error.code} {error.reason}: {text}"
        if error.code < 500 and error.code not in _TRANSIENT:
            raise BackendError(f"{request.full_url} refuses the request: {problem}") from error
        wait = error.headers.get("Retry-After", "")
        raise _Unanswered(problem, float(wait) if wait.isdigit() else 0.0) from error
    # ValueError: half an answer is no JSON. RecursionError: nor is one of a thousand brackets
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        raise _Unanswered(f"{type(error).__name__}: {error}") from error


def _read(answer: Any, end: float, timeout_s: float, most: int = 0) -> bytes:
    """Body of an answer; `most`: bytes that are enough. Raises: OSError for one that is too long or too slow."""
    parts, size = [], 0
    while part := answer.read1(2**16):
        parts.append(part)
        size += len(part)
        if most and size >= most:
            break
        if size > MAX_ANSWER:
            raise OSError(f"the answer is longer than {MAX_ANSWER // 2**20} MiB")
        if time.monotonic() > end:
            raise OSError(f"the answer was not complete within {timeout_s:g} s")
    return b"".join(parts)[: most or None]
