"""Online learning of a server: records answers, runs worker and gate, publishes snapshots, tracks metrics.

`OnlineLearner` picks the initial model and the service's folder, and attaches an `OnlineLearningService` to the server.
"""

from __future__ import annotations

import dataclasses
import logging
import shlex
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

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
from rl_core.processes.heartbeats import HeartbeatProcess, StandbyProcess
from rl_core.settings import (
    EnvironmentSettings,
    ModelSettings,
    OnlineSettings,
    PolicySettings,
    ServingSettings,
)
from rl_core.storage.manifest import digest_folder
from tasks.tracking import ModelVersion, Tracking
from tasks.tracking.extra_trackers import build_alert_tracker

log = logging.getLogger(__name__)

SUPERVISION_SECONDS = 0.1
# Tag of a registered version that was learned online: digest of the model with which the service began.
BASE_TAG = "online.base_sha256"


@dataclass(frozen=True, slots=True)
class OnlineLearningPlan:
    """Settings that learning needs in addition to those of serving."""

    online: OnlineSettings
    root: Path  # folder of the pipeline's services, one per initial model
    environment: EnvironmentSettings
    experiment: str
    alerts: dict[str, str]
    policy: PolicySettings | None = None  # the stage whose rewards online learning follows


class OnlineLearner:
    """Learner that attaches a learning service to a server once there is a model."""

    def __init__(
        self,
        plan: OnlineLearningPlan,
        source: ModelSource,
        serving: ServingSettings,
        model: ModelSettings,
        name: str,
    ) -> None:
        self._plan, self._source, self._serving = plan, source, serving
        self._model, self._name = model, name
        self.service: OnlineLearningService | None = None
        self._guard = threading.Lock()
        self._warned_version: int | None = None

    def start_learning(self, server: ChatServer) -> None:
        """Load the live snapshot, serve it, and learn.

        Raises: NoChampion; SettingsError for inconsistent settings; FolderBusy if another server learns in the folder.
        """
        folder = self._resolve_folder(self._source.find_version())
        settings = build_pipeline_settings(
            self._plan.online,
            self._plan.environment,
            self._model,
            folder.path,
            self._plan.policy,
        )
        source = SnapshotSource(settings, self._serving, int(folder.facts.get("version") or 0))
        start_run = partial(self._start_tracking_run, folder, settings)
        service = OnlineLearningService(folder, settings, source, start_run)
        with self._guard:
            service.__enter__()
            self.service = service
        try:
            self._attach_service(server, service, settings, source)
        except BaseException:  # the caller retries, and must not find the folder busy
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
            served = source.load_snapshot(live)
        except PosttrainError as error:
            if not live:
                raise
            log.error(
                "snapshot %d cannot be served (%s); serving the model with which the service began",
                live,
                error,
            )
            served = source.load_snapshot(None)
        journal = FeedbackJournal(server.folder / "feedback.jsonl")
        server.voting = settings.voting
        server.attach_answer_sink(service.answers, LearningFeedback(service.answers, journal))
        server.start_serving(served)
        service.start_processes(server)

    def check_champion(self) -> None:
        """Record an event, once per version, if the registry's champion was not learned by this service."""
        assert self.service is not None
        champion = self._source.find_version()
        if champion is None:
            return
        facts = self.service.folder.facts
        is_base = str(champion.version) == str(facts.get("version"))
        is_learned_here = champion.tags.get(BASE_TAG) == facts.get("model_sha256")
        if is_base or is_learned_here or champion.version == self._warned_version:
            return
        self._warned_version = champion.version
        self.service.record_event(
            "champion",
            f"version {champion.version} is the champion now, and was not learned here; the service continues with "
            f"what it learned from version {facts.get('version')}. Restart the server to start over from the new "
            "champion",
        )

    def stop_learning(self) -> None:
        """Stop the learning service."""
        with self._guard:
            service, self.service = self.service, None
        if service is not None:
            service.__exit__(None, None, None)

    def _resolve_folder(self, version: ModelVersion | None) -> LearningFolder:
        """Return the service's folder: the one in which the champion was learned, or a folder per initial model."""
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
        facts = {"name": self._name, "reference": self._source.reference}
        if version is None:
            name = f"model-{digest_folder(source)[:12]}"
        else:
            name = f"version-{version.version}"
            facts |= {"version": version.version, "registered": version.name}
        return LearningFolder.open_or_create(self._plan.root / name, source, facts)

    def _start_tracking_run(
        self, folder: LearningFolder, settings: OnlineSettings
    ) -> OnlineTrackingRun:
        tracking = Tracking(self._source.tracking_uri, self._source.output, self._plan.experiment)
        return OnlineTrackingRun(tracking, folder, settings, self._name, self._plan.alerts)


class OnlineTrackingRun:
    """The MLflow run of a learning service: one for its whole life, restarts included.

    The step is the number of seconds since the service began.
    """

    def __init__(
        self,
        tracking: Tracking,
        folder: LearningFolder,
        settings: OnlineSettings,
        name: str,
        alerts: Mapping[str, str],
    ) -> None:
        """Start or resume the run. `alerts`: conditions on metrics; a pause of learning always alerts."""
        facts = folder.facts
        tags = {
            "online.service": str(folder.path),
            BASE_TAG: facts["model_sha256"],
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
        """Record all metrics and the current alarm; "" = none."""
        self._last = max(self._last + 1, int(time.time() - self._began))
        self._run.log_metrics(metrics, self._last)
        if alarm != self._alarm:
            self._alarm = alarm
            self._run.set_tag("online.alarm", alarm or "none")

    def close_run(self) -> None:
        """Close the run; the service resumes it at its next start."""
        self._run.close(timeout_s=5.0)


class LearningFeedback:
    """Feedback sink that writes every label to the journal, and those of recorded answers to the buffer as well."""

    def __init__(self, answers: ExperienceWriter, journal: FeedbackJournal) -> None:
        self._answers, self._journal = answers, journal

    def accept_label(self, answer_id: str, choice: int, label: FeedbackLabel) -> None:
        """Write a label; see `FeedbackSink`."""
        if self._answers.knows(answer_id):
            self._answers.accept_label(answer_id, choice, label)
        self._journal.accept_label(answer_id, choice, label)


class OnlineLearningService:
    """Answer buffer, supervised worker and gate, snapshot watcher and metrics of a server that learns.

    A context manager; call `start_processes` once the server has a model.
    """

    def __init__(
        self,
        folder: LearningFolder,
        settings: OnlineSettings,
        source: SnapshotSource,
        make_run: Callable[[], OnlineTrackingRun],
    ) -> None:
        """Open the buffer. `make_run` starts the MLflow run, on a thread, because the store may be slow."""
        self.folder, self.settings, self.source, self._make_run = folder, settings, source, make_run
        self.answers = ExperienceWriter(
            folder.path / BUFFER_FOLDER, settings, create_online_environment(settings.environment)
        )
        self.server: ChatServer | None = None
        self.snapshot_watcher: SnapshotWatcher | None = None
        self.processes: list[HeartbeatProcess] = []
        self.standby: StandbyProcess | None = None
        self._forwarded_orders = folder.forwarded_orders
        self._file_states: Any = ()  # identities of the order files when they were last read
        # Newest decision that was recorded; None = the gate's file was not read yet, and its decisions are old.
        self._last_decision: int | None = None
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
        """Start worker, gate and standby process, and the threads that supervise them."""
        assert server.model is not None
        self.server = server
        settings_path = str(self.folder.write_settings(self.settings))
        # -P: nothing is imported from the current folder.
        command = [sys.executable, "-P", "-m", "posttrain.cli.main", "online"]
        if self.settings.service.standby:
            self.standby = StandbyProcess(
                [*command, "standby", settings_path, "--heartbeat"],
                self.folder.path / "standby.log",
            )
        roles = ["worker"]
        if self.settings.service.run_gate and self.answers.environment is not None:
            roles.append("gate")
        self.processes = [
            HeartbeatProcess(
                role,
                [*command, role, settings_path, "--heartbeat"],
                self.folder.path / f"{role}.log",
                report_exit=partial(self.record_event, "restart"),
                standby=self.standby,
            )
            for role in roles
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
        """Append an event to the service's folder; a failing disk loses only the event."""
        try:
            self.folder.append_event(kind, text)
        except PosttrainError as error:
            log.warning("not recorded: %s (%s)", text, error)

    def _run_supervision(self) -> None:
        while not self._stop_event.wait(SUPERVISION_SECONDS):
            for process in self.processes:
                process.step(time.monotonic())
            try:
                if self.standby is not None and all(process.is_up for process in self.processes):
                    # Not before the others are up: it would take their processor time.
                    self.standby.ensure_started()
                self._forward_orders()
                self._check_alarms()
                self._check_log_capacity()
            except PosttrainError as error:
                log.warning("%s", error)
            except Exception:
                log.exception("the service's files could not be checked")

    def _forward_orders(self) -> None:
        """Forward new orders of gate and operator to the worker's log, each at most once; record new decisions."""
        states = [
            read_file_identity(self.folder.path / name) for name in (GATE_FILE, OPERATOR_FILE)
        ]
        if states == self._file_states:  # late in a service's life the gate's file takes ms to read
            return
        self._file_states = states
        gate = read_gate_state(self.folder.path)
        decisions = gate.get("decisions", [])
        newest = decisions[-1]["number"] if decisions else 0
        for decision in decisions if self._last_decision is not None else ():
            if decision["number"] > self._last_decision:
                self.record_event(
                    decision["verdict"], f"snapshot {decision['version']}: {decision['reason']}"
                )
        self._last_decision = newest
        operator = read_json_object(self.folder.path / OPERATOR_FILE)
        self._append_new_orders(
            {GATE_FILE: gate.get("orders", []), OPERATOR_FILE: operator.get("orders", [])}
        )

    def _append_new_orders(self, orders: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Append the orders that were not forwarded yet. `orders`: entries by file name."""
        new_orders = []
        for name, entries in orders.items():
            last = self._forwarded_orders[name]
            if entries and entries[-1]["number"] < last:
                last = 0  # the file was removed, so its numbers start over
            new_entries = [entry for entry in entries if entry["number"] > last]
            if new_entries:
                self._forwarded_orders[name] = new_entries[-1]["number"]
                new_orders += [entry["order"] for entry in new_entries]
        if new_orders:
            self.folder.record_forwarded_orders(self._forwarded_orders)
            self.answers.append_orders(new_orders)

    def _check_alarms(self) -> None:
        paused = str(self.read_worker_metrics().get("paused", ""))
        if paused == self._paused:
            return
        self._paused = paused
        if paused:
            folder = shlex.quote(str(self.folder.path))
            hint = f"`posttrain online resume {folder}` resumes learning"
            self.record_event("alarm", f"{paused}; {hint}")
        else:
            self.record_event("resumed", "learning has resumed")

    def _check_log_capacity(self) -> None:
        """Record an event once the buffer's log is full, after which nothing new is learned."""
        counts = self.answers.counts
        if self._is_full or not (counts["full"] or counts["labels_full"]):
            return
        self._is_full = True
        size = self.settings.buffer.max_bytes
        self.record_event(
            "full",
            f"the buffer's record has its {size:,} bytes: nothing new is learned. Raise "
            "online.buffer.max_bytes, or set online.buffer.keep_segments=false, and restart",
        )

    def read_worker_metrics(self) -> dict[str, Any]:
        """Read the worker's newest metrics; {} before the first."""
        return read_json_object(self.folder.path / METRICS_FILE)

    def _track_metrics(self) -> None:
        run, logged_alarm = None, ""
        try:
            run = self._make_run()
        except Exception as error:
            log.warning("the service has no MLflow run: %s", error)
        due = time.monotonic()
        while not self._stop_event.wait(SUPERVISION_SECONDS):
            if time.monotonic() < due and logged_alarm == self._paused:
                continue
            due = time.monotonic() + self.settings.service.metrics_seconds
            logged_alarm = self._paused
            if run is not None:
                run.log_metrics(self.collect_metrics(), logged_alarm)
        if run is not None:
            run.log_metrics(self.collect_metrics(), self._paused)
            run.close_run()

    def collect_metrics(self) -> dict[str, float]:
        """Collect all metrics of the service by name."""
        assert self.server is not None and self.server.engine is not None
        worker = {
            name: float(value)
            for name, value in self.read_worker_metrics().items()
            if isinstance(value, int | float)
        }
        gate_metrics = read_gate_state(self.folder.path).get("metrics", {})
        gate = {name: float(value) for name, value in gate_metrics.items()}
        state = self.server.engine.loop.state
        serving = {
            "online/serving_version": float(state.policy_version),
            "online/queue_depth": float(state.waiting),
            "online/active": float(state.active),
        }
        for process in self.processes:
            serving[f"online/restarts/{process.name}"] = float(process.restarts)
            serving[f"online/up/{process.name}"] = float(process.is_up)
        answers = self.answers.collect_metrics()
        return worker | gate | answers | self.server.metrics.compute_recent_rates() | serving
