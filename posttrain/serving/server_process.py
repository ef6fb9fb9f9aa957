"""A thread that waits for a model, and looks for new versions of it.

`posttrain serve`: the process, from the model's name to the end of the last answer.
"""

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

from posttrain.operations.processes import check_port
from posttrain.serving.application import build_chat_app
from posttrain.serving.chat_server import ChatServer
from posttrain.serving.online_learning import OnlineLearner, OnlineLearningPlan
from posttrain.serving.served_model import ModelSource, NoChampion, load_served_model
from posttrain.web.server_setup import (
    limit_connections,
    load_or_create_token,
    raise_open_file_limit,
    shorten_switch_interval,
)
from rl_core.errors import PosttrainError, SettingsError
from rl_core.settings import EnvironmentSettings, ModelSettings, ServingSettings

log = logging.getLogger(__name__)

FIRST_POLL_SECONDS = 2.0  # between two looks for a model that is not there yet


class ModelWatcher:
    """Hands new versions to a server; the first one too, where there was none at the start."""

    def __init__(
        self,
        server: ChatServer,
        source: ModelSource,
        settings: ServingSettings,
        model: ModelSettings,
        learner: OnlineLearner | None = None,
    ) -> None:
        """learner: of a server that learns, whose versions are snapshots; the registry only gives the first one."""
        self._learner = learner
        self._server, self._source, self._settings, self._model = server, source, settings, model
        self._stop_event = threading.Event()
        self._rejected_version: int | None = None  # a version that cannot be taken over
        self._thread = threading.Thread(
            target=self._poll_registry, name="serving-watch", daemon=True
        )

    def start_thread(self) -> None:
        """Begin to look."""
        if self._server.model is None or self._should_keep_polling:
            self._thread.start()

    def request_stop(self) -> None:
        """End, after the present look."""
        self._stop_event.set()

    def _poll_registry(self) -> None:
        while not self._stop_event.wait(
            FIRST_POLL_SECONDS if self._server.model is None else self._settings.reload_seconds
        ):
            try:
                self.check_for_model()
            except PosttrainError as error:
                log.warning("%s", error)
            except Exception:  # the next look may find what this one did not
                log.exception("the model could not be looked up")
            if self._server.model is not None and not self._should_keep_polling:
                return

    @property
    def _should_keep_polling(self) -> bool:
        """True = there may be new versions: the model is registered, and no trainer gives the server its weights."""
        settings = self._settings
        return self._source.is_registered and settings.reload_seconds > 0 and not settings.rollouts

    def check_for_model(self) -> bool:
        """One look. Returns: True = a version was taken over. Raises: BackendError, ModelError."""
        now = self._server.model
        if now is not None and self._learner is not None:
            self._learner.check_champion()
            return False
        try:
            found = self._source.find_version()
        except NoChampion as error:
            if now is None:
                self._server.not_ready_reason = str(error)
            return False
        version = found.version if found is not None else 0
        if now is not None and version in (now.version, self._rejected_version):
            return False
        if now is None and self._learner is not None:
            self._learner.start_learning(self._server)
            return True
        loaded = load_served_model(self._source, self._settings, self._model)
        if now is None:
            self._server.start_serving(loaded)
        elif not self._server.publish_model(loaded):
            self._rejected_version = version
            log.error(
                "version %d reads and writes other tokens than version %d; restart the server to serve it",
                version,
                now.version,
            )
            return False
        log.info("version %d of %s answers new requests", loaded.version, self._source.reference)
        return True


STOP_SECONDS = 5  # for answers that are being sent when the server is stopped


@dataclass(frozen=True, slots=True)
class ServingConfig:
    """All that `serve` needs to know."""

    settings: ServingSettings
    name: str  # by which clients ask for the model
    source: ModelSource
    model: ModelSettings = field(default_factory=ModelSettings)
    environment: EnvironmentSettings | None = None
    learning: OnlineLearningPlan | None = None  # None = it does not learn

    @property
    def folder(self) -> Path:
        """Folder of the token, labels and downloads."""
        return self.source.output / "serving"

    @property
    def base_url(self) -> str:
        """Base URL for clients."""
        host = self.settings.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.settings.port}/v1"


def serve_model(
    config: ServingConfig, *, wait_for_champion: bool = False, say: Callable[[str], None] = print
) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Args:
        waits: True = serve nothing until there is a champion, in place of an error.
    Raises: SettingsError for a port that is taken or a model that is not there, with the next step; ModelError,
        DataError for one that cannot be used; BackendError where the store does not answer.
    """
    settings = config.settings
    if settings.rollouts and config.learning is not None:
        raise SettingsError(
            "serving.rollouts: a trainer gives the weights, and --learn learns them here; leave one out"
        )
    check_port(settings.port, "posttrain serve", "--port N")
    token = load_or_create_token(config.folder)
    server = ChatServer(settings, config.name, config.folder, token, environment=config.environment)
    learner = _create_learner(config)
    watch = ModelWatcher(server, config.source, settings, config.model, learner)
    try:
        _load_model(server, config, learner, wait_for_champion, say)
        watch.start_thread()
        _serve_http(server, config, say)
    finally:
        watch.request_stop()
        server.close()
        if learner is not None:
            learner.stop_learning()


def _create_learner(serving: ServingConfig) -> OnlineLearner | None:
    if serving.learning is None:
        return None
    return OnlineLearner(
        serving.learning, serving.source, serving.settings, serving.model, serving.name
    )


def _load_model(
    server: ChatServer,
    serving: ServingConfig,
    learner: OnlineLearner | None,
    wait_for_champion: bool,
    say: Callable[[str], None],
) -> None:
    try:
        if learner is not None:
            learner.start_learning(server)
        else:
            server.start_serving(load_served_model(serving.source, serving.settings, serving.model))
    except NoChampion as error:
        if not wait_for_champion:
            raise
        server.not_ready_reason = str(error)
        say(f"waiting    {error}")


def _serve_http(server: ChatServer, serving: ServingConfig, say: Callable[[str], None]) -> None:
    import uvicorn

    settings = serving.settings
    raise_open_file_limit(settings.max_connections + 256)
    shorten_switch_interval()
    http: Any = limit_connections(settings.max_connections, settings.idle_seconds)

    class Web(uvicorn.Server):
        async def shutdown(self, sockets: Any = None) -> None:
            """Tell requests that are not answered in time so, before uvicorn cancels them."""
            ending = asyncio.ensure_future(_end_open_answers(server))
            await super().shutdown(sockets)
            ending.cancel()

    web = Web(
        uvicorn.Config(
            build_chat_app(server),
            http=http,
            host=settings.host,
            port=settings.port,
            log_level="warning",
            access_log=False,
            timeout_keep_alive=max(1, int(settings.idle_seconds)),
            backlog=2048,
            lifespan="on",
            timeout_graceful_shutdown=STOP_SECONDS,
            server_header=False,
            date_header=False,
        )
    )
    threading.Thread(target=_print_address, args=(web, server, serving, say), daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn has shut down and re-raises the signal
        try:
            web.run()
        except SystemExit:
            raise SettingsError(
                f"port {settings.port} was taken by another process just now; choose another with --port N"
            ) from None


async def _end_open_answers(server: ChatServer) -> None:
    await asyncio.sleep(STOP_SECONDS - 1)
    if server.engine is not None:
        server.engine.loop.close()


def _print_address(
    web: Any, server: ChatServer, serving: ServingConfig, say: Callable[[str], None]
) -> None:
    """Print address and token once the server answers."""
    while not web.started and not web.should_exit:
        time.sleep(0.05)
    if not web.started:
        return
    model = server.model
    is_known = model is not None and (serving.source.is_registered or serving.learning is not None)
    say(
        f"serving    {serving.name} ({serving.source.reference}"
        f"{f', version {model.name}' if model is not None and is_known else ''})"
    )
    if serving.learning is not None:
        say(f"learning   in {serving.learning.root}")
    say(f"base_url   {serving.base_url}")
    say(f"api_key    in {serving.folder / 'token'}")
    say("Ctrl-C stops it")
