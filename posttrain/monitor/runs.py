"""Runs of an output folder: stages, progress, and liveness of their processes.

<output>/<pipeline>/run.json, .lock           the newest run and its process
<output>/<pipeline>/runs/<started>/           journal of a pipeline run
<output>/<pipeline>/stages/<stage>/<key>.tracking/   journal of a stage; <key>.open/ and <key>/ hold its files
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from posttrain.monitor.series import MetricSeriesTable
from posttrain.monitor.tail import JsonLinesTail, read_json_object
from tasks.run_status import STALE_STOP_TAGS, describe_run_status
from tasks.tracking.values import replace_sentence

RECENT_SECONDS = 30.0  # a journal modified this recently belongs to a live run
SILENT_SECONDS = (
    600.0  # silence that is suspicious, as machine load is recorded every few seconds by default
)


class RunEvents:
    """State accumulated from events.jsonl: name, parent, parameters, tags, texts, start and end."""

    def __init__(self, folder: Path) -> None:
        self._tail = JsonLinesTail(folder / ".tracking" / "events.jsonl")
        self._clear_state()

    def _clear_state(self) -> None:
        self.name, self.parent, self.run_id = "", "", ""
        self.params: dict[str, str] = {}
        self.tags: dict[str, str] = {}
        self.cached: dict[
            str, tuple[float, str]
        ] = {}  # cached stage -> (time of first reuse, source run)
        self.texts: dict[str, Any] = {}  # config.json and curriculum.json, parsed
        self.started = self.ended = 0.0  # seconds since the epoch; of the newest start and end
        self.status = ""  # of the newest end; "" = running, or killed
        self._restarts = self._tail.num_restarts

    @property
    def modified(self) -> float:
        """Modification time of the file; 0 = absent."""
        return self._tail.modified

    def read_new_events(self) -> None:
        """Read new events."""
        rows = self._tail.read_rows()
        if self._tail.num_restarts != self._restarts:
            self._clear_state()
        for row in rows:
            try:
                self._apply_event(row)
            except (TypeError, ValueError, AttributeError, KeyError):
                continue  # written by another version

    def _apply_event(self, row: Mapping[str, Any]) -> None:
        op, when = row["op"], float(row.get("time", 0)) / 1000
        if op == "start":
            self.name, self.parent = str(row["name"]), str(row.get("parent_folder") or "")
            self.started, self.status = when, ""
        elif op == "resume":
            self.status, self.ended = "", 0.0
            for name in STALE_STOP_TAGS:
                self.tags.pop(name, None)
        elif op == "end":
            self.status, self.ended = describe_run_status(row["status"], self.tags), when
        elif op == "params":
            self.params |= row["params"]
        elif op == "tags":
            self.tags |= row["tags"]
            for name, value in row["tags"].items():
                if name.startswith("cached."):
                    label = name.removeprefix("cached.")
                    first, _ = self.cached.get(
                        label, (when, "")
                    )  # repeated by a resumed run, after its own stages
                    self.cached[label] = (first, value)
        elif op == "text" and row["name"] in ("config.json", "curriculum.json"):
            self.texts[row["name"]] = json.loads(row["text"])


class RunJournal:
    """One tracking folder: its events and its metrics."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events = RunEvents(folder)
        self.table = MetricSeriesTable()
        self.tail = JsonLinesTail(folder / "metrics.jsonl")
        self._restarts = 0

    def read_new_metrics(self) -> None:
        """Read new metrics; from the start if the file was replaced."""
        rows = self.tail.read_rows()
        if self.tail.num_restarts != self._restarts:
            self.table, self._restarts = MetricSeriesTable(), self.tail.num_restarts
        self.table.add_rows(rows)

    @property
    def modified(self) -> float:
        """Time of the last write; 0 = never."""
        return max(self.tail.modified, self.events.modified)

    @property
    def progress(self) -> tuple[float, float, str]:
        """Latest reported (done, total, message); total 0 = never reported."""
        found = read_json_object(self.folder / ".tracking" / "progress.json")
        try:
            return float(found["done"]), float(found["total"]), str(found.get("message", ""))
        except (KeyError, TypeError, ValueError):
            return 0.0, 0.0, ""

    def read_elapsed_seconds(self, *, is_live: bool) -> float | None:
        """Time that all processes of the run have spent on it; None = it was not recorded."""
        found = read_json_object(self.folder / ".tracking" / "progress.json")
        try:
            since = max(0.0, time.time() - float(found["time"]) / 1000) if is_live else 0.0
            return float(found["seconds"]) + since
        except (KeyError, TypeError, ValueError):
            return None


STATUS_PENDING, STATUS_NOT_RUN = (
    "to come",
    "not run",
)  # stages that have not begun, of a run that goes on and of one that is over


@dataclass
class StageView:
    """One stage of one run, as of the last refresh."""

    label: str  # as in the pipeline: sft, reward_model, policy
    status: str  # TO_COME, running, finished, failed, stopped, killed, cached, NOT_RUN
    journal: RunJournal | None = None
    folder: Path | None = None  # its output folder; None = none yet
    started: float = 0.0
    ended: float = 0.0
    done: float = 0.0
    total: float = 0.0  # 0 = unknown
    message: str = ""
    result: str = ""  # result or error
    seconds: float | None = None  # spent on it so far, in all processes; None = not recorded
    seconds_left: float | None = None
    table: MetricSeriesTable = field(default_factory=MetricSeriesTable)
    params: dict[str, str] = field(default_factory=dict)
    curriculum: list[dict[str, Any]] = field(
        default_factory=list
    )  # moves: kind, iteration, from, to, why, metrics


@dataclass
class RunView:
    """One run of a pipeline, as of the last refresh."""

    id: str
    pipeline: str
    started_text: str
    status: str  # running, silent, waiting, postponed, finished, failed, stopped, killed
    status_reason: str = ""  # explanation of the status, if needed
    started: float = 0.0
    ended: float = 0.0
    seconds: float | None = None  # spent on it so far, in all processes; None = not recorded
    modified: float = 0.0  # last sign of life
    pid: int = 0
    run_id: str = ""  # MLflow's
    result: str = ""
    approval_answer: Mapping[str, Any] = field(
        default_factory=dict
    )  # of an approval: the words `before`, and those `now`
    stages: list[StageView] = field(default_factory=list)
    system: MetricSeriesTable = field(default_factory=MetricSeriesTable)
    config: dict[str, Any] = field(default_factory=dict)
    source: str = "files"  # or mlflow, where the files are gone
    output: Path = Path("outputs")  # the folder of its pipeline

    @property
    def title(self) -> str:
        """Title in lists."""
        return f"{self.pipeline} · {self.started_text} · {self.status}"

    @property
    def is_over(self) -> bool:
        """True if the run has ended."""
        return self.status in ("finished", "postponed", "failed", "stopped", "killed")

    def find_stage(self, label: str) -> StageView | None:
        """Stage by name; "" = the training one, else the last that trained."""
        if label:
            return next((stage for stage in self.stages if stage.label == label), None)
        trained = [
            s
            for s in self.stages
            if any(series.count > 2 for name, series in _list_training_series(s.table))
        ]
        running = [stage for stage in trained if stage.status == "running"]
        with_rewards = [stage for stage in trained if "reward/mean" in stage.table.series]
        begun = [
            stage for stage in self.stages if stage.status not in (STATUS_PENDING, STATUS_NOT_RUN)
        ]
        return (running or with_rewards or trained or begun or self.stages[:1] or [None])[-1]  # type: ignore[list-item]


def _list_training_series(table: MetricSeriesTable) -> list[tuple[str, Any]]:
    return [item for item in table.series.items() if item[0].startswith(("train/", "reward/"))]


def is_process_alive(pid: int, since: float) -> bool:
    """True if process `pid` runs here and started before `since` (seconds since the epoch), as pids are reused."""
    try:
        process = psutil.Process(pid)
        return process.create_time() <= since + 2.0 and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, ValueError, OverflowError):
        return False


def insert_approval_answer(text: str, approval_answer: Mapping[str, Any]) -> str:
    """The text of a run that waited for an approval, with the answer in place of the question."""
    before, now = approval_answer.get("before"), approval_answer.get("now")
    return (
        replace_sentence(text, before, now, text)
        if isinstance(before, str) and isinstance(now, str) and before
        else text
    )


def determine_run_status(
    events: RunEvents, record: Mapping[str, Any], record_modified: float, modified: float
) -> tuple[str, str]:
    """Status of a pipeline run with a reason: its final status, else by the liveness of its process.

    Args:
        record: run.json if it describes this run, else {}.
        written: modification time of run.json, in seconds since the epoch.
        modified: last sign of life in any of its journals.
    """
    if events.status:
        return events.status, events.tags.get("error", "") if events.status != "finished" else ""
    silence = max(0.0, time.time() - modified)
    host, pid = str(record.get("host", "")), record.get("pid")
    if host and host != platform.node():
        if silence < SILENT_SECONDS:
            return "running", f"on {host}"
        return (
            "silent",
            f"it runs on {host}, from where nothing has come for {silence / 60:.0f} minutes",
        )
    if isinstance(pid, int) and is_process_alive(pid, record_modified):
        if silence < SILENT_SECONDS:
            return "running", ""
        return (
            "silent",
            f"process {pid} lives, but nothing was recorded for {silence / 60:.0f} minutes",
        )
    if not record and silence < RECENT_SECONDS:
        return "running", ""  # it has just begun: run.json comes a moment after the journal
    who = f"Process {pid} is gone" if pid else "Its process is gone"
    return "killed", f"{who}; it was killed. The same command resumes from the last checkpoint."


def estimate_seconds_left(stage: StageView, now: float) -> float | None:
    """Remaining seconds at the recent pace; None = unknown.

    The pace is that of the last fifth of the steps (at least 5), which adapts quickly to a slower phase.
    """
    if stage.status != "running" or stage.total <= 0 or stage.done <= 0:
        return None
    left = max(0.0, stage.total - stage.done)
    found = next(
        (series for name, series in _list_training_series(stage.table) if series.count > 2), None
    )
    if found is not None and stage.total > 1:
        _, times, _ = found.read_arrays()
        recent = times[-max(5, len(times) // 5) :]
        if len(recent) > 1 and recent[-1] > recent[0]:
            per_point = float(recent[-1] - recent[0]) / (len(recent) - 1)
            steps_per_point = stage.done / max(1, len(times))
            return left * per_point / steps_per_point
    elapsed = stage.seconds if stage.seconds is not None else now - stage.started
    return left * elapsed / stage.done if stage.started else None
