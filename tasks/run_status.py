"""Status of a run: names shared by the terminal, the live page, Prefect and MLflow; the errors that mean "stopped".

    running     its process lives
    waiting     finished except for a person's approval
    postponed   finished except for a promotion, because the tracking store could not be reached
    finished
    failed      by an error
    stopped     by Ctrl-C, SIGTERM or a time limit, with its state saved
    killed      its process ended without closing the run

The last four end a run; all but finished ones are resumed by the same command. MLflow says KILLED for stopped and
killed alike: a killed run has the tag `interrupted` with what was detected.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from rl_core.errors import Stopped

POSTPONED = "postponed"  # tag of a run: why its promotion was left open
STALE_STOP_TAGS = ("error", "interrupted", POSTPONED)  # tags that a run loses when it is resumed
# For the tracking store: a preempted run has few seconds; the rest waits in the journal.
STOP_TIMEOUT_SECONDS = 1.5

_STATUS_NAMES = {
    "RUNNING": "running",
    "SCHEDULED": "running",
    "FINISHED": "finished",
    "FAILED": "failed",
    "KILLED": "stopped",
}


def describe_run_status(status: str, tags: Mapping[str, str]) -> str:
    """Return the name for MLflow's status of a run with these tags; "failed" for an unknown status."""
    if status == "KILLED" and tags.get("interrupted"):
        return "killed"
    if status == "FINISHED" and tags.get("approval") == "waiting":
        return "waiting"
    if status == "FINISHED" and tags.get(POSTPONED):
        return "postponed"
    return _STATUS_NAMES.get(status, "failed")


def is_stop_error(error: BaseException | None) -> bool:
    """Return whether the run was stopped by somebody: Ctrl-C, or SIGTERM within a flow or outside.

    Prefect has an exception of its own for this.
    """
    kinds: tuple[type[BaseException], ...] = (Stopped, KeyboardInterrupt, SystemExit)
    prefect = sys.modules.get("prefect.exceptions")  # if it is not imported, it cannot have raised
    if prefect:
        kinds += (prefect.TerminationSignal,)
    return isinstance(error, kinds)
