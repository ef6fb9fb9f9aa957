"""Learning beside serving: answers into the log, worker and gate kept running, snapshots taken over, numbers told."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flows.online.learning_folder import LearningFolder
from flows.online.service_run import ServiceRun
from flows.online.supervised_process import Standby, SupervisedProcess
from flows.serving.chat_server import ChatServer
from flows.serving.feedback_journal import FeedbackJournal
from flows.serving.snapshot_source import SnapshotSource, SnapshotWatch
from rl_core.errors import PosttrainError
from rl_core.inference.served_answers import FeedbackLabel
from rl_core.online.answer_log import AnswerLog
from rl_core.online.assembly import BUFFER, online_environment
from rl_core.online.service_files import GATE, METRICS, OPERATOR, file_state, read_gate, read_object
from rl_core.settings import OnlineSettings

__all__ = ["LearningFeedback", "LearningService"]

log = logging.getLogger(__name__)

TICK_SECONDS = 0.1


class LearningFeedback:
    """Labels of answers that are learned from go into the log, all of them into the journal."""

    def __init__(self, answers: AnswerLog, journal: FeedbackJournal) -> None:
        self._answers, self._journal = answers, journal

    def accept(self, answer_id: str, choice: int, label: FeedbackLabel) -> None:
        """See `FeedbackSink`."""
        if self._answers.knows(answer_id):
            self._answers.accept(answer_id, choice, label)
        self._journal.accept(answer_id, choice, label)


class LearningService:
    """Everything beside the answers; a context manager. `start` once the server has a model."""

    def __init__(self, folder: LearningFolder, settings: OnlineSettings, source: SnapshotSource,
                 make_run: Callable[[], ServiceRun]) -> None:  # fmt: skip
        """make_run: starts the MLflow run; called on a thread, as the store may be slow."""
        self.folder, self.settings, self.source, self._make_run = folder, settings, source, make_run
        self.answers = AnswerLog(folder.path / BUFFER, settings, online_environment(settings.environment))
        self.server: ChatServer | None = None
        self.watch: SnapshotWatch | None = None
        self.processes: list[SupervisedProcess] = []
        self.standby: Standby | None = None
        self._orders_taken = folder.orders_taken
        self._seen: Any = ()  # states of the files with orders, when they were read last
        self._decisions: int | None = None  # told so far; None = those of before are no news
        self._paused = ""
        self._is_full = False
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> LearningService:
        self.answers.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._is_over.set()
        if self.watch is not None:
            self.watch.stop()
        for thread in self._threads:
            thread.join(30)
        if self.standby is not None:
            self.standby.stop()
        for process in self.processes:
            process.stop()
        self.answers.__exit__(None, None, None)

    def start(self, server: ChatServer) -> None:
        """Begin to watch and learn."""
        assert server.model is not None
        self.server = server
        path = self.folder.write_settings(self.settings)
        own = [sys.executable, "-P", "-m", "flows.cli.main", "online"]  # -P: nothing of the current folder
        if self.settings.service.standby:
            self.standby = Standby([*own, "standby", str(path), "--heartbeat"], self.folder.path / "standby.log")
        parts = ["worker"]
        if self.settings.service.run_gate and self.answers.environment is not None:
            parts.append("gate")
        self.processes = [
            SupervisedProcess(
                part, [*own, part, str(path), "--heartbeat"],
                self.folder.path / f"{part}.log", tell=lambda text: self.tell("restart", text), standby=self.standby,
            )
            for part in parts
        ]  # fmt: skip
        self.watch = SnapshotWatch(self.source, server.publish, server.model.version, self.tell)
        self.watch.start()
        self._threads = [
            threading.Thread(target=self._supervise, name="serving-learning", daemon=True),
            threading.Thread(target=self._track, name="serving-numbers", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def tell(self, kind: str, text: str) -> None:
        """Note an event; a disk that refuses costs the note."""
        try:
            self.folder.note(kind, text)
        except PosttrainError as error:
            log.warning("not noted: %s (%s)", text, error)

    # Supervision

    def _supervise(self) -> None:
        while not self._is_over.wait(TICK_SECONDS):
            for process in self.processes:
                process.step()
            try:
                if self.standby is not None and all(process.is_up for process in self.processes):
                    self.standby.keep()  # once the others have started: it would take their processor time
                self._hand_orders()
                self._look_at_alarms()
                self._look_at_log()
            except PosttrainError as error:
                log.warning("%s", error)
            except Exception:
                log.exception("the service's files could not be looked at")

    def _hand_orders(self) -> None:
        """Orders of gate and person into the worker's log, each at most once; the gate's decisions into the record."""
        seen = [file_state(self.folder.path / name) for name in (GATE, OPERATOR)]
        if seen == self._seen:  # late in a service's life the gate's file takes milliseconds to read
            return
        self._seen = seen
        gate = read_gate(self.folder.path)
        decisions = gate.get("decisions", [])
        newest = decisions[-1]["number"] if decisions else 0
        for decision in decisions if self._decisions is not None else ():
            if decision["number"] > self._decisions:
                self.tell(decision["verdict"], f"snapshot {decision['version']}: {decision['reason']}")
        self._decisions = newest
        self._give({GATE: gate.get("orders", []), OPERATOR: read_object(self.folder.path / OPERATOR).get("orders", [])})

    def _give(self, orders: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Hand the orders over that are new, by the file they stand in."""
        new = []
        for name, entries in orders.items():
            last = self._orders_taken[name]
            if entries and entries[-1]["number"] < last:  # the file was removed, and its numbers begin anew
                last = 0
            found = [entry for entry in entries if entry["number"] > last]
            if found:
                self._orders_taken[name] = found[-1]["number"]
                new += [entry["order"] for entry in found]
        if new:
            self.folder.take_orders(self._orders_taken)
            self.answers.order(new)

    def _look_at_alarms(self) -> None:
        paused = str(self.worker_numbers().get("paused", ""))
        if paused != self._paused:
            self._paused = paused
            hint = f"; `posttrain online resume {self.folder.path}` has it go on"
            self.tell("alarm" if paused else "resumed", paused + hint if paused else "learning goes on")

    def _look_at_log(self) -> None:
        """Say once that the record takes nothing more, so that nothing new is learned."""
        if not self._is_full and (self.answers.counts["full"] or self.answers.counts["labels_full"]):
            self._is_full = True
            size = self.settings.buffer.max_bytes
            self.tell("full", f"the buffer's record has its {size:,} bytes: nothing new is learned. Raise "
                      "online.buffer.max_bytes, or set online.buffer.keep_segments=false, and restart")  # fmt: skip

    def worker_numbers(self) -> dict[str, Any]:
        """The worker's newest numbers; {} before the first."""
        return read_object(self.folder.path / METRICS)

    # Numbers

    def _track(self) -> None:
        run, told = None, ""
        try:
            run = self._make_run()
        except Exception as error:
            log.warning("the service has no MLflow run: %s", error)
        due = time.monotonic()
        while not self._is_over.wait(TICK_SECONDS):
            if time.monotonic() < due and told == self._paused:
                continue
            due = time.monotonic() + self.settings.service.metrics_seconds
            told = self._paused
            if run is not None:
                run.log(self.metrics(), told)
        if run is not None:
            run.log(self.metrics(), self._paused)
            run.close()

    def metrics(self) -> dict[str, float]:
        """All numbers of the service, by metric name."""
        assert self.server is not None and self.server.answering is not None
        numbers = {k: float(v) for k, v in self.worker_numbers().items() if isinstance(v, int | float)}
        state = self.server.answering.loop.state
        own = {
            "online/serving_version": float(state.policy_version),
            "online/queue_depth": float(state.waiting),
            "online/active": float(state.active),
            **{f"online/restarts/{process.name}": float(process.restarts) for process in self.processes},
            **{f"online/up/{process.name}": float(process.is_up) for process in self.processes},
        }
        gate = {k: float(v) for k, v in read_gate(self.folder.path).get("metrics", {}).items()}
        return numbers | gate | self.answers.metrics() | self.server.metrics.recent() | own
