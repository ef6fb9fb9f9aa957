"""Named fault points in every write and stage, so that a run can be broken at an exact place.

    POSTTRAIN_FAULT=point[@RANK]:hit:action[,point:hit:action...]

`FAULT_POINT_GROUPS` lists the points of all packages, so that a plan can be checked when the process starts, before
upper packages are imported; `posttrain check machine --faults` prints them. `hit` counts from 1: the fault fires the
n-th time that one process reaches the point. Actions:

    kill            SIGKILL to this process
    exit[=CODE]     exit immediately without unwinding; 1 by default
    term            SIGTERM to this process, which continues until its handler acts
    raise[=ERRNO]   InjectedFault, an OSError: ENOSPC by default, or EIO, EFBIG, EDQUOT, EROFS, ...
    sleep[=SECONDS] 3600 by default: long enough to be killed in

Child processes of a run inherit the variable and count separately. In a stage with several processes, `point@0` fires
only in rank 0 and `point@main` in none of them. If the variable is unset, a point costs one comparison.

    POSTTRAIN_FAULT_LOG=FILE    append every point that is reached to FILE: pid, time and name, one line each
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
    "resume": "the run after a crash",
    "damage": "the run after damage to a file",
    "torchrun": "a stage with launch: torchrun",
    "approval": "a promotion with approve: manual, and its answer",
    "by hand": "posttrain promote",
    "retrain": "posttrain retrain",
    "check": "the flow evaluate-champion",
    "gc": "posttrain store gc --yes",
    "sweep": "posttrain sweep",
    "own server": "posttrain run without PREFECT_API_URL",
    "up": "posttrain up",
    "deployment": "a run of a deployment",
    "service": "posttrain service up",
    "serve": "posttrain serve",
    "prefer": "posttrain label",
    "online": "posttrain online",
    "self-play": "a policy stage with self_play",
    "suites": "a stage suites, or posttrain evaluate --suite",
}


@dataclass(frozen=True, slots=True)
class FaultPoint:
    """Place in the source where a fault can be injected."""

    name: str
    meaning: str  # the moment at which it is reached
    run: str = "pipeline"  # the simplest kind of run that reaches it, a key of RUN_KINDS

    def __post_init__(self) -> None:
        assert self.run in RUN_KINDS, self.name


def _build_group(*points: tuple[str, str] | tuple[str, str, str]) -> tuple[FaultPoint, ...]:
    return tuple(FaultPoint(*point) for point in points)


FAULT_POINT_GROUPS: dict[str, tuple[FaultPoint, ...]] = {
    "published folders and files": _build_group(
        ("publish.begin", "the temporary folder exists and is empty"),
        ("publish.file", "a file of a checkpoint is written and synced"),
        ("publish.written", "all files are written and synced, no manifest yet"),
        ("publish.manifest", "the manifest is written and synced, the folder is not renamed"),
        ("publish.renamed", "the folder has its final name, its parent is not synced"),
        ("publish.done", "the parent is synced: the folder is acknowledged"),
        (
            "text.written",
            "a file is about to be replaced: the new version is written under a temporary name",
        ),
        ("text.done", "the new version has replaced it, and the parent is synced"),
        (
            "live.written",
            "a live view is about to be replaced: the new version is written, unsynced",
        ),
        ("lines.copied", "the intact lines of a file are copied under a temporary name"),
        ("prune.renamed", "an old folder has its trash name and is not yet deleted"),
        ("prune.done", "an old folder is deleted"),
        ("leftover.removed", "one leftover of a dead process is deleted", "resume"),
        ("lock.taken", "the lock of a folder is held"),
    ),
    "checkpoints and the training loop": _build_group(
        ("checkpoint.encoded", "the state is on the CPU and finite, nothing is written"),
        ("pointer.written", "the new pointer is written under a temporary name"),
        ("pointer.done", "the pointer is replaced and its parent is synced"),
        ("checkpoint.loaded", "the newest valid state is read, nothing is restored", "resume"),
        (
            "checkpoint.aside",
            "a damaged version is renamed, the previous one is not read",
            "damage",
        ),
        ("loop.resumed", "model, optimizer, progress and generators are restored", "resume"),
        ("loop.step", "before an iteration's step()"),
        ("loop.stepped", "after step(), before its metrics are logged"),
        ("loop.logged", "after the metrics are logged"),
        ("loop.evaluated", "an evaluation is logged"),
        ("history.appended", "a line of the metric history's export is appended, unsynced"),
        ("epoch.kept", "the model of an epoch is published, an older one is not removed"),
        ("loop.saved", "a checkpoint is saved"),
        ("loop.finished", "after the last checkpoint, before the best model is restored"),
        ("loop.left", "the model holds the resulting weights"),
    ),
    "data, rollouts, rewards, evaluation": _build_group(
        ("data.read", "the rows of a file are read and checked"),
        ("data.tokenizer", "a preset's tokenizer is trained"),
        ("data.tokenised", "the rows are tokenised and written, their folder has no manifest"),
        ("data.rows", "one part of the split rows is written"),
        ("model.recorded", "log-probs of a live model are written, to verify its export"),
        ("model.scored", "scores of a live reward model are written, to verify its export"),
        ("model.saved", "a model and its tokenizer are written into the open folder"),
        ("pairs.made", "preference pairs are read or sampled"),
        ("records.logged", "one record of a stage is in its journal, as artifact and data set"),
        ("references.scored", "log-probabilities under the reference are computed, not stored"),
        ("rollouts.played", "the rollouts of some episodes are collected"),
        ("opponent.written", "a snapshot for self-play has a temporary name", "self-play"),
        ("opponent.stored", "it has its name; the pool does not hold it yet", "self-play"),
        ("opponent.removing", "a snapshot that nothing names is about to be removed", "self-play"),
        ("rewards.scored", "the rollouts of an iteration have rewards"),
        ("rewards.recorded", "the rewards of an iteration are appended to rewards.jsonl"),
        ("rewards.cut", "the lines of iterations that will be repeated are truncated", "resume"),
        ("evaluation.played", "a model has played its held-out episodes"),
        ("evaluation.trajectories", "the held-out trajectories are written"),
        ("evaluation.written", "evaluation.json is written"),
        ("suite.samples", "samples of an evaluator's task are written, no result is", "suites"),
        ("suite.result", "the task's result is written, the stage has no copy of it", "suites"),
        ("suite.copied", "the copy is in the open folder, with the evaluator's log", "suites"),
        ("analysis.probed", "the models are measured on the episodes"),
        ("analysis.written", "report and figures are written"),
    ),
    "stages": _build_group(
        ("stage.locked", "the lock of the stage's key is held"),
        ("stage.cleared", "the open folder exists, without leftovers"),
        ("stage.discarded", "--fresh: the finished folder is removed, its journal is not", "fresh"),
        ("stage.tracked", "the stage's run is open"),
        ("stage.computed", "the stage body has returned"),
        ("stage.registered", "the model has a version, or waits in the journal for one"),
        ("stage.summarised", "summary.json is written"),
        ("stage.closed", "the stage's run is closed, the folder is still open"),
        ("stage.copied", "metrics and records are copied into the folder"),
        ("stage.sealed", "the folder has its final name and manifest"),
        ("stage.cached", "a finished folder is verified and reused", "resume"),
        ("task.ended", "a stage has ended, Prefect has no artifacts of it"),
        ("task.published", "Prefect has the artifacts"),
    ),
    "stages in several processes": _build_group(
        ("workers.job", "job.json is written, no process is started", "torchrun"),
        ("workers.started", "torchrun is started", "torchrun"),
        ("worker.joined", "in each process: all processes have joined", "torchrun"),
        (
            "worker.computed",
            "in each process: the body has returned, no result is written",
            "torchrun",
        ),
        ("workers.ended", "all processes have ended, their result is not read", "torchrun"),
    ),
    "tracking": _build_group(
        ("journal.opened", "a journal is open and locked, its torn last line is truncated"),
        ("journal.line", "a line is written to a journal"),
        ("journal.synced", "a journal is synced before it is closed"),
        ("artifact.kept", "the copy of an artifact or model is stored, no record names it"),
        ("ship.begin", "a delivery begins"),
        ("ship.created", "the store has created the run, the cursor is not updated"),
        ("ship.metrics", "the store has a batch of metrics, the cursor is not updated"),
        ("ship.event", "the store has another record, the cursor is not updated"),
        ("cursor.written", "the new cursor is written under a temporary name"),
        ("cursor.saved", "the new cursor has replaced the old one"),
        ("artifact.sent", "the store has an artifact, its local copy is not deleted"),
        ("model.made", "the store has created a model without files"),
        ("model.uploaded", "the model has its files"),
        ("model.ready", "the model is marked as ready, there is no version"),
        ("model.versioned", "the model has a version, the cursor is not updated"),
        ("trace.started", "the store has an episode's trace without spans"),
        ("trace.sent", "the store has the spans"),
        ("replay.done", "the leftovers of an earlier run are delivered", "resume"),
        ("store.tables", "the database of a local store is created under a temporary name"),
        ("store.made", "the database has its final name"),
        (
            "store.kept",
            "its new tables are copied to the cache, under a temporary name",
            "own server",
        ),
        ("store.experiment", "the experiment is created"),
    ),
    "registry, promotion, approval": _build_group(
        ("alias.timed", "a version records when it got its alias, and does not have it"),
        ("alias.moved", "the alias is moved"),
        ("alias.cleared", "the new champion is no longer the challenger", "by hand"),
        ("version.tagged", "a version has all tags of one call"),
        ("attempt.claimed", "an attempt at the gate is recorded without a number", "again"),
        ("attempt.counted", "an attempt at the gate is recorded with its number", "again"),
        (
            "export.proved",
            "a fresh process has reproduced the log-probs of a saved model, which is not recorded",
        ),
        ("export.written", "the verification of the export is recorded"),
        ("gate.decided", "the gate has decided, nothing is recorded"),
        ("gate.moved", "the alias is moved, decision and review are not written"),
        ("gate.written", "the decision is written"),
        ("gguf.written", "the GGUF file and its Modelfile are written and proven, not recorded"),
        (
            "approval.tagged",
            "the approval request is on the version, no alias is moved",
            "approval",
        ),
        ("approval.asked", "approval is requested", "approval"),
        ("approval.given", "the approval is on the version, the alias has not moved", "approval"),
        ("approval.settled", "the answer is on the version, the runs do not record it", "approval"),
        ("approval.noted", "the runs and the run's record have the answer", "approval"),
        (
            "hand.tagged",
            "the version records its promotion by hand, no alias is moved",
            "by hand",
        ),
        ("hand.recorded", "a move by hand is in a journal, the alias is not moved", "by hand"),
    ),
    "runs, retraining, retention": _build_group(
        ("run.locked", "the lock of the pipeline's folder is held"),
        ("run.noted", "run.json says that a run has started"),
        ("run.tracked", "the parent run is open"),
        ("run.ending", "the run is over, its tracking is open"),
        ("run.ended", "the parent run is closed, run.json still says running"),
        ("dead.noted", "the end of a crashed run is in its journal", "resume"),
        ("retrain.opened", "a retraining is recorded, nothing has run", "retrain"),
        ("retrain.closed", "its outcome is recorded", "retrain"),
        ("check.played", "the champion is measured again, the check is not recorded", "check"),
        ("check.noted", "its check is recorded", "check"),
        ("gc.planned", "gc has decided, nothing is removed", "gc"),
        ("gc.store", "the store has removed its part", "gc"),
        ("gc.path", "one path is removed", "gc"),
    ),
    "sweeps": _build_group(
        ("sweep.begun", "sweep.json is written, no trial has started", "sweep"),
        ("sweep.asked", "a configuration is recorded, none of its trials has started", "sweep"),
        (
            "sweep.rung",
            "the metric at a rung of successive halving is recorded, nothing is decided",
            "sweep",
        ),
        ("sweep.told", "the outcome of a trial is recorded", "sweep"),
        ("sweep.chosen", "the winner is recorded, nothing is reported", "sweep"),
        ("sweep.reported", "table and figure are written, the gate has not decided", "sweep"),
    ),
    "training service": _build_group(
        ("service.accepting", "some requests are written, not committed", "service"),
        ("service.accepted", "they are committed, not acknowledged", "service"),
        ("service.claimed", "the worker has taken some requests, nothing is computed", "service"),
        (
            "service.computed",
            "some requests are computed, the store does not have the results",
            "service",
        ),
        ("service.finishing", "their results are written, not committed", "service"),
        (
            "service.finished",
            "they are committed, the memory of the runs is not recorded",
            "service",
        ),
        (
            "service.snapshot",
            "a snapshot of a run is published, the store does not record it",
            "service",
        ),
        ("service.covered", "the store records the snapshot", "service"),
        ("service.replayed", "a run is restored and its requests are computed again", "service"),
        (
            "service.kept",
            "the weights of a sampler have another name, which it does not read yet",
            "service",
        ),
        ("service.saved", "weights are under their path, the store does not record it", "service"),
        ("service.exported", "a saved path is exported for the model registry", "service"),
        (
            "service.registered",
            "the registry has its version, the store does not record it",
            "service",
        ),
        (
            "service.published",
            "the weights of a sampler are in their folder, there is no sampler",
            "service",
        ),
    ),
    "serving": _build_group(
        ("feedback.kept", "a label is in the journal, not acknowledged", "serve"),
        ("session.recorded", "a scored episode is in its file, not acknowledged", "serve"),
    ),
    "preferences by people": _build_group(
        (
            "rating.kept",
            "a rating, or its undo, is in the journal, not acknowledged",
            "prefer",
        ),
    ),
    "online learning": _build_group(
        ("online.appended", "records of the buffer are on the disk, not acknowledged", "online"),
        ("online.cut", "a torn record of a killed writer is truncated", "online"),
        ("online.updated", "an update is computed, nothing is saved", "online"),
        ("online.snapshot", "a snapshot is published, the pointer does not name it", "online"),
        ("online.pointed", "the pointer names the snapshot", "online"),
        ("online.saved", "the worker's state is saved, nothing is removed", "online"),
        ("online.pruned", "old snapshots and segments are removed", "online"),
        (
            "online.working",
            "the worker or the gate begins a unit of work: an update, a look",
            "online",
        ),
        ("online.looked", "canary episodes are played and counted, nothing is written", "online"),
        (
            "online.gated",
            "the gate's state and orders are on the disk, not read",
            "online",
        ),
        (
            "online.model",
            "the service's initial model is copied, which is not recorded",
            "online",
        ),
        ("online.taken", "orders are recorded as handed over, the log has none of them", "online"),
        (
            "online.asked",
            "an operator's order is on the disk, the server has not read it",
            "online",
        ),
        (
            "consolidate.chosen",
            "a live snapshot is chosen for the promotion gate, no run has begun",
            "online",
        ),
        ("online.rotated", "a full log of updates is renamed, there is no new log yet", "online"),
    ),
    "flows": _build_group(
        ("flow.begun", "the flow has started, the run has not"),
        ("flow.staged", "all stages have ended, nothing is summarised"),
        ("flow.described", "the parent run has its metrics and description"),
        ("flow.drawn", "the chart of the run is written"),
        ("flow.closed", "the run is closed, Prefect does not know"),
        ("prefect.starting", "Prefect's own server is about to be started", "own server"),
        ("prefect.started", "Prefect's own server responds", "own server"),
        (
            "prefect.copied",
            "cached tables are copied for its database, under a temporary name",
            "own server",
        ),
        (
            "prefect.kept",
            "its new tables are copied to the cache, under a temporary name",
            "own server",
        ),
        (
            "once.written",
            "a file that is created once (a password) is written under a temporary name",
            "up",
        ),
        ("deployment.checked", "the settings of a deployment's run are checked", "deployment"),
    ),
}

FAULT_POINTS: dict[str, FaultPoint] = {
    point.name: point for points in FAULT_POINT_GROUPS.values() for point in points
}


def list_fault_points() -> list[dict[str, str]]:
    """Return the points as records: name, group, meaning, and the kind of run that reaches each."""
    return [
        {"name": point.name, "group": group, "meaning": point.meaning, "run": RUN_KINDS[point.run]}
        for group, points in FAULT_POINT_GROUPS.items()
        for point in points
    ]


def format_fault_points() -> str:
    """Format the points for the terminal, by group, one per line."""
    width = max(map(len, FAULT_POINTS))
    lines = [
        f"{len(FAULT_POINTS)} fault points; POSTTRAIN_FAULT=point:hit:action makes one fail in a run (kill, raise, ...)"
    ]
    for heading, points in FAULT_POINT_GROUPS.items():
        lines += ["", heading]
        for point in points:
            run_kind = "" if point.run == "pipeline" else f"  ({RUN_KINDS[point.run]})"
            lines.append(f"  {point.name.ljust(width)}  {point.meaning}{run_kind}")
    return "\n".join(lines)


PLAN_VARIABLE = "POSTTRAIN_FAULT"
LOG_VARIABLE = "POSTTRAIN_FAULT_LOG"
_ACTIONS = "kill, exit[=CODE], term, raise[=ERRNO], sleep[=SECONDS]"


class InjectedFault(OSError):
    """Error raised by the action `raise`; looks like a disk error."""


@dataclass(slots=True)
class _FaultPlan:
    hit: int  # fires the hit-th time that the point is reached
    action: str
    value: float  # seconds, exit code or error number
    num_reached: int = 0


_plans: dict[str, _FaultPlan] = {}
_log_path: str | None = None
_is_active = False  # whether a plan or a log is configured
_plan_error: SettingsError | None = None  # what is wrong with the plan in the environment
_count_lock = threading.Lock()


def configure_faults(text: str | None) -> None:
    """Set the faults of this process; None or "" clears them.

    Raises: SettingsError for an unknown point or action, or a hit below 1.
    """
    global _plans, _is_active, _plan_error
    _plan_error = None
    entries = [_parse_plan(entry) for entry in text.split(",")] if text else []
    process_rank = os.environ.get("RANK", "main")
    _plans = {point: plan for point, rank, plan in entries if rank in ("", process_rank)}
    _is_active = bool(_plans) or _log_path is not None


def log_reached_points(path: str | os.PathLike[str] | None) -> None:
    """Append every point that this process reaches to a file; None stops logging."""
    global _log_path, _is_active
    _log_path = os.fspath(path) if path else None
    _is_active = bool(_plans) or _log_path is not None


def _parse_plan(entry: str) -> tuple[str, str, _FaultPlan]:
    parts = entry.strip().split(":")
    if len(parts) != 3:
        raise SettingsError(f"{PLAN_VARIABLE}: '{entry}' must read point:hit:action")
    target, hit, action = parts
    point, _, rank = target.partition("@")
    if point not in FAULT_POINTS:
        raise SettingsError(
            f"{PLAN_VARIABLE}: unknown point '{point}'; {suggest_name(point, FAULT_POINTS)}"
        )
    if rank and rank != "main" and not rank.isdecimal():
        raise SettingsError(
            f"{PLAN_VARIABLE}: '{target}' must end with @main or a process number such as @0"
        )
    if not hit.isdecimal() or int(hit) < 1:
        raise SettingsError(
            f"{PLAN_VARIABLE}: hit '{hit}' of {point} must be an integer of at least 1"
        )
    name, _, value = action.partition("=")
    return point, rank, _FaultPlan(int(hit), name, _parse_action_value(point, action, name, value))


def _parse_action_value(point: str, action: str, name: str, value: str) -> float:
    """Return the number that follows the action's name, or the action's default."""
    is_known = name in ("kill", "exit", "term", "raise", "sleep")
    if not is_known or (value and name in ("kill", "term")):
        raise SettingsError(
            f"{PLAN_VARIABLE}: unknown action '{action}' of {point}; known: {_ACTIONS}"
        )
    if name == "raise":
        number = getattr(errno, value or "ENOSPC", None)
        if not isinstance(number, int):
            known = ("ENOSPC", "EIO", "EFBIG", "EDQUOT", "EROFS", "EACCES")
            raise SettingsError(
                f"{PLAN_VARIABLE}: '{value}' is not an error name; {suggest_name(value, known)}"
            )
        return number
    if name == "exit" and value and not (value.isdecimal() and int(value) < 256):
        raise SettingsError(f"{PLAN_VARIABLE}: '{value}' is not an exit code, 0 to 255")
    try:
        return float(value or {"sleep": 3600, "exit": 1}.get(name, 0))
    except ValueError:
        raise SettingsError(f"{PLAN_VARIABLE}: '{value}' is not a number of seconds") from None


def inject_fault(point: str) -> None:
    """Raise or trigger the planned fault if this is the planned hit of the point; otherwise return immediately."""
    if _is_active:
        _reach_fault_point(point)


def check_fault_plan() -> None:
    """Raise SettingsError if the plan in the environment is invalid."""
    if _plan_error is not None:
        raise _plan_error


def _reach_fault_point(point: str) -> None:
    check_fault_plan()
    if _log_path is not None:
        _append_to_log(_log_path, point)
    plan = _plans.get(point)
    if plan is None:
        return
    with _count_lock:
        plan.num_reached += 1
        if plan.num_reached != plan.hit:
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
    """Read plan and log from the environment.

    An invalid plan is reported at the first point or by `check_fault_plan`, not at import.
    """
    global _plan_error, _is_active
    log_reached_points(environment.get(LOG_VARIABLE) or None)
    try:
        configure_faults(environment.get(PLAN_VARIABLE))
    except SettingsError as error:
        _plan_error, _is_active = error, True


_configure_from_environment(os.environ)
