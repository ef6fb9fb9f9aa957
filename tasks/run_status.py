"""Names for the status of a run, shared by the terminal, the live page, Prefect, and MLflow's own status.

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

from collections.abc import Mapping

POSTPONED = "postponed"  # tag of a run: why its promotion was left open
STALE_STOP_TAGS = ("error", "interrupted", POSTPONED)  # tags that a run loses when it is resumed

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
