"""Program of the process that runs trials, one after another; started by `trial_process.py`, it ends with its parent.

    python -m flows.sweep.worker PARENT DESCRIPTOR

Standard input has one job per line. On DESCRIPTOR it writes events, one JSON object per line:

    {"event": "ready"}                             it accepts a job
    {"event": "progress", "stage", "done", "total", "message"}
    {"event": "rung", "value"}                     answered by a line {"goes_on": true}
    {"event": "ended", "outcome"}                  fields of `TrialOutcome`
    {"event": "stopped"}                           by SIGTERM, with everything saved; the process ends
"""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import IO, Any

from flows.runtime.stopping import TerminatedBySignal, unwind_on_sigterm
from rl_core.errors import PosttrainError, Stopped
from rl_core.processes.children import bind_to_parent
from rl_core.user_code.load import append_working_directory

logger = logging.getLogger(__name__)


def run_worker(parent: int, descriptor: int) -> int:
    """Run jobs until standard input ends; return the exit code."""
    bind_to_parent(parent)
    unwind_on_sigterm()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C of the terminal
    append_working_directory()
    with os.fdopen(descriptor, "w", buffering=1) as events:
        try:
            _serve_jobs(events)
        except (Stopped, TerminatedBySignal):
            _write_event(events, event="stopped")
            return 128 + signal.SIGTERM
    return 0


def _serve_jobs(events: IO[str]) -> None:
    # Imports torch and MLflow.
    from flows.sweep.trial import TrialJob, evaluate_on_fresh_episodes, run_trial

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

        def report_progress(stage: str, done: int, total: int, message: str) -> None:
            _write_event(
                events, event="progress", stage=stage, done=done, total=total, message=message
            )

        if job.models:
            run = functools.partial(evaluate_on_fresh_episodes, job, stop)
        else:
            run = functools.partial(run_trial, job, stop, decide, report_progress)
        _write_event(events, event="ended", outcome=_run_job(run))


def _run_job(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    from flows.sweep.trial import TrialPruned, measure_peak_bytes

    try:
        return dict(run())
    except TrialPruned:
        return {"status": "pruned", "peak_bytes": measure_peak_bytes()}
    except Stopped:
        raise
    except PosttrainError as error:  # its text needs no type
        return {"status": "failed", "why": str(error), "peak_bytes": measure_peak_bytes()}
    except Exception as error:  # one failed trial does not stop the sweep
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
