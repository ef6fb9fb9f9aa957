"""Words for the state of a run: the same in the terminal, on the live page, in Prefect and beside MLflow's own.

    running     its process lives
    waiting     finished but for a person's approval
    postponed   finished but for a promotion that the tracking store could not be asked about
    finished
    failed      by an error
    stopped     by Ctrl-C, SIGTERM or a time limit, with its state saved
    killed      its process is gone without a word

The last four end a run; all but finished ones are gone on with by the same command. MLflow says KILLED for stopped and
killed alike: a killed run has the tag `interrupted`, which says what was found.
"""

from __future__ import annotations

from collections.abc import Mapping

POSTPONED = "postponed"  # tag of a run: why its promotion was left open
STALE_STOP_TAGS = ("error", "interrupted", POSTPONED)  # tags that a run loses when it goes on

_STATUS_NAMES = {
    "RUNNING": "running",
    "SCHEDULED": "running",
    "FINISHED": "finished",
    "FAILED": "failed",
    "KILLED": "stopped",
}


def describe_run_status(status: str, tags: Mapping[str, str]) -> str:
    """Word for MLflow's status of a run with these tags; "failed" for an unknown one."""
    if status == "KILLED" and tags.get("interrupted"):
        return "killed"
    if status == "FINISHED" and tags.get("approval") == "waiting":
        return "waiting"
    if status == "FINISHED" and tags.get(POSTPONED):
        return "postponed"
    return _STATUS_NAMES.get(status, "failed")
