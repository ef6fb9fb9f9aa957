"""Runs of an output folder: stages, progress, and liveness of their processes.

<output>/<pipeline>/run.json, .lock                  the newest run and its process
<output>/<pipeline>/runs/<started>/                  journal of a pipeline run
<output>/<pipeline>/sweeps/<sweep>/trials/<trial>/   run.json, .lock and runs/ of a trial, which shares the stages below
<output>/<pipeline>/stages/<stage>/<key>.tracking/   journal of a stage; its files are in <key>.open/ and <key>/
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

from posttrain.monitor.run_notes import RunNotes
from posttrain.monitor.series import MetricSeries, MetricSeriesTable
from posttrain.monitor.tail import JsonLinesTail, read_json_object
from tasks.run_status import STALE_STOP_TAGS, describe_run_status
from tasks.tracking.values import replace_sentence

RECENT_SECONDS = 30.0  # a journal modified this recently belongs to a live run
# Without a record for this long a run is suspicious: by default machine load is recorded every few seconds.
SILENT_SECONDS = 600.0
# Stages that have not begun, of a running run and of one that is over.
STATUS_PENDING, STATUS_NOT_RUN = "to come", "not run"


class RunEvents:
    """State accumulated from events.jsonl: name, parent, parameters, tags, texts, start and end."""

    def __init__(self, folder: Path) -> None:
        self._tail = JsonLinesTail(folder / ".tracking" / "events.jsonl")
        self._clear_state()

    def _clear_state(self) -> None:
        self.name, self.parent, self.run_id = "", "", ""
        self.key = ""  # made when the run began; the short id consists of its first digits
        self.params: dict[str, str] = {}
        self.tags: dict[str, str] = {}
        # Cached stage -> (time of its first reuse, source run).
        self.cached: dict[str, tuple[float, str]] = {}
        self.texts: dict[str, Any] = {}  # config.json and curriculum.json, parsed
        self.started = self.ended = 0.0  # seconds since the epoch; of the newest start and end
        self.status = ""  # of the newest end; "" = running or killed
        self._restarts = self._tail.num_restarts

    @property
    def modified(self) -> float:
        """Modification time of the file; 0 = missing."""
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
        op, time_s = row["op"], float(row.get("time", 0)) / 1000
        if op == "start":
            self.name, self.parent = str(row["name"]), str(row.get("parent_folder") or "")
            self.key = str(row.get("key") or "")
            self.started, self.status = time_s, ""
        elif op == "resume":
            self.status, self.ended = "", 0.0
            for name in STALE_STOP_TAGS:
                self.tags.pop(name, None)
        elif op == "end":
            self.status, self.ended = describe_run_status(row["status"], self.tags), time_s
        elif op == "params":
            self.params |= row["params"]
        elif op == "tags":
            self.tags |= row["tags"]
            for name, value in row["tags"].items():
                if name.startswith("cached."):
                    # A resumed run repeats the tag after its stages: keep the first time.
                    label = name.removeprefix("cached.")
                    first_time_s, _ = self.cached.get(label, (time_s, ""))
                    self.cached[label] = (first_time_s, value)
        elif op == "text" and row["name"] in ("config.json", "curriculum.json"):
            self.texts[row["name"]] = json.loads(row["text"])


class RunJournal:
    """One tracking folder: events and metrics of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events = RunEvents(folder)
        self.table = MetricSeriesTable()
        self.tail = JsonLinesTail(folder / "metrics.jsonl")
        self._restarts = 0

    def read_new_metrics(self) -> None:
        """Read new metrics; start over if the file was replaced."""
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
        progress = read_json_object(self.folder / ".tracking" / "progress.json")
        try:
            message = str(progress.get("message", ""))
            return float(progress["done"]), float(progress["total"]), message
        except (KeyError, TypeError, ValueError):
            return 0.0, 0.0, ""

    def read_elapsed_seconds(self, *, is_live: bool) -> float | None:
        """Read the time that all processes of the run have spent on it; None = not recorded."""
        progress = read_json_object(self.folder / ".tracking" / "progress.json")
        try:
            recorded_at = float(progress["time"]) / 1000
            since_then = max(0.0, time.time() - recorded_at) if is_live else 0.0
            return float(progress["seconds"]) + since_then
        except (KeyError, TypeError, ValueError):
            return None


@dataclass
class StageView:
    """One stage of one run, as of the last refresh."""

    label: str  # as in the pipeline: sft, reward_model, policy
    status: (
        str  # STATUS_PENDING, running, finished, failed, stopped, killed, cached, STATUS_NOT_RUN
    )
    journal: RunJournal | None = None
    folder: Path | None = None  # output folder; None = none yet
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
    # Moves: kind, iteration, from, to, why, metrics.
    curriculum: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class RunView:
    """One run of a pipeline, as of the last refresh."""

    id: str
    group: str  # its pipeline; of a trial also its sweep and its trial: demo · 7a75cdb394 · 0000-s1
    started_text: str
    status: str  # running, silent, waiting, postponed, finished, failed, stopped, killed
    status_reason: str = ""  # explanation of the status, if needed
    started: float = 0.0
    ended: float = 0.0
    seconds: float | None = None  # spent on it so far, in all processes; None = not recorded
    modified: float = 0.0  # time of the last record
    pid: int = 0
    run_id: str = ""  # assigned by MLflow
    flow_run_id: str = ""  # assigned by Prefect
    short_id: str = ""  # demo-7f3a; "" = the files no longer exist
    result: str = ""
    # Of an approval: the text `before` the answer, and the text `now`.
    approval_answer: Mapping[str, Any] = field(default_factory=dict)
    stages: list[StageView] = field(default_factory=list)
    system: MetricSeriesTable = field(default_factory=MetricSeriesTable)
    config: dict[str, Any] = field(default_factory=dict)
    source: str = "files"  # or mlflow, if the files no longer exist
    output: Path = Path("outputs")  # that contains the pipeline's folder
    folder: Path | None = None  # of its journal; None = only MLflow's store has the run
    notes: RunNotes = field(default_factory=RunNotes)

    @property
    def title(self) -> str:
        """Title in lists."""
        tags = "".join(f" #{tag}" for tag in self.notes.tags)
        return f"{self.short_id or self.group} · {self.started_text} · {self.status}{tags}"

    @property
    def is_over(self) -> bool:
        """True = the run has ended."""
        return self.status in ("finished", "postponed", "failed", "stopped", "killed")

    @property
    def has_process_ended(self) -> bool:
        """True = its process has reported its end: the run is over, or waits for a person's approval."""
        return self.is_over or self.status == "waiting"

    def find_stage(self, label: str) -> StageView | None:
        """Find a stage by name; "" = the training stage, else the last that trained."""
        if label:
            return next((stage for stage in self.stages if stage.label == label), None)
        trained = [
            stage
            for stage in self.stages
            if any(series.count > 2 for series in _list_training_series(stage.table))
        ]
        running = [stage for stage in trained if stage.status == "running"]
        with_rewards = [stage for stage in trained if "reward/mean" in stage.table.series]
        begun = [
            stage for stage in self.stages if stage.status not in (STATUS_PENDING, STATUS_NOT_RUN)
        ]
        candidates = running or with_rewards or trained or begun or self.stages[:1]
        return candidates[-1] if candidates else None


def _list_training_series(table: MetricSeriesTable) -> list[MetricSeries]:
    prefixes = ("train/", "reward/")
    return [series for name, series in table.series.items() if name.startswith(prefixes)]


def read_run_path(run_folder: Path) -> tuple[str, ...]:
    """Return the path of a run in its pipeline: (started,), or (sweep, trial, started) of a sweep's trial."""
    parts = run_folder.parts
    if len(parts) > 6 and parts[-6] == "sweeps" and parts[-4] == "trials":
        return parts[-5], parts[-3], parts[-1]
    return (run_folder.name,)


def build_run_id(run_folder: Path) -> str:
    """Build the id of a run of the output folder: PIPELINE/STARTED, or PIPELINE/SWEEP/TRIAL/STARTED."""
    path = read_run_path(run_folder)
    pipeline_folder = run_folder.parents[1 if len(path) == 1 else 5]
    return "/".join((pipeline_folder.name, *path))


def build_run_folder(output: Path, identity: str) -> Path:
    """Return the folder of the run with this id: the inverse of `build_run_id`."""
    pipeline, *home, started = identity.split("/") if "/" in identity else (identity, "")
    if len(home) == 2:
        return output / pipeline / "sweeps" / home[0] / "trials" / home[1] / "runs" / started
    return output / pipeline / "runs" / started


def is_process_alive(pid: int, since: float) -> bool:
    """Return whether a process runs here and started before `since` (seconds since the epoch), as pids are reused."""
    try:
        process = psutil.Process(pid)
        return process.create_time() <= since + 2.0 and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, ValueError, OverflowError):
        return False


def insert_approval_answer(text: str, approval_answer: Mapping[str, Any]) -> str:
    """Replace the question in the text of a run that waited for an approval by the answer."""
    before, now = approval_answer.get("before"), approval_answer.get("now")
    if isinstance(before, str) and isinstance(now, str) and before:
        return replace_sentence(text, before, now, text)
    return text


def determine_run_status(
    events: RunEvents, record: Mapping[str, Any], record_modified: float, modified: float
) -> tuple[str, str]:
    """Determine the status of a pipeline run and its reason: the recorded end, else the liveness of its process.

    Args:
        record: run.json if it describes this run, else {}.
        record_modified: modification time of run.json, in seconds since the epoch.
        modified: time of the last record in any of its journals.
    """
    if events.status:
        return events.status, events.tags.get("error", "") if events.status != "finished" else ""
    silence_s = max(0.0, time.time() - modified)
    minutes = f"{silence_s / 60:.0f} minutes"
    host, pid = str(record.get("host", "")), record.get("pid")
    if host and host != platform.node():
        if silence_s < SILENT_SECONDS:
            return "running", f"on {host}"
        return "silent", f"it runs on {host}, from where nothing has arrived for {minutes}"
    if isinstance(pid, int) and is_process_alive(pid, record_modified):
        if silence_s < SILENT_SECONDS:
            return "running", ""
        return "silent", f"process {pid} is alive, but nothing was recorded for {minutes}"
    if not record and silence_s < RECENT_SECONDS:
        return "running", ""  # it has just begun: run.json is written shortly after the journal
    process = f"Process {pid}" if pid else "Its process"
    reason = f"{process} no longer exists; it was killed"
    return "killed", f"{reason}. The same command resumes from the last checkpoint."


def estimate_seconds_left(stage: StageView, now: float) -> float | None:
    """Estimate the remaining seconds at the recent pace; None = unknown.

    The pace is that of the last fifth of the steps (at least 5), which adapts quickly to a slower phase.
    """
    if stage.status != "running" or stage.total <= 0 or stage.done <= 0:
        return None
    steps_left = max(0.0, stage.total - stage.done)
    long_series = [series for series in _list_training_series(stage.table) if series.count > 2]
    if long_series and stage.total > 1:
        _, times, _ = long_series[0].read_arrays()
        recent = times[-max(5, len(times) // 5) :]
        if len(recent) > 1 and recent[-1] > recent[0]:
            seconds_per_point = float(recent[-1] - recent[0]) / (len(recent) - 1)
            steps_per_point = stage.done / max(1, len(times))
            return steps_left * seconds_per_point / steps_per_point
    elapsed = stage.seconds if stage.seconds is not None else now - stage.started
    return steps_left * elapsed / stage.done if stage.started else None
