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

from flows.runtime.stopping import Terminated, unwind_on_sigterm
from flows.runtime.user_code_path import find_own_code
from rl_core.errors import PosttrainError, Stopped
from tasks.processes.child_processes import die_with_parent

__all__ = ["main"]

logger = logging.getLogger(__name__)


def main(parent: int, descriptor: int) -> int:
    """Take jobs until standard input ends; returns the exit code."""
    die_with_parent(parent)
    unwind_on_sigterm()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the parent says what happens
    find_own_code()
    with os.fdopen(descriptor, "w", buffering=1) as events:
        try:
            _serve(events)
        except (Stopped, Terminated):
            _say(events, event="stopped")
            return 128 + signal.SIGTERM
    return 0


def _serve(events: IO[str]) -> None:
    from flows.sweep.trial import TrialJob, play_fresh, run_trial  # torch and MLflow

    while True:
        _say(events, event="ready")
        line = sys.stdin.readline()
        if not line:
            return
        job = TrialJob(**json.loads(line))
        stop = threading.Event()

        def decide(value: float) -> bool:
            _say(events, event="rung", value=value)
            return bool(json.loads(sys.stdin.readline())["goes_on"])

        def progress(stage: str, done: int, total: int, message: str) -> None:
            _say(events, event="progress", stage=stage, done=done, total=total, message=message)

        _say(events, event="ended", outcome=_outcome(
            lambda job=job, stop=stop: play_fresh(job, stop) if job.models else run_trial(job, stop, decide, progress)
        ))  # fmt: skip


def _outcome(run: Any) -> dict[str, Any]:
    from flows.sweep.trial import Pruned, peak_bytes

    try:
        return dict(run())
    except Pruned:
        return {"status": "pruned", "peak_bytes": peak_bytes()}
    except Stopped:
        raise
    except PosttrainError as error:  # its text is for people
        return {"status": "failed", "why": str(error), "peak_bytes": peak_bytes()}
    except Exception as error:  # a trial's fault is its own: the sweep goes on
        logger.exception("a trial failed")
        return {"status": "failed", "why": f"{type(error).__name__}: {error}", "peak_bytes": peak_bytes()}


def _say(events: IO[str], **what: Any) -> None:
    events.write(json.dumps(what) + "\n")
    events.flush()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
