"""Named fault points in the write and step paths, so that tests can break a run at an exact place.

    POSTTRAIN_FAULT=point:hit:action[,point:hit:action...]

`hit` counts from 1: the fault fires the n-th time that the point is reached in this process. Actions: `kill` (SIGKILL
to this process), `raise` (InjectedFault, an OSError "no space left"), `sleep` or `sleep=SECONDS` (3600 by default:
long enough to be killed in). Unset, a point costs one comparison.

    point              reached
    publish.begin      the temporary folder exists, nothing is in it
    publish.file       after each file of a checkpoint is written, before its fsync
    publish.written    all files are written and synced, no manifest yet
    publish.manifest   manifest written and synced, folder not renamed
    publish.renamed    folder has its final name, parent not synced
    publish.done       parent synced: the folder is acknowledged
    pointer.written    new pointer written beside the old one, not renamed
    pointer.done       pointer replaced and parent synced
    prune.renamed      an old folder has its trash name, not yet deleted
    loop.step          before an iteration's step()
    loop.stepped       after it, before its metrics are logged
    loop.logged        after the metrics are logged
    loop.evaluated     after an evaluation is logged
    loop.saved         after a checkpoint is saved
    loop.finished      after the last checkpoint, before the best model is restored
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass

from rl_core.errors import SettingsError, nearest

__all__ = ["POINTS", "VARIABLE", "InjectedFault", "configure", "fault"]

VARIABLE = "POSTTRAIN_FAULT"

POINTS = frozenset(
    {
        "publish.begin",
        "publish.file",
        "publish.written",
        "publish.manifest",
        "publish.renamed",
        "publish.done",
        "pointer.written",
        "pointer.done",
        "prune.renamed",
        "loop.step",
        "loop.stepped",
        "loop.logged",
        "loop.evaluated",
        "loop.saved",
        "loop.finished",
    }
)


class InjectedFault(OSError):
    """Error of the action `raise`; it looks like a full disk."""


@dataclass(slots=True)
class _Plan:
    hit: int  # fires when the point is reached for the hit-th time
    action: str
    seconds: float
    seen: int = 0


_plans: dict[str, _Plan] | None = None


def configure(text: str | None) -> None:
    """Set the faults of this process; None or "" = none.

    Raises: SettingsError for an unknown point or action, or a hit below 1.
    """
    global _plans
    _plans = dict(_parse(entry) for entry in text.split(",")) if text else None


def _parse(entry: str) -> tuple[str, _Plan]:
    parts = entry.strip().split(":")
    if len(parts) != 3:
        raise SettingsError(f"{VARIABLE}: '{entry}' must read point:hit:action")
    point, hit, action = parts
    name, _, seconds = action.partition("=")
    if point not in POINTS:
        raise SettingsError(f"{VARIABLE}: unknown point '{point}'; {nearest(point, POINTS)}")
    if not hit.isdecimal() or int(hit) < 1:
        raise SettingsError(f"{VARIABLE}: hit '{hit}' of {point} must be a whole number from 1")
    if name not in ("kill", "raise", "sleep") or (seconds and name != "sleep"):
        raise SettingsError(f"{VARIABLE}: unknown action '{action}' of {point}; known: kill, raise, sleep[=SECONDS]")
    try:
        return point, _Plan(int(hit), name, float(seconds or 3600))
    except ValueError:
        raise SettingsError(f"{VARIABLE}: '{seconds}' is not a number of seconds") from None


def fault(point: str) -> None:
    """Fault point; returns at once unless this hit is the one that the plan names."""
    if _plans is None:
        return
    plan = _plans.get(point)
    if plan is None:
        return
    plan.seen += 1
    if plan.seen != plan.hit:
        return
    if plan.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif plan.action == "sleep":
        time.sleep(plan.seconds)
    else:
        raise InjectedFault(errno.ENOSPC, f"injected fault at {point}, hit {plan.hit}")


def _from_environment(environment: Mapping[str, str]) -> None:
    configure(environment.get(VARIABLE))


_from_environment(os.environ)
