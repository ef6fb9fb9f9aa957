"""Process of `posttrain serve`: loads the model, watches for new versions, serves until it is stopped."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.operations.processes import check_port
from posttrain.serving.application import build_chat_app
from posttrain.serving.chat_server import ChatServer
from posttrain.serving.online_learning import OnlineLearner, OnlineLearningPlan
from posttrain.serving.served_model import ModelSource, NoChampion, load_served_model
from posttrain.web.server_setup import (
    limit_connections,
    raise_open_file_limit,
    run_server,
    shorten_switch_interval,
)
from posttrain.web.tokens import load_or_create_token
from rl_core.errors import PosttrainError, SettingsError
from rl_core.settings import EnvironmentSettings, ModelSettings, ServingSettings

log = logging.getLogger(__name__)

FIRST_POLL_SECONDS = 2.0  # between two checks for the first model
RESERVED_FILES = 256  # for the model, labels and logs
STOP_SECONDS = 5  # for responses in progress when the server is stopped


@dataclass(frozen=True, slots=True)
class ServingConfig:
    """Configuration of `posttrain serve`."""

    settings: ServingSettings
    name: str  # the model's name for clients
    source: ModelSource
    model: ModelSettings = field(default_factory=ModelSettings)
    environment: EnvironmentSettings | None = None
    learning: OnlineLearningPlan | None = None  # None = the server does not learn

    @property
    def folder(self) -> Path:
        """Folder of the token, labels and downloads."""
        return self.source.output / "serving"

    @property
    def base_url(self) -> str:
        """Base URL for clients."""
        host = self.settings.host
        if ":" in host:
            host = f"[{host}]"
        return f"http://{host}:{self.settings.port}/v1"


def serve_model(
    config: ServingConfig, *, wait_for_champion: bool = False, say: Callable[[str], None] = print
) -> None:
    """Serve a model until SIGTERM or Ctrl-C.

    Args:
        wait_for_champion: True = start without a model and load the champion once there is one.
    Raises: SettingsError with the next step if the port is taken or the model does not exist; ModelError, DataError
        if the model cannot be used; BackendError if the tracking store is unreachable.
    """
    settings = config.settings
    if settings.rollouts and config.learning is not None:
        raise SettingsError(
            "serving.rollouts: a trainer sends the weights, but --learn learns them here; leave one out"
        )
    check_port(settings.port, "posttrain serve", "--port N")
    token = load_or_create_token(config.folder)
    server = ChatServer(settings, config.name, config.folder, token, environment=config.environment)
    learner: OnlineLearner | None = None
    if config.learning is not None:
        learner = OnlineLearner(config.learning, config.source, settings, config.model, config.name)
    watcher = ModelWatcher(server, config.source, settings, config.model, learner)
    try:
        try:
            if learner is not None:
                learner.start_learning(server)
            else:
                server.start_serving(load_served_model(config.source, settings, config.model))
        except NoChampion as error:
            if not wait_for_champion:
                raise
            server.not_ready_reason = str(error)
            say(f"waiting    {error}")
        watcher.start_thread()
        _serve_http(server, config, say)
    finally:
        watcher.request_stop()
        server.close()
        if learner is not None:
            learner.stop_learning()


class ModelWatcher:
    """Watcher that publishes new versions of a model to a server, and the first one if it started without a model."""

    def __init__(
        self,
        server: ChatServer,
        source: ModelSource,
        settings: ServingSettings,
        model: ModelSettings,
        learner: OnlineLearner | None = None,
    ) -> None:
        """Prepare the thread.

        Args:
            learner: of a server that learns; its versions are snapshots, and only the first one is registered.
        """
        self._learner = learner
        self._server, self._source, self._settings, self._model = server, source, settings, model
        self._stop_event = threading.Event()
        self._rejected_version: int | None = None  # a version that cannot be served
        self._thread = threading.Thread(
            target=self._poll_registry, name="serving-watch", daemon=True
        )

    def start_thread(self) -> None:
        """Start watching if a version may appear."""
        if self._server.model is None or self._should_keep_polling:
            self._thread.start()

    def request_stop(self) -> None:
        """Stop after the current check."""
        self._stop_event.set()

    def _poll_registry(self) -> None:
        while not self._stop_event.wait(
            FIRST_POLL_SECONDS if self._server.model is None else self._settings.reload_seconds
        ):
            try:
                self.check_for_model()
            except PosttrainError as error:
                log.warning("%s", error)
            except Exception:  # the next check may succeed
                log.exception("the model could not be looked up")
            if self._server.model is not None and not self._should_keep_polling:
                return

    @property
    def _should_keep_polling(self) -> bool:
        """True = new versions may appear: the model is registered and no trainer sends the weights."""
        settings = self._settings
        return self._source.is_registered and settings.reload_seconds > 0 and not settings.rollouts

    def check_for_model(self) -> bool:
        """Check for a new version once and serve it.

        Returns: True = a version was published.
        Raises: BackendError, ModelError.
        """
        current = self._server.model
        if current is not None and self._learner is not None:
            self._learner.check_champion()
            return False
        try:
            registered = self._source.find_version()
        except NoChampion as error:
            if current is None:
                self._server.not_ready_reason = str(error)
            return False
        version = registered.version if registered is not None else 0
        if current is not None and version in (current.version, self._rejected_version):
            return False
        if current is None and self._learner is not None:
            self._learner.start_learning(self._server)
            return True
        loaded = load_served_model(self._source, self._settings, self._model)
        if current is None:
            self._server.start_serving(loaded)
        elif not self._server.publish_model(loaded):
            self._rejected_version = version
            log.error(
                "version %d has another tokenizer, chat template or context than version %d; restart the server to "
                "serve it",
                version,
                current.version,
            )
            return False
        log.info("version %d of %s answers new requests", loaded.version, self._source.reference)
        return True


def _serve_http(server: ChatServer, config: ServingConfig, say: Callable[[str], None]) -> None:
    import uvicorn

    settings = config.settings
    num_files = raise_open_file_limit(settings.max_connections + RESERVED_FILES)
    max_connections = min(settings.max_connections, max(1, num_files - RESERVED_FILES))
    shorten_switch_interval()
    http: Any = limit_connections(max_connections, settings.idle_seconds)

    class WebServer(uvicorn.Server):
        async def shutdown(self, sockets: Any = None) -> None:
            """Fail the requests that are not answered in time before uvicorn cancels them."""
            ending = asyncio.ensure_future(_end_open_answers(server))
            await super().shutdown(sockets)
            ending.cancel()

    web_server = WebServer(
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
    try:
        run_server(web_server, partial(_print_address, server, config, say))
    except SystemExit:
        raise SettingsError(
            f"port {settings.port} was taken by another process just now; choose another with --port N"
        ) from None


async def _end_open_answers(server: ChatServer) -> None:
    await asyncio.sleep(STOP_SECONDS - 1)
    if server.engine is not None:
        server.engine.loop.close()


def _print_address(server: ChatServer, config: ServingConfig, say: Callable[[str], None]) -> None:
    """Print model, address and location of the token."""
    model, version = server.model, ""
    if model is not None and (config.source.is_registered or config.learning is not None):
        version = f", version {model.name}"
    say(f"serving    {config.name} ({config.source.reference}{version})")
    if config.learning is not None:
        say(f"learning   in {config.learning.root}")
    if server.recorded is not None:
        file = server.recorded.file
        say(f"recording  {file.path} ({file.num_episodes} episodes)")
    say(f"base_url   {config.base_url}")
    say(f"api_key    in {config.folder / 'token'}")
    say("Ctrl-C stops it")
