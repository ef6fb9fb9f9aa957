"""A thread that waits for a model, and looks for new versions of it."""

from __future__ import annotations

import logging
import threading

from flows.serving.chat_server import ChatServer
from flows.serving.learning_start import Learner
from flows.serving.served_model import ModelPlace, NoChampion, load_served
from rl_core.errors import PosttrainError
from rl_core.settings import ModelSettings, ServingSettings

__all__ = ["ModelWatch"]

log = logging.getLogger(__name__)

FIRST_SECONDS = 2.0  # between two looks for a model that is not there yet


class ModelWatch:
    """Hands new versions to a server; the first one too, where there was none at the start."""

    def __init__(
        self,
        server: ChatServer,
        place: ModelPlace,
        settings: ServingSettings,
        model: ModelSettings,
        learner: Learner | None = None,
    ) -> None:
        """learner: of a server that learns, whose versions are snapshots; the registry only gives the first one."""
        self._learner = learner
        self._server, self._place, self._settings, self._model = server, place, settings, model
        self._is_over = threading.Event()
        self._refused: int | None = None  # a version that cannot be taken over
        self._thread = threading.Thread(target=self._run, name="serving-watch", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        if self._server.model is None or self._goes_on:
            self._thread.start()

    def stop(self) -> None:
        """End, after the present look."""
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.wait(FIRST_SECONDS if self._server.model is None else self._settings.reload_seconds):
            try:
                self.look()
            except PosttrainError as error:
                log.warning("%s", error)
            except Exception:  # the next look may find what this one did not
                log.exception("the model could not be looked up")
            if self._server.model is not None and not self._goes_on:
                return

    @property
    def _goes_on(self) -> bool:
        """True = there may be new versions: the model is registered, and no trainer gives the server its weights."""
        settings = self._settings
        return self._place.is_registered and settings.reload_seconds > 0 and not settings.rollouts

    def look(self) -> bool:
        """One look. Returns: True = a version was taken over. Raises: BackendError, ModelError."""
        now = self._server.model
        if now is not None and self._learner is not None:
            self._learner.look()
            return False
        try:
            found = self._place.find()
        except NoChampion as error:
            if now is None:
                self._server.waits_for = str(error)
            return False
        version = found.version if found is not None else 0
        if now is not None and version in (now.version, self._refused):
            return False
        if now is None and self._learner is not None:
            self._learner.begin(self._server)
            return True
        loaded = load_served(self._place, self._settings, self._model)
        if now is None:
            self._server.begin(loaded)
        elif not self._server.publish(loaded):
            self._refused = version
            log.error("version %d reads and writes other tokens than version %d; restart the server to serve it",
                      version, now.version)  # fmt: skip
            return False
        log.info("version %d of %s answers new requests", loaded.version, self._place.reference)
        return True
