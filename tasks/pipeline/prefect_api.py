"""A sign of life of Prefect's API, before a call that would wait for minutes where it is silent."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

import httpx
from prefect.settings import get_current_settings

__all__ = ["LATER_PATIENCE", "PATIENCE", "check_api"]

PATIENCE, LATER_PATIENCE = 20.0, 1.0  # seconds; the second is of an API that has been silent before


def check_api(patience: float) -> None:
    """Ask for its health; any answer will do.

    An API without an address is that of a server which Prefect starts itself, and is not asked.

    Raises: OSError if it takes no connection, TimeoutError if it gives no answer, within `patience` seconds each.
    """
    settings = get_current_settings()
    url = urlsplit(settings.api.url or "")
    if not url.hostname:
        return
    socket.create_connection((url.hostname, url.port or (443 if url.scheme == "https" else 80)), patience).close()
    # Certificates are read for an address that has them alone: reading takes longer than all the rest, at every call.
    verify = url.scheme == "https" and not settings.api.tls_insecure_skip_verify
    try:
        httpx.get(f"{settings.api.url}/health", timeout=patience, verify=verify)
    except httpx.TimeoutException:
        raise TimeoutError(f"it takes connections, but gave no answer for {patience:g} s") from None
    except httpx.HTTPError:
        return  # the call itself says what is wrong
