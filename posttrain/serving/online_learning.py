"""The MLflow run of a learning service: one for its whole life, restarts included.

Learning beside serving: answers into the log, worker and gate kept running, snapshots taken over, numbers told.

Start of a learning service: which model it begins with, its folder, and its parts joined to the server.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.online.supervision import StandbyProcess, SupervisedProcess
from posttrain.serving.chat_server import ChatServer, FeedbackJournal
from posttrain.serving.served_model import ModelSource, SnapshotSource, SnapshotWatcher
from rl_core.errors import PosttrainError, SettingsError
from rl_core.inference.serving_requests import FeedbackLabel
from rl_core.online.build_worker import BUFFER_FOLDER, create_online_environment
from rl_core.online.experience_writer import ExperienceWriter
from rl_core.online.learning_folder import (
    LearningFolder,
    build_pipeline_settings,
    read_service_facts,
)
from rl_core.online.service_files import (
    GATE_FILE,
    METRICS_FILE,
    OPERATOR_FILE,
    read_file_identity,
    read_gate_state,
    read_json_object,
)
from rl_core.settings import EnvironmentSettings, ModelSettings, OnlineSettings, ServingSettings
from rl_core.storage.manifest import digest_folder
from tasks.tracking import ModelVersion, Tracking
from tasks.tracking.extra_trackers import build_alert_tracker


class OnlineTrackingRun:
    """The run; its step is the second of the service's life."""

    def __init__(
        self,
        tracking: Tracking,
        folder: LearningFolder,
        settings: OnlineSettings,
        name: str,
        alerts: Mapping[str, str],
    ) -> None:
        """alerts: conditions on metrics beside that of a pause, which is always there."""
        facts = folder.facts
        tags = {
            "online.service": str(folder.path),
            "online.base_sha256": facts["model_sha256"],
            "online.base_version": str(facts.get("version") or ""),
        }
        self._run = tracking.start_run(
            f"online {name}",
            folder.path / "run",
            tags=tags,
            params={"online": dataclasses.asdict(settings)},
            description=f"Online learning of {name}, from {facts.get('reference', '')}; {folder.path}",
            wait_s=2.0,
        )
        self._run.extra_trackers.append(build_alert_tracker(alerts, name, "online"))
        self._began = float(facts["began"])
        self._last, self._alarm = -1, ""

    def log_metrics(self, metrics: Mapping[str, float], alarm: str) -> None:
        """Record all numbers, and the alarm that stands; "" = none."""
        self._last = max(self._last + 1, int(time.time() - self._began))
        self._run.log_metrics(metrics, self._last)
        if alarm != self._alarm:
            self._alarm = alarm
            self._run.set_tag("online.alarm", alarm or "none")

    def close_run(self) -> None:
        """End the run; the next start of the service goes on with it."""
        self._run.close(timeout_s=5.0)


log = logging.getLogger(__name__)

SUPERVISION_SECONDS = 0.1


class LearningFeedback:
    """Labels of answers that are learned from go into the log, all of them into the journal."""

    def __init__(self, answers: ExperienceWriter, journal: FeedbackJournal) -> None:
        self._answers, self._journal = answers, journal

    def accept_label(self, answer_id: str, choice: int, label: FeedbackLabel) -> None:
        """See `FeedbackSink`."""
        if self._answers.knows(answer_id):
            self._answers.accept_label(answer_id, choice, label)
        self._journal.accept_label(answer_id, choice, label)


class OnlineLearningService:
    """Everything beside the answers; a context manager. `start` once the server has a model."""

    def __init__(
        self,
        folder: LearningFolder,
        settings: OnlineSettings,
        source: SnapshotSource,
        make_run: Callable[[], OnlineTrackingRun],
    ) -> None:
        """make_run: starts the MLflow run; called on a thread, as the store may be slow."""
        self.folder, self.settings, self.source, self._make_run = folder, settings, source, make_run
        self.answers = ExperienceWriter(
            folder.path / BUFFER_FOLDER, settings, create_online_environment(settings.environment)
        )
        self.server: ChatServer | None = None
        self.snapshot_watcher: SnapshotWatcher | None = None
        self.processes: list[SupervisedProcess] = []
        self.standby: StandbyProcess | None = None
        self._forwarded_orders = folder.forwarded_orders
        self._file_states: Any = ()  # states of the files with orders, when they were read last
        self._last_decision: int | None = None  # told so far; None = those of before are no news
        self._paused = ""
        self._is_full = False
        self._stop_event = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> OnlineLearningService:
        self.answers.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stop_event.set()
        if self.snapshot_watcher is not None:
            self.snapshot_watcher.request_stop()
        for thread in self._threads:
            thread.join(30)
        if self.standby is not None:
            self.standby.stop_process()
        for process in self.processes:
            process.stop_process()
        self.answers.__exit__(None, None, None)

    def start_processes(self, server: ChatServer) -> None:
        """Begin to watch and learn."""
        assert server.model is not None
        self.server = server
        path = self.folder.write_settings(self.settings)
        own = [
            sys.executable,
            "-P",
            "-m",
            "posttrain.cli.main",
            "online",
        ]  # -P: nothing of the current folder
        if self.settings.service.standby:
            self.standby = StandbyProcess(
                [*own, "standby", str(path), "--heartbeat"], self.folder.path / "standby.log"
            )
        parts = ["worker"]
        if self.settings.service.run_gate and self.answers.environment is not None:
            parts.append("gate")
        self.processes = [
            SupervisedProcess(
                part,
                [*own, part, str(path), "--heartbeat"],
                self.folder.path / f"{part}.log",
                report_exit=lambda text: self.record_event("restart", text),
                standby=self.standby,
            )
            for part in parts
        ]
        self.snapshot_watcher = SnapshotWatcher(
            self.source, server.publish_model, server.model.version, self.record_event
        )
        self.snapshot_watcher.start_thread()
        self._threads = [
            threading.Thread(target=self._run_supervision, name="serving-learning", daemon=True),
            threading.Thread(target=self._track_metrics, name="serving-numbers", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def record_event(self, kind: str, text: str) -> None:
        """Note an event; a disk that refuses costs the note."""
        try:
            self.folder.append_event(kind, text)
        except PosttrainError as error:
            log.warning("not noted: %s (%s)", text, error)

    # Supervision

    def _run_supervision(self) -> None:
        while not self._stop_event.wait(SUPERVISION_SECONDS):
            for process in self.processes:
                process.step()
            try:
                if self.standby is not None and all(process.is_up for process in self.processes):
                    self.standby.ensure_started()  # once the others have started: it would take their processor time
                self._forward_orders()
                self._check_alarms()
                self._check_log_capacity()
            except PosttrainError as error:
                log.warning("%s", error)
            except Exception:
                log.exception("the service's files could not be looked at")

    def _forward_orders(self) -> None:
        """Orders of gate and person into the worker's log, each at most once; the gate's decisions into the record."""
        seen = [read_file_identity(self.folder.path / name) for name in (GATE_FILE, OPERATOR_FILE)]
        if (
            seen == self._file_states
        ):  # late in a service's life the gate's file takes milliseconds to read
            return
        self._file_states = seen
        gate = read_gate_state(self.folder.path)
        decisions = gate.get("decisions", [])
        newest = decisions[-1]["number"] if decisions else 0
        for decision in decisions if self._last_decision is not None else ():
            if decision["number"] > self._last_decision:
                self.record_event(
                    decision["verdict"], f"snapshot {decision['version']}: {decision['reason']}"
                )
        self._last_decision = newest
        self._append_new_orders(
            {
                GATE_FILE: gate.get("orders", []),
                OPERATOR_FILE: read_json_object(self.folder.path / OPERATOR_FILE).get("orders", []),
            }
        )

    def _append_new_orders(self, orders: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Hand the orders over that are new, by the file they stand in."""
        new = []
        for name, entries in orders.items():
            last = self._forwarded_orders[name]
            if (
                entries and entries[-1]["number"] < last
            ):  # the file was removed, and its numbers begin anew
                last = 0
            found = [entry for entry in entries if entry["number"] > last]
            if found:
                self._forwarded_orders[name] = found[-1]["number"]
                new += [entry["order"] for entry in found]
        if new:
            self.folder.record_forwarded_orders(self._forwarded_orders)
            self.answers.append_orders(new)

    def _check_alarms(self) -> None:
        paused = str(self.read_worker_metrics().get("paused", ""))
        if paused != self._paused:
            self._paused = paused
            hint = f"; `posttrain online resume {self.folder.path}` has it go on"
            self.record_event(
                "alarm" if paused else "resumed", paused + hint if paused else "learning goes on"
            )

    def _check_log_capacity(self) -> None:
        """Say once that the record takes nothing more, so that nothing new is learned."""
        if not self._is_full and (
            self.answers.counts["full"] or self.answers.counts["labels_full"]
        ):
            self._is_full = True
            size = self.settings.buffer.max_bytes
            self.record_event(
                "full",
                f"the buffer's record has its {size:,} bytes: nothing new is learned. Raise "
                "online.buffer.max_bytes, or set online.buffer.keep_segments=false, and restart",
            )

    def read_worker_metrics(self) -> dict[str, Any]:
        """The worker's newest numbers; {} before the first."""
        return read_json_object(self.folder.path / METRICS_FILE)

    # Numbers

    def _track_metrics(self) -> None:
        run, told = None, ""
        try:
            run = self._make_run()
        except Exception as error:
            log.warning("the service has no MLflow run: %s", error)
        due = time.monotonic()
        while not self._stop_event.wait(SUPERVISION_SECONDS):
            if time.monotonic() < due and told == self._paused:
                continue
            due = time.monotonic() + self.settings.service.metrics_seconds
            told = self._paused
            if run is not None:
                run.log_metrics(self.collect_metrics(), told)
        if run is not None:
            run.log_metrics(self.collect_metrics(), self._paused)
            run.close_run()

    def collect_metrics(self) -> dict[str, float]:
        """All numbers of the service, by metric name."""
        assert self.server is not None and self.server.engine is not None
        numbers = {
            k: float(v) for k, v in self.read_worker_metrics().items() if isinstance(v, int | float)
        }
        state = self.server.engine.loop.state
        own = {
            "online/serving_version": float(state.policy_version),
            "online/queue_depth": float(state.waiting),
            "online/active": float(state.active),
            **{
                f"online/restarts/{process.name}": float(process.restarts)
                for process in self.processes
            },
            **{f"online/up/{process.name}": float(process.is_up) for process in self.processes},
        }
        gate = {
            k: float(v) for k, v in read_gate_state(self.folder.path).get("metrics", {}).items()
        }
        return (
            numbers
            | gate
            | self.answers.collect_metrics()
            | self.server.metrics.compute_recent_rates()
            | own
        )


BASE_TAG = "online.base_sha256"  # of a registered version that was learned online: digest of the model it began with


@dataclass(frozen=True, slots=True)
class OnlineLearningPlan:
    """All that learning needs beside what serving needs."""

    online: OnlineSettings
    root: Path  # folder of the pipeline's services, one for each model that one began with
    environment: EnvironmentSettings
    experiment: str
    alerts: dict[str, str]


class OnlineLearner:
    """Joins learning to a server, once there is a model."""

    def __init__(
        self,
        plan: OnlineLearningPlan,
        source: ModelSource,
        serving: ServingSettings,
        model: ModelSettings,
        name: str,
    ) -> None:
        self._plan, self._source, self._serving, self._model, self._name = (
            plan,
            source,
            serving,
            model,
            name,
        )
        self.service: OnlineLearningService | None = None
        self._guard = threading.Lock()
        self._warned_version: int | None = None

    def start_learning(self, server: ChatServer) -> None:
        """Load the live snapshot, serve it, and learn.

        Raises: NoChampion; SettingsError for settings that do not fit; FolderBusy beside another server that learns.
        """
        found = self._source.find_version()
        folder = self._resolve_folder(found)
        settings = build_pipeline_settings(
            self._plan.online, self._plan.environment, self._model, folder.path
        )
        source = SnapshotSource(settings, self._serving, int(folder.facts.get("version") or 0))
        service = OnlineLearningService(
            folder, settings, source, lambda: self._start_tracking_run(folder, settings)
        )
        with self._guard:
            service.__enter__()
            self.service = service
        try:
            self._attach_service(server, service, settings, source)
        except BaseException:  # it is tried again, and would find the folder busy
            self.stop_learning()
            raise

    def _attach_service(
        self,
        server: ChatServer,
        service: OnlineLearningService,
        settings: OnlineSettings,
        source: SnapshotSource,
    ) -> None:
        live = source.snapshots.read_live_version()
        try:
            loaded = source.load_snapshot(live)
        except PosttrainError as error:
            if not live:
                raise
            log.error(
                "snapshot %d cannot be served (%s): the model that the service began with is",
                live,
                error,
            )
            loaded = source.load_snapshot(None)
        journal = FeedbackJournal(server.folder / "feedback.jsonl")
        server.voting = settings.voting
        server.attach_answer_sink(service.answers, LearningFeedback(service.answers, journal))
        server.start_serving(loaded)
        service.start_processes(server)

    def check_champion(self) -> None:
        """Say once where the registry has another champion than this service has made."""
        assert self.service is not None
        found = self._source.find_version()
        facts = self.service.folder.facts
        if (
            found is None
            or str(found.version) == str(facts.get("version"))
            or self._is_learned_here(found, facts)
        ):
            return
        if found.version != self._warned_version:
            self._warned_version = found.version
            self.service.record_event(
                "champion",
                f"version {found.version} is the champion now, and was not learned here; the service goes on with what "
                f"it learned from version {facts.get('version')}. Restart the server to begin anew from it",
            )

    def stop_learning(self) -> None:
        """End learning."""
        with self._guard:
            service, self.service = self.service, None
        if service is not None:
            service.__exit__(None, None, None)

    def _resolve_folder(self, version: ModelVersion | None) -> LearningFolder:
        """The service's folder: that of the lineage of a champion which was learned here, else one of its own."""
        if version is not None and (base := version.tags.get(BASE_TAG)):
            for path in sorted(self._plan.root.glob("*")):
                facts = read_service_facts(path)
                if facts.get("model_sha256") == base:
                    return LearningFolder(path, facts)
        source = self._source.resolve_folder(version)
        if isinstance(source, str):
            raise SettingsError(
                f"--learn: {source} is a name of the hub; learning needs a folder (download it, and name that)"
            )
        name = (
            f"version-{version.version}"
            if version is not None
            else f"model-{digest_folder(source)[:12]}"
        )
        facts = {"name": self._name, "reference": self._source.reference}
        facts |= (
            {"version": version.version, "registered": version.name} if version is not None else {}
        )
        return LearningFolder.open_or_create(self._plan.root / name, source, facts)

    @staticmethod
    def _is_learned_here(version: ModelVersion, facts: dict[str, object]) -> bool:
        return version.tags.get(BASE_TAG) == facts.get("model_sha256")

    def _start_tracking_run(
        self, folder: LearningFolder, settings: OnlineSettings
    ) -> OnlineTrackingRun:
        tracking = Tracking(self._source.tracking_uri, self._source.output, self._plan.experiment)
        return OnlineTrackingRun(tracking, folder, settings, self._name, self._plan.alerts)
