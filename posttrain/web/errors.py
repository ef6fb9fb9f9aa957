"""Errors that an HTTP handler raises; each server's exception handler writes them in its own error format."""

from __future__ import annotations

from collections.abc import Mapping


class HTTPError(Exception):
    """A response with an error status.

    Args:
        status: HTTP status code.
        detail: one sentence for the user.
        headers: further response headers, such as `Retry-After`.
    """

    def __init__(self, status: int, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.headers = status, dict(headers or {})
