"""Named fault points in every write and stage, so that a run can be broken at an exact place.

    POSTTRAIN_FAULT=point[@RANK]:hit:action[,point:hit:action...]

The points are listed in `fault_points.py` and by `posttrain doctor --faults`. `hit` counts from 1: the fault fires the
n-th time that the point is reached in one process. Actions:

    kill            SIGKILL to this process
    exit[=CODE]     the process ends at once, nothing is unwound; 1 by default
    term            SIGTERM to this process, which goes on until its handler acts
    raise[=ERRNO]   InjectedFault, an OSError: ENOSPC by default, or EIO, EFBIG, EDQUOT, EROFS, ...
    sleep[=SECONDS] 3600 by default: long enough to be killed in

Processes that a run starts inherit the variable and count for themselves. `point@0` fires in the process of rank 0 of
a stage in several processes alone, `point@main` in none of them. Unset, a point costs one comparison.

    POSTTRAIN_FAULT_LOG=FILE    every point that is reached is appended to FILE: pid, time and name, a line each
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from rl_core.errors import SettingsError, nearest
from rl_core.storage.fault_points import POINTS

__all__ = ["LOG", "POINTS", "VARIABLE", "InjectedFault", "check", "configure", "fault", "log_to"]

VARIABLE = "POSTTRAIN_FAULT"
LOG = "POSTTRAIN_FAULT_LOG"
_ACTIONS = "kill, exit[=CODE], term, raise[=ERRNO], sleep[=SECONDS]"


class InjectedFault(OSError):
    """Error of the action `raise`; it looks like one of the disk."""


@dataclass(slots=True)
class _Plan:
    hit: int  # fires when the point is reached for the hit-th time
    action: str
    value: float  # seconds, exit code or error number
    seen: int = 0


_plans: dict[str, _Plan] = {}
_log: str | None = None
_is_watched = False  # a plan or a log is there
_wrong: SettingsError | None = None  # why the plan of the environment cannot be followed
_guard = threading.Lock()  # threads share the counts


def configure(text: str | None) -> None:
    """Set the faults of this process; None or "" = none.

    Raises: SettingsError for an unknown point or action, or a hit below 1.
    """
    global _plans, _is_watched, _wrong
    _wrong = None
    entries = [_parse(entry) for entry in text.split(",")] if text else []
    _plans = {point: plan for point, rank, plan in entries if rank in ("", os.environ.get("RANK", "main"))}
    _is_watched = bool(_plans) or _log is not None


def log_to(path: str | os.PathLike[str] | None) -> None:
    """Append every point that this process reaches to a file; None = no more."""
    global _log, _is_watched
    _log = os.fspath(path) if path else None
    _is_watched = bool(_plans) or _log is not None


def _parse(entry: str) -> tuple[str, str, _Plan]:
    parts = entry.strip().split(":")
    if len(parts) != 3:
        raise SettingsError(f"{VARIABLE}: '{entry}' must read point:hit:action")
    place, hit, action = parts
    point, _, rank = place.partition("@")
    if point not in POINTS:
        raise SettingsError(f"{VARIABLE}: unknown point '{point}'; {nearest(point, POINTS)}")
    if rank and rank != "main" and not rank.isdecimal():
        raise SettingsError(f"{VARIABLE}: '{place}' must end with @main or the number of a process, as @0")
    if not hit.isdecimal() or int(hit) < 1:
        raise SettingsError(f"{VARIABLE}: hit '{hit}' of {point} must be a whole number from 1")
    name, _, value = action.partition("=")
    return point, rank, _Plan(int(hit), name, _value(point, action, name, value))


def _value(point: str, action: str, name: str, value: str) -> float:
    """Number behind the action's name."""
    if name not in ("kill", "exit", "term", "raise", "sleep") or (value and name in ("kill", "term")):
        raise SettingsError(f"{VARIABLE}: unknown action '{action}' of {point}; known: {_ACTIONS}")
    if name == "raise":
        number = getattr(errno, value or "ENOSPC", None)
        if not isinstance(number, int):
            known = ("ENOSPC", "EIO", "EFBIG", "EDQUOT", "EROFS", "EACCES")
            raise SettingsError(f"{VARIABLE}: '{value}' is no error number; {nearest(value, known)}")
        return number
    if name == "exit" and value and not (value.isdecimal() and int(value) < 256):
        raise SettingsError(f"{VARIABLE}: '{value}' is not an exit code, 0 to 255")
    try:
        return float(value or {"sleep": 3600, "exit": 1}.get(name, 0))
    except ValueError:
        raise SettingsError(f"{VARIABLE}: '{value}' is not a number of seconds") from None


def fault(point: str) -> None:
    """Fault point; returns at once unless this hit is the one that the plan names."""
    if _is_watched:
        _reach(point)


def check() -> None:
    """Refuse a plan of the environment that cannot be meant. Raises: SettingsError."""
    if _wrong is not None:
        raise _wrong


def _reach(point: str) -> None:
    check()
    if _log is not None:
        _append(_log, point)
    plan = _plans.get(point)
    if plan is None:
        return
    with _guard:
        plan.seen += 1
        if plan.seen != plan.hit:
            return
    if plan.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif plan.action == "exit":
        os._exit(int(plan.value))
    elif plan.action == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    elif plan.action == "sleep":
        time.sleep(plan.value)
    else:
        number = int(plan.value)
        raise InjectedFault(number, f"injected fault at {point}, hit {plan.hit}: {os.strerror(number)}")


def _append(path: str, point: str) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise SettingsError(f"{LOG}: {path} cannot be written: {error.strerror}") from error
    try:
        os.write(descriptor, f"{os.getpid()} {time.time():.6f} {point}\n".encode())
    finally:
        os.close(descriptor)


def _from_environment(environment: Mapping[str, str]) -> None:
    """Plan and log of the environment. A wrong plan is an error at the first point, or of `check`: not of an import."""
    global _wrong, _is_watched
    log_to(environment.get(LOG) or None)
    try:
        configure(environment.get(VARIABLE))
    except SettingsError as error:
        _wrong, _is_watched = error, True


_from_environment(os.environ)
