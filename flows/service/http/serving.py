"""The server process of the training service."""

from __future__ import annotations

import contextlib

from flows.runtime.server_limits import raise_file_limit, switch_threads_soon
from flows.service.http.application import make_service_app
from flows.service.store import ServiceStore
from rl_core.settings import ServiceSettings

__all__ = ["serve_http"]

OPEN_FILES = 16_384  # each client that waits for a result holds a connection


def serve_http(settings: ServiceSettings) -> None:
    """Serve until SIGTERM or Ctrl-C. Raises: SettingsError, BackendError if the store cannot be opened."""
    import uvicorn

    raise_file_limit(OPEN_FILES)
    switch_threads_soon()
    store = ServiceStore(settings.store_url)
    server = uvicorn.Server(
        uvicorn.Config(
            make_service_app(settings, store), host=settings.server.host, port=settings.server.port,
            log_level="warning", access_log=False, timeout_keep_alive=75, timeout_graceful_shutdown=3, lifespan="on",
        )
    )  # fmt: skip
    try:
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn has shut down and re-raises the signal
            server.run()
    finally:
        store.close()
