"""The list of fault points of all floors: name, the moment at which it is reached, and the kind of run that reaches it.

Upper floors' points are listed here too, so that a plan is checked when the process starts, whatever it imports later.

Named fault points in every write and stage, so that a run can be broken at an exact place.

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

from rl_core.errors import SettingsError, suggest_name

RUN_KINDS = {
    "pipeline": "first run of a pipeline, in an empty folder",
    "again": "another run of it, whose model meets the champion",
    "fresh": "a run with --fresh",
    "resume": "the run after a kill",
    "damage": "the run after damage to a file",
    "torchrun": "a stage with launch: torchrun",
    "approval": "a promotion with approve: manual, and its answer",
    "by hand": "posttrain promote",
    "retrain": "posttrain retrain",
    "check": "the flow evaluate-champion",
    "gc": "posttrain gc --yes",
    "sweep": "posttrain sweep",
    "own server": "posttrain run without PREFECT_API_URL",
    "up": "posttrain up",
    "deployment": "a run of a deployment",
    "service": "posttrain service up",
    "serve": "posttrain serve",
    "prefer": "posttrain prefer",
    "online": "posttrain online",
}


@dataclass(frozen=True, slots=True)
class FaultPoint:
    """One place in the source where a fault can be made to happen."""

    name: str
    meaning: str  # the moment at which it is reached
    run: str = "pipeline"  # the simplest kind of run that reaches it, one of RUNS

    def __post_init__(self) -> None:
        assert self.run in RUN_KINDS, self.name


def _build_group(*points: tuple[str, str] | tuple[str, str, str]) -> tuple[FaultPoint, ...]:
    return tuple(FaultPoint(*point) for point in points)


FAULT_POINT_GROUPS: dict[str, tuple[FaultPoint, ...]] = {
    "published folders and files": _build_group(
        ("publish.begin", "the temporary folder exists, nothing is in it"),
        ("publish.file", "a file of a checkpoint is written and synced"),
        ("publish.written", "all files are written and synced, no manifest yet"),
        ("publish.manifest", "the manifest is written and synced, the folder not renamed"),
        ("publish.renamed", "the folder has its final name, its parent is not synced"),
        ("publish.done", "the parent is synced: the folder is acknowledged"),
        ("text.written", "a file that is replaced whole: the new one lies beside the old one"),
        ("text.done", "the new one has replaced it, and the parent is synced"),
        ("live.written", "a file for live views: the new one lies beside the old one, unsynced"),
        ("lines.copied", "a file of lines is copied without its damaged ones, under another name"),
        ("prune.renamed", "an old folder has its trash name, not yet deleted"),
        ("prune.done", "and is deleted"),
        ("leftover.removed", "one thing that a dead process left is deleted", "resume"),
        ("lock.taken", "the lock of a folder is held"),
    ),
    "checkpoints and the training loop": _build_group(
        ("checkpoint.encoded", "the state is on the CPU and finite, nothing is written"),
        ("pointer.written", "the new pointer is written beside the old one, not renamed"),
        ("pointer.done", "the pointer is replaced and its parent synced"),
        ("checkpoint.loaded", "the newest valid state is read, nothing is restored", "resume"),
        ("checkpoint.aside", "a damaged version is renamed, the one before not read", "damage"),
        ("loop.resumed", "model, optimizer, progress and generators are restored", "resume"),
        ("loop.step", "before an iteration's step()"),
        ("loop.stepped", "after it, before its metrics are logged"),
        ("loop.logged", "after the metrics are logged"),
        ("loop.evaluated", "an evaluation is logged"),
        ("history.appended", "a line of the metric history's export is appended, unsynced"),
        ("epoch.kept", "the model of an epoch is published, an older one not removed"),
        ("loop.saved", "a checkpoint is saved"),
        ("loop.finished", "after the last checkpoint, before the best model is restored"),
        ("loop.left", "the model holds the weights of the outcome"),
    ),
    "data, rollouts, rewards, evaluation": _build_group(
        ("data.read", "the rows of a file are read and checked"),
        ("data.tokenizer", "a preset's tokenizer is trained"),
        ("data.tokenised", "the rows are tokenised and written, their folder has no manifest"),
        ("data.rows", "one part of the split rows is written"),
        ("model.recorded", "log-probs of a live model are written, for the proof of its export"),
        ("model.scored", "scores of a live reward model are written, for the proof of its export"),
        ("model.saved", "a model and its tokenizer are written into the open folder"),
        ("pairs.made", "preference pairs are read or sampled"),
        ("records.logged", "one of a stage's records is in its journal, as artifact and data set"),
        ("references.scored", "log-probabilities under the reference are computed, not kept"),
        ("rollouts.played", "the rollouts of some episodes are collected"),
        ("rewards.scored", "an iteration's rollouts have their rewards"),
        ("rewards.recorded", "the rewards of an iteration are appended to rewards.jsonl"),
        ("rewards.cut", "the lines of iterations that are repeated are cut off", "resume"),
        ("evaluation.played", "a model has played its held-out episodes"),
        ("evaluation.trajectories", "and they are written"),
        ("evaluation.written", "evaluation.json is written"),
        ("analysis.probed", "the models are measured on the episodes"),
        ("analysis.written", "report and figures are written"),
    ),
    "stages": _build_group(
        ("stage.locked", "the lock of the stage's key is held"),
        ("stage.cleared", "the open folder is there, without leftovers"),
        ("stage.discarded", "--fresh: the finished folder is gone, its journal not yet", "fresh"),
        ("stage.tracked", "the stage's run is open"),
        ("stage.computed", "the body has returned"),
        ("stage.registered", "the model has a version, or waits in the journal for one"),
        ("stage.summarised", "summary.json is written"),
        ("stage.closed", "the stage's run is closed, the folder still open"),
        ("stage.copied", "metrics and records are copied into the folder"),
        ("stage.sealed", "the folder has its final name and manifest"),
        ("stage.cached", "a finished folder is verified and taken", "resume"),
        ("task.ended", "a stage has ended, Prefect has no artifacts of it"),
        ("task.published", "Prefect has them"),
    ),
    "stages in several processes": _build_group(
        ("workers.job", "job.json is written, nothing is started", "torchrun"),
        ("workers.started", "torchrun is started", "torchrun"),
        ("worker.joined", "in each process: all of them have met", "torchrun"),
        (
            "worker.computed",
            "in each process: the body has returned, no result is written",
            "torchrun",
        ),
        ("workers.ended", "all processes are gone, their result is not read", "torchrun"),
    ),
    "tracking": _build_group(
        ("journal.opened", "a journal is open and locked, its torn last line cut off"),
        ("journal.line", "a line is written to a journal"),
        ("journal.synced", "a journal is synced before it is closed"),
        ("artifact.kept", "an artifact's or model's copy is kept, no record names it"),
        ("ship.begin", "a delivery begins"),
        ("ship.created", "the store has made the run, the cursor does not say so"),
        ("ship.metrics", "the store has a batch of metrics, the cursor does not say so"),
        ("ship.event", "the store has another record, the cursor does not say so"),
        ("cursor.written", "the new cursor is written beside the old one"),
        ("cursor.saved", "and has replaced it"),
        ("artifact.sent", "the store has an artifact, its copy is still there"),
        ("model.made", "the store has made a model without files"),
        ("model.uploaded", "it has the files"),
        ("model.ready", "it calls the model ready, there is no version"),
        ("model.versioned", "it has the version, the cursor does not say so"),
        ("trace.started", "it has an episode's trace without spans"),
        ("trace.sent", "it has the spans"),
        ("replay.done", "what an earlier run left is delivered", "resume"),
        ("store.tables", "the database of a local store is made, under another name"),
        ("store.made", "and has its own name"),
        ("store.kept", "its new tables are copied to be kept, without their name", "own server"),
        ("store.experiment", "the experiment is made"),
    ),
    "registry, promotion, approval": _build_group(
        ("alias.timed", "a version says when it got its alias, and has not got it"),
        ("alias.moved", "the alias is moved"),
        ("alias.cleared", "the new champion is challenger no more", "by hand"),
        ("version.tagged", "a version has all tags of one call"),
        ("attempt.claimed", "an attempt at the gate is recorded without a number", "again"),
        ("attempt.counted", "and with it", "again"),
        ("export.proved", "a fresh process has the log-probs of a written model, nothing says so"),
        ("export.written", "the proof is written down"),
        ("gate.decided", "the gate has decided, nobody knows"),
        ("gate.moved", "the alias is moved, decision and review are not written down"),
        ("gate.written", "the decision is written down"),
        ("approval.tagged", "the question is on the version, no alias is moved", "approval"),
        ("approval.asked", "the question is asked", "approval"),
        ("approval.given", "the approval is on the version, the alias has not moved", "approval"),
        ("approval.settled", "the answer is on the version, the runs do not say so", "approval"),
        ("approval.noted", "they do, and so does the run's record", "approval"),
        (
            "hand.tagged",
            "the version says that it is promoted by hand, no alias is moved",
            "by hand",
        ),
        ("hand.recorded", "a move by hand is in a journal, the alias is not moved", "by hand"),
    ),
    "runs, retraining, retention": _build_group(
        ("run.locked", "the lock of the pipeline's folder is held"),
        ("run.noted", "run.json says that a run has begun"),
        ("run.tracked", "the parent run is open"),
        ("run.ending", "the run is over, its tracking is open"),
        ("run.ended", "the parent run is closed, run.json says that it runs"),
        ("dead.noted", "a killed run's journal has its end", "resume"),
        ("retrain.opened", "a retraining is recorded, nothing has run", "retrain"),
        ("retrain.closed", "its outcome is recorded", "retrain"),
        ("check.played", "the champion is measured again, nothing is noted", "check"),
        ("check.noted", "its check is noted", "check"),
        ("gc.planned", "gc has decided, nothing is removed", "gc"),
        ("gc.store", "the store has removed its part", "gc"),
        ("gc.path", "one path is removed", "gc"),
    ),
    "sweeps": _build_group(
        ("sweep.begun", "sweep.json is written, no trial has begun", "sweep"),
        ("sweep.asked", "a configuration is noted, no trial of it has begun", "sweep"),
        (
            "sweep.rung",
            "the metric at a rung of successive halving is noted, nothing is decided",
            "sweep",
        ),
        ("sweep.told", "the outcome of a trial is noted", "sweep"),
        ("sweep.chosen", "the winner is noted, nothing is reported", "sweep"),
        ("sweep.reported", "table and figure are written, the gate has not been asked", "sweep"),
    ),
    "training service": _build_group(
        ("service.accepting", "some requests are written, not committed", "service"),
        ("service.accepted", "they are committed, nobody knows", "service"),
        ("service.claimed", "the worker has taken some requests, nothing is computed", "service"),
        (
            "service.computed",
            "some requests are computed, the store does not have the answers",
            "service",
        ),
        ("service.finishing", "their answers are written, not committed", "service"),
        ("service.finished", "they are committed, the memory of the runs is not noted", "service"),
        (
            "service.snapshot",
            "a snapshot of a run is published, the store does not say so",
            "service",
        ),
        ("service.covered", "it does", "service"),
        ("service.replayed", "a run is restored and its requests are computed again", "service"),
        (
            "service.kept",
            "a sampler's weights have a name of their own, which it does not read yet",
            "service",
        ),
        ("service.saved", "weights are under their path, the store does not know it", "service"),
        ("service.exported", "a saved path is exported for the model registry", "service"),
        (
            "service.registered",
            "the registry has its version, the store does not know it",
            "service",
        ),
        (
            "service.published",
            "the weights of a sampler are in their folder, there is no sampler",
            "service",
        ),
    ),
    "serving": _build_group(
        ("feedback.kept", "a label is in the journal, its sender does not know", "serve"),
    ),
    "preferences by people": _build_group(
        (
            "rating.kept",
            "a rating, or its undo, is in the journal, the page does not know",
            "prefer",
        ),
    ),
    "online learning": _build_group(
        ("online.appended", "records of the buffer are on the disk, nobody knows", "online"),
        ("online.cut", "a torn record of a killed writer is cut off", "online"),
        ("online.updated", "an update is computed, nothing of it is kept", "online"),
        ("online.snapshot", "a snapshot is published, the pointer does not name it", "online"),
        ("online.pointed", "it does", "online"),
        ("online.saved", "the worker's state is saved, nothing is pruned", "online"),
        ("online.pruned", "old snapshots and segments are removed", "online"),
        ("online.working", "a piece of work of worker or gate begins: an update, a look", "online"),
        ("online.looked", "canary episodes are played and counted, nothing is written", "online"),
        (
            "online.gated",
            "the gate's state and orders are on the disk, nobody has read them",
            "online",
        ),
        (
            "online.model",
            "the model that a service begins with is copied, nothing says so",
            "online",
        ),
        ("online.taken", "orders are noted as handed over, the log has none of them", "online"),
        (
            "online.asked",
            "an order of a person is on the disk, the server has not read it",
            "online",
        ),
        (
            "consolidate.chosen",
            "a live snapshot is chosen for the promotion gate, no run has begun",
            "online",
        ),
        (
            "online.segment",
            "a segment of shared memory is made and locked, it has no size",
            "online",
        ),
        ("online.rotated", "a full log of updates has its new name, there is no log yet", "online"),
    ),
    "flows": _build_group(
        ("flow.begun", "the flow has begun, the run has not"),
        ("flow.staged", "all stages have ended, nothing is summed up"),
        ("flow.described", "the parent run has its metrics and description"),
        ("flow.drawn", "the picture of the run is written"),
        ("flow.closed", "the run is closed, Prefect does not know"),
        ("prefect.starting", "Prefect's own server is about to be started", "own server"),
        ("prefect.started", "it answers", "own server"),
        (
            "prefect.copied",
            "kept tables are copied for its database, without its name",
            "own server",
        ),
        ("prefect.kept", "its new tables are copied to be kept, without their name", "own server"),
        (
            "once.written",
            "a file that is made once (a password) is written, without its name",
            "up",
        ),
        ("deployment.checked", "the settings of a deployment's run are checked", "deployment"),
    ),
}

FAULT_POINTS: dict[str, FaultPoint] = {
    point.name: point for points in FAULT_POINT_GROUPS.values() for point in points
}


def list_fault_points() -> list[dict[str, str]]:
    """The points for programs: name, group, meaning, and the kind of run that reaches it."""
    return [
        {"name": point.name, "group": group, "meaning": point.meaning, "run": RUN_KINDS[point.run]}
        for group, points in FAULT_POINT_GROUPS.items()
        for point in points
    ]


def format_fault_points() -> str:
    """The points in their groups as text, one a line."""
    width = max(map(len, FAULT_POINTS))
    lines = [
        f"{len(FAULT_POINTS)} fault points; POSTTRAIN_FAULT=point:hit:action makes one fail in a run (kill, raise, ...)"
    ]
    for heading, points in FAULT_POINT_GROUPS.items():
        lines += ["", heading]
        for point in points:
            reached = "" if point.run == "pipeline" else f"  ({RUN_KINDS[point.run]})"
            lines.append(f"  {point.name.ljust(width)}  {point.meaning}{reached}")
    return "\n".join(lines)


PLAN_VARIABLE = "POSTTRAIN_FAULT"
LOG_VARIABLE = "POSTTRAIN_FAULT_LOG"
_ACTIONS = "kill, exit[=CODE], term, raise[=ERRNO], sleep[=SECONDS]"


class InjectedFault(OSError):
    """Error of the action `raise`; it looks like one of the disk."""


@dataclass(slots=True)
class _FaultPlan:
    hit: int  # fires when the point is reached for the hit-th time
    action: str
    value: float  # seconds, exit code or error number
    seen: int = 0


_plans: dict[str, _FaultPlan] = {}
_log: str | None = None
_is_active = False  # a plan or a log is there
_plan_error: SettingsError | None = None  # why the plan of the environment cannot be followed
_guard = threading.Lock()  # threads share the counts


def configure_faults(text: str | None) -> None:
    """Set the faults of this process; None or "" = none.

    Raises: SettingsError for an unknown point or action, or a hit below 1.
    """
    global _plans, _is_active, _plan_error
    _plan_error = None
    entries = [_parse_plan(entry) for entry in text.split(",")] if text else []
    _plans = {
        point: plan for point, rank, plan in entries if rank in ("", os.environ.get("RANK", "main"))
    }
    _is_active = bool(_plans) or _log is not None


def log_reached_points(path: str | os.PathLike[str] | None) -> None:
    """Append every point that this process reaches to a file; None = no more."""
    global _log, _is_active
    _log = os.fspath(path) if path else None
    _is_active = bool(_plans) or _log is not None


def _parse_plan(entry: str) -> tuple[str, str, _FaultPlan]:
    parts = entry.strip().split(":")
    if len(parts) != 3:
        raise SettingsError(f"{PLAN_VARIABLE}: '{entry}' must read point:hit:action")
    place, hit, action = parts
    point, _, rank = place.partition("@")
    if point not in FAULT_POINTS:
        raise SettingsError(
            f"{PLAN_VARIABLE}: unknown point '{point}'; {suggest_name(point, FAULT_POINTS)}"
        )
    if rank and rank != "main" and not rank.isdecimal():
        raise SettingsError(
            f"{PLAN_VARIABLE}: '{place}' must end with @main or the number of a process, as @0"
        )
    if not hit.isdecimal() or int(hit) < 1:
        raise SettingsError(
            f"{PLAN_VARIABLE}: hit '{hit}' of {point} must be a whole number from 1"
        )
    name, _, value = action.partition("=")
    return point, rank, _FaultPlan(int(hit), name, _parse_action_value(point, action, name, value))


def _parse_action_value(point: str, action: str, name: str, value: str) -> float:
    """Number behind the action's name."""
    if name not in ("kill", "exit", "term", "raise", "sleep") or (
        value and name in ("kill", "term")
    ):
        raise SettingsError(
            f"{PLAN_VARIABLE}: unknown action '{action}' of {point}; known: {_ACTIONS}"
        )
    if name == "raise":
        number = getattr(errno, value or "ENOSPC", None)
        if not isinstance(number, int):
            known = ("ENOSPC", "EIO", "EFBIG", "EDQUOT", "EROFS", "EACCES")
            raise SettingsError(
                f"{PLAN_VARIABLE}: '{value}' is no error number; {suggest_name(value, known)}"
            )
        return number
    if name == "exit" and value and not (value.isdecimal() and int(value) < 256):
        raise SettingsError(f"{PLAN_VARIABLE}: '{value}' is not an exit code, 0 to 255")
    try:
        return float(value or {"sleep": 3600, "exit": 1}.get(name, 0))
    except ValueError:
        raise SettingsError(f"{PLAN_VARIABLE}: '{value}' is not a number of seconds") from None


def inject_fault(point: str) -> None:
    """Fault point; returns at once unless this hit is the one that the plan names."""
    if _is_active:
        _reach_fault_point(point)


def check_fault_plan() -> None:
    """Refuse a plan of the environment that cannot be meant. Raises: SettingsError."""
    if _plan_error is not None:
        raise _plan_error


def _reach_fault_point(point: str) -> None:
    check_fault_plan()
    if _log is not None:
        _append_to_log(_log, point)
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
        raise InjectedFault(
            number, f"injected fault at {point}, hit {plan.hit}: {os.strerror(number)}"
        )


def _append_to_log(path: str, point: str) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise SettingsError(
            f"{LOG_VARIABLE}: {path} cannot be written: {error.strerror}"
        ) from error
    try:
        os.write(descriptor, f"{os.getpid()} {time.time():.6f} {point}\n".encode())
    finally:
        os.close(descriptor)


def _configure_from_environment(environment: Mapping[str, str]) -> None:
    """Plan and log of the environment. A wrong plan is an error at the first point, or of `check`: not of an import."""
    global _plan_error, _is_active
    log_reached_points(environment.get(LOG_VARIABLE) or None)
    try:
        configure_faults(environment.get(PLAN_VARIABLE))
    except SettingsError as error:
        _plan_error, _is_active = error, True


_configure_from_environment(os.environ)
