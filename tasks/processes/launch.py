"""File-based event channel from rank 0 to the stage's process: metrics, progress, tags and log lines.

A file survives the kill of either side. Its events reach the tracker before the stage is resumed, so that a
checkpoint never holds a step whose metrics are lost.

Launch of a stage in several processes under torchrun, supervised by the stage's own process and ended with it.

    <stage's open folder>/workers/
        job.json          what the processes need to know (tasks/pipeline/stage_worker.py reads it)
        events.jsonl      metrics, progress and log lines of the first process (tasks/processes/launch.py)
        pid-<host>-<rank> the processes
        stop              made to ask for a stop: the loop saves, then ends
        result.json       what the stage's body returned in the first process
        error-<rank>.json an exception, by whom
        agent.log, logs/  what torchrun and the processes printed

The folder is removed when the stage has finished. This process keeps the stage's lock, tracker and journal.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from rl_core.errors import CheckpointError, PosttrainError, Stopped, WorkerFailed
from rl_core.settings import LaunchSettings
from rl_core.storage.atomic_files import (
    make_folder,
    open_log_file,
    open_owned_file,
    write_json_atomic,
    write_text_unsynced,
)
from rl_core.storage.faults import inject_fault
from rl_core.storage.line_logs import encode_checked_line, read_checked_lines, report_damaged_line
from rl_core.tracking import Tracker, sync_tracker
from rl_core.training.signals import GRACE_SECONDS, IterationAborted, StopRequests
from rl_core.user_code import build_child_import_path
from tasks.config import PipelineSettings, dump_settings
from tasks.processes.child_processes import wait_for_exit


class EventTracker:
    """A Tracker that writes lines; every line is handed to the kernel before the call returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open_owned_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def send_event(self, op: str, **fields: Any) -> None:
        """One line."""
        line = encode_checked_line({"op": op, **fields}, allow_nan=True)
        # a full disk; the line that follows must not join it
        if (written := os.write(self._file, line)) < len(line):
            os.write(self._file, b"\n")
            raise CheckpointError(
                f"{self._path}: only {written} of {len(line)} bytes could be written; make room"
            )

    def sync(self) -> None:
        """Put all lines on the disk: a checkpoint that follows says that they were written."""
        os.fsync(self._file)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Scalars of one step."""
        self.send_event("metrics", metrics=dict(metrics), step=step)

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """A finished file or folder, which has to stay where it is."""
        self.send_event("artifact", path=str(path), folder=folder)

    def set_tag(self, name: str, value: str) -> None:
        """A short text."""
        self.send_event("tag", name=name, value=value)

    def log_dict(self, values: Mapping[str, Any], name: str) -> None:
        """A structure as a JSON artifact."""
        self.send_event("dict", values=dict(values), name=name)

    def progress(self, done: int, total: int, message: str = "") -> None:
        """Steps done, of `total`."""
        self.send_event("progress", done=done, total=total, message=message)


class EventLogHandler(logging.Handler):
    """Log records as lines of an EventTracker."""

    def __init__(self, events: EventTracker) -> None:
        super().__init__(logging.INFO)
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record's text."""
        self._events.send_event(
            "log", level=record.levelno, name=record.name, text=record.getMessage()
        )


class EventReader:
    """The reader's side: hands complete lines to a tracker, each once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_training = False  # whether the processes are in the training loop, which stops by itself when asked
        self._offset = 0

    def forward_events(self, tracker: Tracker, *, replay: bool = False) -> None:
        """Pass on the lines written since the last call; with `replay` (a run that ended) no progress, no logs."""
        for line in read_checked_lines(self.path, self._offset):
            self._offset = line.end
            if line.record is None:
                report_damaged_line(self.path, line)
            else:
                self._apply_event(line.record, tracker, replay)

    def _apply_event(self, event: dict[str, Any], tracker: Tracker, replay: bool) -> None:
        match event["op"]:
            case "metrics":
                tracker.log_metrics(event["metrics"], event["step"])
            case "tag":
                tracker.set_tag(event["name"], event["value"])
            case "dict":
                tracker.log_dict(event["values"], event["name"])
            case "artifact":
                tracker.log_artifact(Path(event["path"]), event["folder"])
            case "progress" if not replay:
                tracker.progress(event["done"], event["total"], event["message"])
            case "log" if not replay:
                logging.getLogger(event["name"]).log(event["level"], "%s", event["text"])
            case "training":
                self.is_training = event["on"]


logger = logging.getLogger(__name__)

WORKERS_FOLDER = "workers"
EVENTS_FILE = "events.jsonl"
POLL_S = 0.1
KILL_TIMEOUT_S = 10.0  # a killed process that still runs after this is stuck in the kernel
_MAX_OUTPUT_LINES = 15  # of what a process printed, in a message about its death
# torchrun's own; a stage that itself runs under torchrun must not hand them on
_TORCHRUN_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


class LaunchedStage(Protocol):
    """The part of a stage's context that its processes are started from."""

    @property
    def name(self) -> str:
        """The stage."""

    @property
    def folder(self) -> Path:
        """The folder that the stage writes into."""

    @property
    def settings(self) -> Any:
        """The stage's own settings; `launch` is one of them."""

    @property
    def pipeline(self) -> PipelineSettings:
        """Settings of the whole pipeline."""

    @property
    def inputs(self) -> Mapping[str, Path | str]:
        """Folders, or hub names of models, by the input's name."""

    @property
    def tracker(self) -> Tracker:
        """The stage's run."""

    @property
    def threads(self) -> int:
        """Number of threads, shared out among the processes of this machine."""

    @property
    def seed(self) -> int:
        """The stage's own seed."""

    @property
    def fingerprint(self) -> dict[str, str]:
        """Facts that have to be equal for a checkpoint to be resumed."""

    @property
    def allow_drift(self) -> bool | tuple[str, ...]:
        """Permission to resume although the fingerprint differs, everywhere or in these keys."""

    @property
    def stop(self) -> threading.Event:
        """Set when the stage has to save and stop."""


def run_in_workers(context: LaunchedStage, body: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Run a stage's body in the processes of its `launch` settings; returns rank 0's summary.

    Raises: the error of the process that failed first, as the type that it was; WorkerFailed where it has none of ours,
    or was killed; Stopped after a stop request, with everything saved if the loop was running.
    """
    folder = context.folder / WORKERS_FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    make_folder(folder)
    _write_job(folder, context, body)
    inject_fault("workers.job")
    settings: LaunchSettings = context.settings.launch
    context.tracker.set_tag(
        "launch", f"torchrun: {settings.nodes} x {settings.processes} processes"
    )
    events = EventReader(folder / EVENTS_FILE)
    # around the start, so that no signal comes between it and the `try`
    with StopRequests(context.stop) as stop:
        agent = _start_torchrun(settings, folder, context.threads)
        try:
            inject_fault("workers.started")
            asked = _wait_for_torchrun(agent, events, context.tracker, stop)
        except IterationAborted as given_up:
            raise Stopped(
                f"stopped within an iteration ({given_up}); the same command resumes",
                given_up.signum,
            ) from None
        except Stopped as late:
            _kill_torchrun(agent, folder)
            raise _find_stop_report(folder) or late from None
        finally:
            _kill_torchrun(agent, folder)
            events.forward_events(context.tracker)
    inject_fault("workers.ended")
    try:
        summary = _load_result(folder, agent.returncode)
    except WorkerFailed:
        raise  # what the processes printed stays for people to read
    except PosttrainError:
        shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)
    if asked is not None:  # it came when the last step was done
        raise Stopped("stopped after the last step; saved, the same command goes on", asked)
    return summary


def recover_events(folder: Path, tracker: Tracker) -> None:
    """Deliver, then remove, the events that an earlier run's processes left when they were killed with their stage."""
    EventReader(folder / WORKERS_FOLDER / EVENTS_FILE).forward_events(tracker, replay=True)
    sync_tracker(tracker)  # before the only copy goes
    shutil.rmtree(folder / WORKERS_FOLDER, ignore_errors=True)


def build_torchrun_arguments(settings: LaunchSettings, folder: Path) -> list[str]:
    """torchrun's arguments, the program to run included. One node meets on loopback, without a look at host names."""
    meeting = [f"--rdzv-endpoint={settings.rdzv_endpoint or '127.0.0.1:0'}"]
    if settings.nodes == 1:
        meeting.append("--local-addr=127.0.0.1")
    return [
        f"--nnodes={settings.nodes}",
        f"--nproc-per-node={settings.processes}",
        f"--rdzv-backend={settings.rdzv_backend}",
        f"--rdzv-id={settings.rdzv_id}",
        *meeting,
        "--max-restarts=0",  # the stage's own retries start from a checkpoint, with a tracker and a lock
        f"--log-dir={folder / 'logs'}",
        "--redirects=3",
        "-m",
        "tasks.pipeline.stage_worker",
        str(folder / "job.json"),
    ]


def _write_job(folder: Path, context: LaunchedStage, body: Callable[..., Any]) -> None:
    job = {
        "body": f"{body.__module__}:{body.__qualname__}",
        "name": context.name,
        "folder": str(context.folder),
        "pipeline": dump_settings(context.pipeline),
        "paths": {
            name: str(value) for name, value in context.inputs.items() if isinstance(value, Path)
        },
        "names": {name: value for name, value in context.inputs.items() if isinstance(value, str)},
        "seed": context.seed,
        "fingerprint": context.fingerprint,
        "allow_drift": context.allow_drift,
        "threads": context.threads,
    }
    write_json_atomic(folder / "job.json", job)


def _build_environment(threads: int, settings: LaunchSettings) -> dict[str, str]:
    """Environment of the processes: this process's, its import path, and their share of the threads."""
    variables = {
        name: value for name, value in os.environ.items() if name not in _TORCHRUN_VARIABLES
    }
    variables["PYTHONPATH"] = build_child_import_path()
    variables["PYTHONSAFEPATH"] = "1"  # for torchrun's own children, too
    variables["OMP_NUM_THREADS"] = str(max(1, threads // settings.processes))
    return variables


def _start_torchrun(
    settings: LaunchSettings, folder: Path, threads: int
) -> subprocess.Popen[bytes]:
    """torchrun, in a session of its own: the terminal's Ctrl-C comes to this process alone, which passes it on."""
    command = build_torchrun_arguments(settings, folder)
    if settings.nodes > 1:
        elsewhere = shlex.join(
            [sys.executable, "-m", "tasks.processes.torchrun", "0", os.devnull, *command]
        )
        logger.warning(
            "waiting for %d more nodes; run there, in this project's folder: %s",
            settings.nodes - 1,
            elsewhere,
        )
    with open_log_file(folder / "agent.log") as log:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tasks.processes.torchrun",
                str(os.getpid()),
                str(folder / "report.json"),
                *command,
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_build_environment(threads, settings),
            start_new_session=True,
        )


def _wait_for_torchrun(
    agent: subprocess.Popen[bytes], events: EventReader, tracker: Tracker, stop: StopRequests
) -> int | None:
    """Wait for torchrun; pass a stop request on, or obey it here outside of the training loop.

    Returns: the signal that was passed on.
    """
    asked: int | None = None
    deadline = math.inf
    while agent.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(POLL_S)
        events.forward_events(tracker)
        if time.monotonic() > deadline:
            raise Stopped(
                "stopped within an iteration; the same command resumes from the last checkpoint",
                asked or 0,
            )
        if stop.signum is None or asked is not None:
            continue
        if not events.is_training:
            raise Stopped(
                "stopped outside the training loop; the same command goes on", stop.signum
            )
        write_text_unsynced(events.path.parent / "stop", "")
        asked = stop.signum
        if asked == signal.SIGTERM:
            deadline = time.monotonic() + GRACE_SECONDS / 2
    return asked


def _kill_torchrun(agent: subprocess.Popen[bytes], folder: Path) -> None:
    """Kill torchrun; the kernel then kills its processes. Wait until all have ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(agent.pid, signal.SIGKILL)
    agent.wait()
    pids = [int(path.read_text() or 0) for path in folder.glob(f"pid-{platform.node()}-*")]
    if left := wait_for_exit([pid for pid in pids if pid], KILL_TIMEOUT_S):
        logger.warning("processes %s were killed and still run", left)


def _load_result(folder: Path, status: int) -> dict[str, Any]:
    errors = sorted(
        (json.loads(path.read_text()) for path in folder.glob("error-*.json")),
        key=_compute_error_order,
    )
    if errors and errors[0]["ours"]:
        raise _rebuild_exception(errors[0])
    report = (
        json.loads((folder / "report.json").read_text())
        if (folder / "report.json").is_file()
        else {}
    )
    for rank, code in sorted(report.items()):
        # those torchrun sends to the others
        if code < 0 and -code not in (
            signal.SIGTERM,
            signal.SIGINT,
        ):
            raise WorkerFailed(
                f"process {rank} was killed by {signal.Signals(-code).name}; of SIGKILL, lack of memory is the usual "
                f"reason: see the kernel's log, or lower micro_batch_tokens{_read_output_tail(folder, rank)}"
            )
    if errors:
        first = errors[0]
        raise WorkerFailed(
            f"process {first['rank']} raised {first['type']}: {first['message']}\n{first['trace']}"
        )
    if status or not (folder / "result.json").is_file():
        raise WorkerFailed(
            f"torchrun ended with status {status} and no result{_read_output_tail(folder)}"
        )
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def _find_stop_report(folder: Path) -> PosttrainError | None:
    """The stop that a worker reported although it was too slow to end: it says what is saved; None = no report."""
    errors = [json.loads(path.read_text()) for path in folder.glob("error-*.json")]
    return next(
        (
            _rebuild_exception(error)
            for error in errors
            if error["ours"] and error["type"] == Stopped.__name__
        ),
        None,
    )


def _compute_error_order(error: dict[str, Any]) -> tuple[Any, ...]:
    """Sort key: typed errors first, those that report another process's death last; then by time."""
    return (not error["ours"], error["type"] == WorkerFailed.__name__, error["time"])


def _rebuild_exception(error: dict[str, Any]) -> PosttrainError:
    """The exception of a report, as the type that was raised."""
    if error["type"] == Stopped.__name__:
        return Stopped(error["message"], error["signum"])
    try:
        kind = getattr(importlib.import_module(error["module"]), error["type"])
        rebuilt: PosttrainError = kind(error["message"])
    except (ImportError, AttributeError, TypeError):
        return WorkerFailed(f"{error['type']}: {error['message']}")
    return rebuilt


def _read_output_tail(folder: Path, rank: str | None = None) -> str:
    """The end of what a process printed, or torchrun itself."""
    logs = (
        folder.glob(f"logs/*/attempt_*/{rank}/stderr.log")
        if rank is not None
        else [folder / "agent.log"]
    )
    lines = [
        line
        for path in logs
        for line in path.read_text(errors="replace").splitlines()[-_MAX_OUTPUT_LINES:]
    ]
    return "; it printed:\n" + "\n".join(lines) if lines else ""
