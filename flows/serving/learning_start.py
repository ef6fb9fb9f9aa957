"""Start of a learning service: which model it begins with, its folder, and its parts joined to the server."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path

from flows.online.learning_folder import LearningFolder, pipeline_settings, read_service
from flows.online.service_run import ServiceRun
from flows.serving.chat_server import ChatServer
from flows.serving.feedback_journal import FeedbackJournal
from flows.serving.learning import LearningFeedback, LearningService
from flows.serving.served_model import ModelPlace
from flows.serving.snapshot_source import SnapshotSource
from rl_core.errors import PosttrainError, SettingsError
from rl_core.settings import EnvironmentSettings, ModelSettings, OnlineSettings, ServingSettings
from rl_core.storage.manifest import digest_folder
from tasks.tracking import ModelVersion, Tracking

__all__ = ["BASE_TAG", "Learner", "LearningPlan"]

log = logging.getLogger(__name__)

BASE_TAG = "online.base_sha256"  # of a registered version that was learned online: digest of the model it began with


@dataclass(frozen=True, slots=True)
class LearningPlan:
    """All that learning needs beside what serving needs."""

    online: OnlineSettings
    root: Path  # folder of the pipeline's services, one for each model that one began with
    environment: EnvironmentSettings
    experiment: str
    alerts: dict[str, str]


class Learner:
    """Joins learning to a server, once there is a model."""

    def __init__(self, plan: LearningPlan, place: ModelPlace, serving: ServingSettings, model: ModelSettings,
                 name: str) -> None:  # fmt: skip
        self._plan, self._place, self._serving, self._model, self._name = plan, place, serving, model, name
        self.service: LearningService | None = None
        self._guard = threading.Lock()
        self._warned: int | None = None

    def begin(self, server: ChatServer) -> None:
        """Load the live snapshot, serve it, and learn.

        Raises: NoChampion; SettingsError for settings that do not fit; FolderBusy beside another server that learns.
        """
        found = self._place.find()
        folder = self._folder(found)
        settings = pipeline_settings(self._plan.online, self._plan.environment, self._model, folder.path)
        source = SnapshotSource(settings, self._serving, int(folder.facts.get("version") or 0))
        service = LearningService(folder, settings, source, lambda: self._run(folder, settings))
        with self._guard:
            service.__enter__()
            self.service = service
        try:
            self._join(server, service, settings, source)
        except BaseException:  # it is tried again, and would find the folder busy
            self.stop()
            raise

    def _join(
        self, server: ChatServer, service: LearningService, settings: OnlineSettings, source: SnapshotSource
    ) -> None:
        live = source.snapshots.live()
        try:
            loaded = source.load(live)
        except PosttrainError as error:
            if not live:
                raise
            log.error("snapshot %d cannot be served (%s): the model that the service began with is", live, error)
            loaded = source.load(None)
        journal = FeedbackJournal(server.folder / "feedback.jsonl")
        server.voting = settings.voting
        server.take_answers(service.answers, LearningFeedback(service.answers, journal))
        server.begin(loaded)
        service.start(server)

    def look(self) -> None:
        """Say once where the registry has another champion than this service has made."""
        assert self.service is not None
        found = self._place.find()
        facts = self.service.folder.facts
        if found is None or str(found.version) == str(facts.get("version")) or self._is_own(found, facts):
            return
        if found.version != self._warned:
            self._warned = found.version
            self.service.tell(
                "champion",
                f"version {found.version} is the champion now, and was not learned here; the service goes on with what "
                f"it learned from version {facts.get('version')}. Restart the server to begin anew from it",
            )

    def stop(self) -> None:
        """End learning."""
        with self._guard:
            service, self.service = self.service, None
        if service is not None:
            service.__exit__(None, None, None)

    def _folder(self, found: ModelVersion | None) -> LearningFolder:
        """The service's folder: that of the lineage of a champion which was learned here, else one of its own."""
        if found is not None and (base := found.tags.get(BASE_TAG)):
            for path in sorted(self._plan.root.glob("*")):
                facts = read_service(path)
                if facts.get("model_sha256") == base:
                    return LearningFolder(path, facts)
        source = self._place.folder(found)
        if isinstance(source, str):
            raise SettingsError(
                f"--learn: {source} is a name of the hub; learning needs a folder (download it, and name that)"
            )
        name = f"version-{found.version}" if found is not None else f"model-{digest_folder(source)[:12]}"
        facts = {"name": self._name, "reference": self._place.reference}
        facts |= {"version": found.version, "registered": found.name} if found is not None else {}
        return LearningFolder.open(self._plan.root / name, source, facts)

    @staticmethod
    def _is_own(found: ModelVersion, facts: dict[str, object]) -> bool:
        return found.tags.get(BASE_TAG) == facts.get("model_sha256")

    def _run(self, folder: LearningFolder, settings: OnlineSettings) -> ServiceRun:
        tracking = Tracking(self._place.tracking_uri, self._place.output, self._plan.experiment)
        return ServiceRun(tracking, folder, settings, self._name, self._plan.alerts)
