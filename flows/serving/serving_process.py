"""`posttrain serve`: the process, from the model's name to the end of the last answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.operations.ports import check_port
from flows.runtime.access_token import token_of
from flows.runtime.server_limits import raise_file_limit, switch_threads_soon
from flows.serving.chat_application import make_chat_app
from flows.serving.chat_server import ChatServer
from flows.serving.connections import bounded_connections
from flows.serving.learning_start import Learner, LearningPlan
from flows.serving.model_watch import ModelWatch
from flows.serving.served_model import ModelPlace, NoChampion, load_served
from rl_core.errors import SettingsError
from rl_core.settings import EnvironmentSettings, ModelSettings, ServingSettings

__all__ = ["Serving", "serve"]

log = logging.getLogger(__name__)

STOP_SECONDS = 5  # for answers that are being sent when the server is stopped


@dataclass(frozen=True, slots=True)
class Serving:
    """All that `serve` needs to know."""

    settings: ServingSettings
    name: str  # by which clients ask for the model
    place: ModelPlace
    model: ModelSettings = field(default_factory=ModelSettings)
    environment: EnvironmentSettings | None = None
    learning: LearningPlan | None = None  # None = it does not learn

    @property
    def folder(self) -> Path:
        """Folder of the token, labels and downloads."""
        return self.place.output / "serving"

    @property
    def address(self) -> str:
        """Base URL for clients."""
        host = self.settings.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.settings.port}/v1"


def serve(serving: Serving, *, waits: bool = False, say: Callable[[str], None] = print) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Args:
        waits: True = serve nothing until there is a champion, in place of an error.
    Raises: SettingsError for a port that is taken or a model that is not there, with the next step; ModelError,
        DataError for one that cannot be used; BackendError where the store does not answer.
    """
    settings = serving.settings
    if settings.rollouts and serving.learning is not None:
        raise SettingsError(
            "serving.rollouts: a trainer gives the weights, and --learn learns them here; leave one out"
        )
    check_port(settings.port, "posttrain serve", "--port N")
    token = token_of(serving.folder)
    server = ChatServer(settings, serving.name, serving.folder, token, environment=serving.environment)
    learner = _learner(serving)
    watch = ModelWatch(server, serving.place, settings, serving.model, learner)
    try:
        _load(server, serving, learner, waits, say)
        watch.start()
        _serve_http(server, serving, say)
    finally:
        watch.stop()
        server.close()
        if learner is not None:
            learner.stop()


def _learner(serving: Serving) -> Learner | None:
    if serving.learning is None:
        return None
    return Learner(serving.learning, serving.place, serving.settings, serving.model, serving.name)


def _load(
    server: ChatServer, serving: Serving, learner: Learner | None, waits: bool, say: Callable[[str], None]
) -> None:
    try:
        if learner is not None:
            learner.begin(server)
        else:
            server.begin(load_served(serving.place, serving.settings, serving.model))
    except NoChampion as error:
        if not waits:
            raise
        server.waits_for = str(error)
        say(f"waiting    {error}")


def _serve_http(server: ChatServer, serving: Serving, say: Callable[[str], None]) -> None:
    import uvicorn

    settings = serving.settings
    raise_file_limit(settings.max_connections + 256)
    switch_threads_soon()
    http: Any = bounded_connections(settings.max_connections, settings.idle_seconds)

    class Web(uvicorn.Server):
        async def shutdown(self, sockets: Any = None) -> None:
            """Tell requests that are not answered in time so, before uvicorn cancels them."""
            ending = asyncio.ensure_future(_end_answers(server))
            await super().shutdown(sockets)
            ending.cancel()

    web = Web(uvicorn.Config(
        make_chat_app(server), http=http, host=settings.host, port=settings.port, log_level="warning",
        access_log=False, timeout_keep_alive=max(1, int(settings.idle_seconds)), backlog=2048, lifespan="on",
        timeout_graceful_shutdown=STOP_SECONDS, server_header=False, date_header=False,
    ))  # fmt: skip
    threading.Thread(target=_announce, args=(web, server, serving, say), daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn has shut down and re-raises the signal
        try:
            web.run()
        except SystemExit:
            raise SettingsError(
                f"port {settings.port} was taken by another process just now; choose another with --port N"
            ) from None


async def _end_answers(server: ChatServer) -> None:
    await asyncio.sleep(STOP_SECONDS - 1)
    if server.answering is not None:
        server.answering.loop.close()


def _announce(web: Any, server: ChatServer, serving: Serving, say: Callable[[str], None]) -> None:
    """Print address and token once the server answers."""
    while not web.started and not web.should_exit:
        time.sleep(0.05)
    if not web.started:
        return
    model = server.model
    is_known = model is not None and (serving.place.is_registered or serving.learning is not None)
    say(f"serving    {serving.name} ({serving.place.reference}"
        f"{f', version {model.name}' if model is not None and is_known else ''})")  # fmt: skip
    if serving.learning is not None:
        say(f"learning   in {serving.learning.root}")
    say(f"base_url   {serving.address}")
    say(f"api_key    in {serving.folder / 'token'}")
    say("Ctrl-C stops it")
