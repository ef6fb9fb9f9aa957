"""Entry point of one worker process of a multi-process stage, started by torchrun (see tasks/processes/launch.py).

python -m tasks.pipeline.stage_worker JOB.json
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from rl_core.distributed import ProcessGroup, join_process_group
from rl_core.errors import PosttrainError
from rl_core.processes.children import bind_to_parent
from rl_core.storage.atomic_files import write_json_atomic, write_text_unsynced
from rl_core.storage.faults import inject_fault
from rl_core.tracking import MemoryTracker, Tracker
from tasks.config import build_settings
from tasks.pipeline.stage import StageContext
from tasks.processes.launch import EVENTS_FILE, EventLogHandler, EventTracker
from tasks.processes.torchrun import AGENT_PID_VARIABLE


class _StopFileEvent(threading.Event):
    """An event that is set once a file exists: it reaches every node, and processes that start after the request."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def is_set(self) -> bool:
        """Return whether the file exists."""
        return self._path.exists()


class _WorkerStageContext(StageContext):
    """A stage context that tells the stage's main process when the training loop runs."""

    def train(self, *arguments: Any, **named: Any) -> Any:
        """Run `StageContext.train` and report its begin and end."""
        _send_training_state(self.tracker, True)
        try:
            return super().train(*arguments, **named)
        finally:
            _send_training_state(self.tracker, False)


def _send_training_state(tracker: Tracker, on: bool) -> None:
    if isinstance(tracker, EventTracker):
        tracker.send_event("training", on=on)


def main(path: Path) -> int:
    """Run the job and return the exit status."""
    bind_to_parent(int(os.environ[AGENT_PID_VARIABLE]))
    folder, rank = path.parent, int(os.environ["RANK"])
    write_text_unsynced(folder / f"pid-{platform.node()}-{rank}", str(os.getpid()))
    try:
        job = json.loads(path.read_text())
        summary = _run_job(job, folder)
        inject_fault("worker.computed")
        if rank == 0:
            write_json_atomic(folder / "result.json", summary)
    except BaseException as error:
        trace = "".join(traceback.format_exception(error))
        print(trace, file=sys.stderr, flush=True)
        report = {
            "rank": rank,
            "ours": isinstance(error, PosttrainError),
            "type": type(error).__name__,
            "module": type(error).__module__,
            "message": str(error),
            "signum": getattr(error, "signum", None),
            "time": time.time(),
            "trace": trace[-4000:],
        }
        write_json_atomic(folder / f"error-{rank}.json", report)
        return 1
    return 0


def _run_job(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    torch.set_num_threads(max(1, job["threads"] // int(os.environ["LOCAL_WORLD_SIZE"])))
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    pipeline = build_settings(
        job["pipeline"], check_files=False
    )  # the main process has checked them
    settings = getattr(pipeline.stages, job["name"])
    process_group = join_process_group(
        timeout_s=settings.launch.timeout_seconds, on_cpu=pipeline.model.device == "cpu"
    )
    inject_fault("worker.joined")
    allow_drift = job["allow_drift"]
    context = _WorkerStageContext(
        name=job["name"],
        folder=Path(job["folder"]),
        settings=settings,
        pipeline=pipeline,
        inputs={**{name: Path(value) for name, value in job["paths"].items()}, **job["names"]},
        # bodies that run in workers use only what a Tracker offers
        tracker=_build_tracker(process_group, folder),  # type: ignore[arg-type]
        pipeline_run=None,  # type: ignore[arg-type]
        threads=job["threads"],
        seed=job["seed"],
        fingerprint=job["fingerprint"],
        allow_drift=allow_drift if isinstance(allow_drift, bool) else tuple(allow_drift),
        stop=_StopFileEvent(folder / "stop"),
        process_group=process_group,
    )
    module, _, name = job["body"].partition(":")
    body: Callable[[StageContext], dict[str, Any]] = getattr(importlib.import_module(module), name)
    return body(context)


def _build_tracker(process_group: ProcessGroup, folder: Path) -> Tracker:
    """Build the tracker of a process: only the first one reports to the stage, as the others would repeat it."""
    if not process_group.is_rank_zero:
        return MemoryTracker()
    events = EventTracker(folder / EVENTS_FILE)
    for package in ("rl_core", "tasks"):
        logging.getLogger(package).setLevel(logging.INFO)
        logging.getLogger(package).addHandler(EventLogHandler(events))
    return events


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
