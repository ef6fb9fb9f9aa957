"""Launch of a stage in several processes under torchrun, supervised by the stage's process and ended with it.

    <stage's open folder>/workers/
        job.json          input of the processes (tasks/pipeline/stage_worker.py reads it)
        events.jsonl      metrics, progress and log lines of rank 0
        pid-<host>-<rank> process ids
        stop              created to request a stop: the loop saves and ends
        result.json       return value of the stage's body in rank 0
        error-<rank>.json exception of a process
        agent.log, logs/  output of torchrun and the processes

The folder is removed when the stage has finished. The stage's process keeps the stage's lock, tracker and journal.

Rank 0 sends its events through a file, which survives the kill of either side. The events reach the tracker before the
stage is resumed, so that a checkpoint never contains a step whose metrics are lost.
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
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import psutil

from rl_core.errors import PosttrainError, Stopped, WorkerFailed
from rl_core.processes.children import kill_group, start_child
from rl_core.settings import LaunchSettings
from rl_core.storage.append_log import (
    RECORD_LOST,
    LockedAppendLog,
    read_checked_lines,
)
from rl_core.storage.atomic_files import (
    make_folder,
    write_json_atomic,
    write_text_unsynced,
)
from rl_core.storage.faults import inject_fault
from rl_core.tracking import Tracker, sync_tracker
from rl_core.training.signals import GRACE_SECONDS, IterationAborted, StopRequests
from rl_core.user_code.load import build_child_import_path
from tasks.config import PipelineSettings, dump_settings

logger = logging.getLogger(__name__)

WORKERS_FOLDER = "workers"
EVENTS_FILE = "events.jsonl"
POLL_S = 0.1
KILL_TIMEOUT_S = 10.0  # a killed process that still runs after this is stuck in the kernel
_MAX_OUTPUT_LINES = 15  # of a process, in a message about its death
# Variables of torchrun, which a stage that runs under torchrun must not pass on.
_TORCHRUN_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


class EventTracker:
    """Tracker that writes lines to a file. Every line is handed to the kernel before the call returns."""

    def __init__(self, path: Path) -> None:
        # Open all the time: after the stage has died, nothing reaches the file of its next attempt.
        self._log = LockedAppendLog(path, allow_nan=True)

    def send_event(self, op: str, **fields: Any) -> None:
        """Write one line. Raises: CheckpointError for a disk error."""
        self._log.append_record({"op": op, **fields})

    def sync(self) -> None:
        """Sync all lines to disk. A checkpoint that follows relies on it."""
        self._log.sync_lines()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the scalars of one step."""
        self.send_event("metrics", metrics=dict(metrics), step=step)

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """Send a finished file or folder, which must stay in place."""
        self.send_event("artifact", path=str(path), folder=folder)

    def set_tag(self, name: str, value: str) -> None:
        """Send a tag."""
        self.send_event("tag", name=name, value=value)

    def log_dict(self, values: Mapping[str, Any], name: str) -> None:
        """Send a structure to be stored as a JSON artifact."""
        self.send_event("dict", values=dict(values), name=name)

    def progress(self, done: int, total: int, message: str = "") -> None:
        """Send the number of steps done, of `total`."""
        self.send_event("progress", done=done, total=total, message=message)


class EventLogHandler(logging.Handler):
    """Log handler that writes records to an EventTracker."""

    def __init__(self, events: EventTracker) -> None:
        super().__init__(logging.INFO)
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        """Send the text of one record."""
        self._events.send_event(
            "log", level=record.levelno, name=record.name, text=record.getMessage()
        )


class EventReader:
    """Reader that passes complete lines to a tracker, each once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_training = False  # True = in the training loop, which stops on request
        self._offset = 0

    def forward_events(self, tracker: Tracker, *, replay: bool = False) -> None:
        """Forward the lines written since the last call. `replay` (a run that ended): skip progress and log lines."""
        for line in read_checked_lines(self.path, self._offset, consequence=RECORD_LOST):
            self._offset = line.end
            if line.record is not None:
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


class LaunchedStage(Protocol):
    """Part of a stage's context from which its processes are started."""

    @property
    def name(self) -> str:
        """Name of the stage."""

    @property
    def folder(self) -> Path:
        """Folder into which the stage writes."""

    @property
    def settings(self) -> Any:
        """Settings of the stage, including `launch`."""

    @property
    def pipeline(self) -> PipelineSettings:
        """Settings of the whole pipeline."""

    @property
    def inputs(self) -> Mapping[str, Path | str]:
        """Folders, or hub names of models, by name of the input."""

    @property
    def tracker(self) -> Tracker:
        """Run of the stage."""

    @property
    def threads(self) -> int:
        """Number of threads, divided among the processes of this machine."""

    @property
    def seed(self) -> int:
        """Seed of the stage."""

    @property
    def fingerprint(self) -> dict[str, str]:
        """Facts that must be equal for a checkpoint to be resumed."""

    @property
    def allow_drift(self) -> bool | tuple[str, ...]:
        """Permission to resume with a different fingerprint: always, or for these keys."""

    @property
    def stop(self) -> threading.Event:
        """Event that is set when the stage has to save and stop."""


def run_in_workers(context: LaunchedStage, body: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Run a stage's body in the processes of its `launch` settings; return rank 0's summary.

    Raises: the error of the process that failed first, with its type; WorkerFailed if that is no posttrain error or the
        process was killed; Stopped after a stop request, with everything saved if the training loop was running.
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
    # Entered before the start, so that no signal arrives between the start and the `try`.
    with StopRequests(context.stop) as stop:
        agent = _start_torchrun(settings, folder, context.threads)
        try:
            inject_fault("workers.started")
            signum = _wait_for_torchrun(agent, events, context.tracker, stop)
        except IterationAborted as aborted:
            raise Stopped(
                f"stopped within an iteration ({aborted}); the same command resumes",
                aborted.signum,
            ) from None
        except Stopped as error:
            _kill_torchrun(agent, folder)
            raise _find_stop_report(folder) or error from None
        finally:
            _kill_torchrun(agent, folder)
            events.forward_events(context.tracker)
    inject_fault("workers.ended")
    try:
        summary = _load_result(folder, agent.returncode)
    except WorkerFailed:
        raise  # the processes' output stays for the user
    except PosttrainError:
        shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)
    if signum is not None:  # it arrived after the last step
        raise Stopped("stopped after the last step; saved, the same command resumes", signum)
    return summary


def recover_events(folder: Path, tracker: Tracker) -> None:
    """Deliver, then remove, the events of an earlier run whose processes were killed with their stage."""
    EventReader(folder / WORKERS_FOLDER / EVENTS_FILE).forward_events(tracker, replay=True)
    sync_tracker(tracker)  # before the only copy is removed
    shutil.rmtree(folder / WORKERS_FOLDER, ignore_errors=True)


def build_torchrun_arguments(settings: LaunchSettings, folder: Path) -> list[str]:
    """Build torchrun's arguments, including the program. A single node uses loopback and looks up no host names."""
    rendezvous = [f"--rdzv-endpoint={settings.rdzv_endpoint or '127.0.0.1:0'}"]
    if settings.nodes == 1:
        rendezvous.append("--local-addr=127.0.0.1")
    return [
        f"--nnodes={settings.nodes}",
        f"--nproc-per-node={settings.processes}",
        f"--rdzv-backend={settings.rdzv_backend}",
        f"--rdzv-id={settings.rdzv_id}",
        *rendezvous,
        "--max-restarts=0",  # the stage retries instead, from a checkpoint, with its tracker and lock
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
    """Build the environment of the processes: this process's, with its import path and their share of the threads."""
    variables = {
        name: value for name, value in os.environ.items() if name not in _TORCHRUN_VARIABLES
    }
    variables["PYTHONPATH"] = build_child_import_path()
    variables["PYTHONSAFEPATH"] = "1"  # also for torchrun's children
    variables["OMP_NUM_THREADS"] = str(max(1, threads // settings.processes))
    return variables


def _start_torchrun(
    settings: LaunchSettings, folder: Path, threads: int
) -> subprocess.Popen[bytes]:
    """Start torchrun in a new session, so that only this process receives Ctrl-C and passes it on."""
    arguments = build_torchrun_arguments(settings, folder)
    program = [sys.executable, "-m", "tasks.processes.torchrun"]
    if settings.nodes > 1:
        logger.warning(
            "waiting for %d more nodes; run there, in this project's folder: %s",
            settings.nodes - 1,
            shlex.join([*program, "0", os.devnull, *arguments]),
        )
    return start_child(
        [*program, str(os.getpid()), str(folder / "report.json"), *arguments],
        log=folder / "agent.log",
        environment=_build_environment(threads, settings),
    )


def _wait_for_torchrun(
    agent: subprocess.Popen[bytes], events: EventReader, tracker: Tracker, stop: StopRequests
) -> int | None:
    """Wait for torchrun. Pass a stop request on to the training loop; stop here if the loop is not running.

    Returns: the signal that was passed on.
    """
    signum: int | None = None
    deadline = math.inf
    while agent.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(POLL_S)
        events.forward_events(tracker)
        if time.monotonic() > deadline:
            raise Stopped(
                "stopped within an iteration; the same command resumes from the last checkpoint",
                signum or 0,
            )
        if stop.signum is None or signum is not None:
            continue
        if not events.is_training:
            raise Stopped(
                "stopped outside the training loop; the same command resumes", stop.signum
            )
        write_text_unsynced(events.path.parent / "stop", "")
        signum = stop.signum
        if signum == signal.SIGTERM:
            deadline = time.monotonic() + GRACE_SECONDS / 2
    return signum


def _kill_torchrun(agent: subprocess.Popen[bytes], folder: Path) -> None:
    """Kill torchrun, whereupon the kernel kills its processes, and wait until all have ended."""
    kill_group(agent)
    pids = [int(path.read_text() or 0) for path in folder.glob(f"pid-{platform.node()}-*")]
    running = wait_for_exit([pid for pid in pids if pid], KILL_TIMEOUT_S)
    if running:
        logger.warning("processes %s were killed and still run", running)


def wait_for_exit(pids: Iterable[int], timeout_s: float) -> list[int]:
    """Wait for processes that are being killed and are not children of this process; return those that still run."""
    deadline = time.monotonic() + timeout_s
    running = list(pids)
    while True:
        running = [pid for pid in running if _is_running(pid)]
        if not running or time.monotonic() > deadline:
            return running
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        # A zombie only waits to be reaped by init.
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _load_result(folder: Path, status: int) -> dict[str, Any]:
    errors = [json.loads(path.read_text()) for path in folder.glob("error-*.json")]
    errors.sort(key=_compute_error_order)
    if errors and errors[0]["ours"]:
        raise _rebuild_exception(errors[0])
    report_path = folder / "report.json"
    report = json.loads(report_path.read_text()) if report_path.is_file() else {}
    for rank, code in sorted(report.items()):
        # After a failure torchrun ends the other processes with SIGTERM or SIGINT.
        if code < 0 and -code not in (signal.SIGTERM, signal.SIGINT):
            raise WorkerFailed(
                f"process {rank} was killed by {signal.Signals(-code).name}; of SIGKILL, lack of memory is the usual "
                f"reason: see the kernel's log, or lower micro_batch_tokens{_read_output_tail(folder, rank)}"
            )
    if errors:
        error = errors[0]
        raise WorkerFailed(
            f"process {error['rank']} raised {error['type']}: {error['message']}\n{error['trace']}"
        )
    result_path = folder / "result.json"
    if status or not result_path.is_file():
        raise WorkerFailed(
            f"torchrun ended with status {status} and no result{_read_output_tail(folder)}"
        )
    result: dict[str, Any] = json.loads(result_path.read_text())
    return result


def _find_stop_report(folder: Path) -> PosttrainError | None:
    """Return the stop that a worker reported although it was too slow to end; it says what is saved."""
    for path in folder.glob("error-*.json"):
        error = json.loads(path.read_text())
        if error["ours"] and error["type"] == Stopped.__name__:
            return _rebuild_exception(error)
    return None


def _compute_error_order(error: dict[str, Any]) -> tuple[Any, ...]:
    """Compute the sort key: typed errors first, reports of another process's death last, then by time."""
    return (not error["ours"], error["type"] == WorkerFailed.__name__, error["time"])


def _rebuild_exception(error: dict[str, Any]) -> PosttrainError:
    """Rebuild the reported exception with its original type."""
    if error["type"] == Stopped.__name__:
        return Stopped(error["message"], error["signum"])
    try:
        kind = getattr(importlib.import_module(error["module"]), error["type"])
        rebuilt: PosttrainError = kind(error["message"])
    except (ImportError, AttributeError, TypeError):
        return WorkerFailed(f"{error['type']}: {error['message']}")
    return rebuilt


def _read_output_tail(folder: Path, rank: str | None = None) -> str:
    """Read the end of the output of a process, or of torchrun."""
    paths = [folder / "agent.log"]
    if rank is not None:
        paths = list(folder.glob(f"logs/*/attempt_*/{rank}/stderr.log"))
    lines: list[str] = []
    for path in paths:
        lines += path.read_text(errors="replace").splitlines()[-_MAX_OUTPUT_LINES:]
    return "; it printed:\n" + "\n".join(lines) if lines else ""
