"""The process that runs trials, one after another: started by `pool.py`, which it does not outlive.

    python -m flows.sweep.worker PARENT DESCRIPTOR

Standard input has a job a line; on DESCRIPTOR it writes what happens, a JSON object a line:

    {"event": "ready"}                             it takes a job
    {"event": "progress", "stage", "done", "total", "message"}
    {"event": "rung", "value"}                     answered by a line {"goes_on": true}
    {"event": "ended", "outcome"}                  fields of `TrialOutcome`
    {"event": "stopped"}                           by SIGTERM, with everything saved; the process ends
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from typing import IO, Any

from flows.runtime.import_setup import append_working_directory
from flows.runtime.stopping import TerminatedBySignal, unwind_on_sigterm
from rl_core.errors import PosttrainError, Stopped
from tasks.processes.child_processes import bind_to_parent

logger = logging.getLogger(__name__)


def run_worker(parent: int, descriptor: int) -> int:
    """Take jobs until standard input ends; returns the exit code."""
    bind_to_parent(parent)
    unwind_on_sigterm()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the parent says what happens
    append_working_directory()
    with os.fdopen(descriptor, "w", buffering=1) as events:
        try:
            _serve_jobs(events)
        except (Stopped, TerminatedBySignal):
            _write_event(events, event="stopped")
            return 128 + signal.SIGTERM
    return 0


def _serve_jobs(events: IO[str]) -> None:
    from flows.sweep.trial import (  # torch and MLflow
        TrialJob,
        evaluate_on_fresh_episodes,
        run_trial,
    )

    while True:
        _write_event(events, event="ready")
        line = sys.stdin.readline()
        if not line:
            return
        job = TrialJob(**json.loads(line))
        stop = threading.Event()

        def decide(value: float) -> bool:
            _write_event(events, event="rung", value=value)
            return bool(json.loads(sys.stdin.readline())["goes_on"])

        def progress(stage: str, done: int, total: int, message: str) -> None:
            _write_event(
                events, event="progress", stage=stage, done=done, total=total, message=message
            )

        _write_event(
            events,
            event="ended",
            outcome=_run_job(
                lambda job=job, stop=stop: (
                    evaluate_on_fresh_episodes(job, stop)
                    if job.models
                    else run_trial(job, stop, decide, progress)
                )
            ),
        )


def _run_job(run: Any) -> dict[str, Any]:
    from flows.sweep.trial import TrialPruned, measure_peak_bytes

    try:
        return dict(run())
    except TrialPruned:
        return {"status": "pruned", "peak_bytes": measure_peak_bytes()}
    except Stopped:
        raise
    except PosttrainError as error:  # its text is for people
        return {"status": "failed", "why": str(error), "peak_bytes": measure_peak_bytes()}
    except Exception as error:  # a trial's fault is its own: the sweep goes on
        logger.exception("a trial failed")
        return {
            "status": "failed",
            "why": f"{type(error).__name__}: {error}",
            "peak_bytes": measure_peak_bytes(),
        }


def _write_event(events: IO[str], **fields: Any) -> None:
    events.write(json.dumps(fields) + "\n")
    events.flush()


if __name__ == "__main__":
    sys.exit(run_worker(int(sys.argv[1]), int(sys.argv[2])))
