"""Execution of a stage: cache key, folders, lock, resume, tracking, hand-over.

    <output>/<pipeline>/stages/<stage>/
        <key>/            finished: model/, *.jsonl, summary.json, metrics.jsonl, manifest.json; never written again
                          (after training also metrics_history.json; metrics_history.jsonl grows meanwhile),
                          stage.log: what the stage said
        <key>.open/       being written; checkpoints/ inside survive a kill and are resumed, with threads.json and
                          conditions.json beside
        <key>.tracking/   the journal of metrics and what was shipped of it, and stage.log while the stage runs
        <key>.lock        held while the stage runs
        decisions.jsonl   why the stage was run, or was not

The key is (stage, its settings, environment and model settings, digests of its inputs, seed, code version, content of
the user's modules that settings name and of those that they import). The same key is not run twice; a changed one is.
In how many processes a stage runs (`launch`) is no part of its key, nor are files that the user's code opens by itself.
A finished folder is verified against its manifest before it is used. Checkpoints of another key are not passed over
without a word: see tasks/pipeline/drift.py.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.errors import FolderBusy, PosttrainError, Stopped
from rl_core.storage.faults import fault
from rl_core.storage.folder_removal import clear_leftovers
from rl_core.storage.locks import FolderLock
from rl_core.storage.single_files import make_folder, write_json_atomic
from rl_core.timing import collected
from tasks.pipeline.conditions import CONDITIONS, describe
from tasks.pipeline.decisions import note_decision
from tasks.pipeline.drift import adopt, mark_aside, set_others_aside
from tasks.pipeline.key import input_digest, stage_key, stage_key_parts, stage_seed
from tasks.pipeline.outcome import STOP_SECONDS, is_stop
from tasks.pipeline.result import FAILED_EPISODES, RECENT_ROLLOUTS, STAGE_LOG, StageResult, load_finished
from tasks.pipeline.stage_context import StageContext
from tasks.pipeline.stage_folder import (
    REWARD_RECORD,
    KeyedStage,
    damaged_lines,
    discard,
    keep_checkpoints,
    kept_epochs,
    seal,
)
from tasks.pipeline.stage_log import StageLog
from tasks.pipeline.stage_records import log_records
from tasks.pipeline.threads import THREADS, note_threads, recorded_threads, torch_threads
from tasks.processes.launch import recover_events, run_in_workers
from tasks.stage_registry import entry, training_stages
from tasks.tracking import RunTracker, read_metrics, result_text

if TYPE_CHECKING:
    from tasks.pipeline.run import PipelineRun

# what a file with a stage's body needs; keys and finished folders have modules of their own
__all__ = [
    "FAILED_EPISODES",
    "RECENT_ROLLOUTS",
    "REWARD_RECORD",
    "StageContext",
    "StageResult",
    "has_begun",
    "run_stage",
]

logger = logging.getLogger(__name__)

_BETWEEN = "stopped between two stages; the same command goes on from there"
_WAIT_SECONDS = 0.2  # between two looks at a stage that another trial runs


def run_stage(
    pipeline_run: PipelineRun,
    name: str,
    body: Callable[[StageContext], dict[str, Any]],
    *,
    settings: Any,
    inputs: Mapping[str, StageResult | Path | str],
    label: str | None = None,
) -> StageResult:
    """Run one stage, or take its finished folder when its key has been run before.

    Args:
        pipeline_run: the pipeline run that this stage belongs to.
        name: the stage; also the folder under which its keys lie.
        body: writes into `context.folder` and returns numbers for people (summary.json).
        settings: the stage's own settings.
        inputs: by name, what the stage reads; its content decides the key.
        label: name of the tracking run, where it differs from the stage's.
    Raises: FolderBusy when another process runs the same stage; ResumeRefused where checkpoints of other conditions
        would be passed over; Stopped; whatever the body raises.
    """
    if pipeline_run.stop.is_set():
        raise Stopped(_BETWEEN, signal.SIGTERM)
    digests = {key: input_digest(value) for key, value in inputs.items()}
    pipeline_run.tracker.tag_data(digests)
    made_of = stage_key_parts(name, settings, pipeline_run.settings, digests)
    key = made_of.key
    final = pipeline_run.stages_folder / name / key
    before = {earlier: result.key for earlier, result in pipeline_run.results.items()}
    conditions = describe(name, made_of, inputs, before)
    stage = KeyedStage(name, label or name, settings, inputs, digests, key, final, conditions)
    make_folder(final.parent)
    with _locked(pipeline_run, final.with_name(f"{key}.lock")):
        fault("stage.locked")
        clear_leftovers(final.parent)
        fresh = pipeline_run.is_fresh(name, key)
        was_there = final.is_dir()
        done = None if fresh else load_finished(final, name, key)
        if done is not None:
            fault("stage.cached")
            logger.info("%s: finished before (%s), not run again", stage.label, key)
            note_decision(final, "cached", conditions)
            pipeline_run.tracker.note_cached(stage.label, done.run_id or done.key)
            return done
        if fresh or pipeline_run.is_restarted(key):
            discard(final)
            set_others_aside(final)
        drift = adopt(final, conditions, pipeline_run.options)
        why = "fresh" if fresh else "drifted" if drift else "damaged" if was_there else ""
        _note_begin(stage, why, drift, for_people=not pipeline_run.options.given)
        pipeline_run.mark_computed(key)
        return _compute(pipeline_run, stage, body, drift)


@contextlib.contextmanager
def _locked(pipeline_run: PipelineRun, path: Path) -> Iterator[None]:
    """The lock of a stage's key. A trial waits for another one that runs the same stage, and then shares it."""
    lock = FolderLock(path)
    while True:
        try:
            lock.__enter__()
            break
        except FolderBusy:
            if pipeline_run.options.trial is None:
                raise
            if pipeline_run.stop.wait(_WAIT_SECONDS):
                raise Stopped(_BETWEEN, signal.SIGTERM) from None
    with contextlib.ExitStack() as held:
        held.push(lock)
        yield


def _note_begin(stage: KeyedStage, why: str, drift: list[str], *, for_people: bool) -> None:
    """Note why a stage is run, and say it where one with another key was finished before.

    why: kind of the decision; "" = resumed where there are checkpoints, else its first run or a changed one.
    for_people: False = models were given to be evaluated: that they are others than those of a run is no news.
    """
    has_checkpoints = (stage.folder / "checkpoints").is_dir()
    kind = "resumed" if has_checkpoints else "first"
    decision = note_decision(stage.final, why or kind, stage.conditions, drift)
    if decision.kind == "changed":
        lines = "\n  ".join(decision.changes)
        logger.info("%s runs anew, since this changed:\n  %s", stage.label, lines, extra={"for_people": for_people})


def has_begun(
    pipeline_run: PipelineRun, name: str, *, settings: Any, inputs: Mapping[str, StageResult | Path | str]
) -> bool:
    """True = a stage with these settings and inputs has been run, to its end or not. Arguments: see `run_stage`."""
    key = stage_key(name, settings, pipeline_run.settings, {key: input_digest(value) for key, value in inputs.items()})
    final = pipeline_run.stages_folder / name / key
    return final.is_dir() or final.with_name(f"{key}.open").is_dir()


def _compute(
    pipeline_run: PipelineRun, stage: KeyedStage, body: Callable[[StageContext], dict[str, Any]], drift: list[str]
) -> StageResult:
    """Open or reopen the stage's folder, run the body, and seal the folder under its final name.

    drift: differences under which the stage's checkpoints may be resumed.
    """
    keep_checkpoints(stage.folder)
    write_json_atomic(stage.folder / CONDITIONS, {**stage.conditions, "drift": drift})
    if pipeline_run.options.on_drift == "beside":
        mark_aside(stage.final)  # no other run takes its checkpoints for those of a stage that it would pass over
    threads = _threads(pipeline_run, stage)
    fault("stage.cleared")
    tracker = pipeline_run.tracker.open_stage(
        stage.label, stage.name, stage.journal, stage.settings, stage.digests, stage.key,
        pipeline_run.models.parent_tags(stage.name),
    )  # fmt: skip
    tracker.set_tag("threads", str(threads))
    if drift:
        tracker.set_tag("drift", "; ".join(drift)[:4000])
    fault("stage.tracked")
    context = StageContext(
        name=stage.name,
        folder=stage.folder,
        settings=stage.settings,
        pipeline=pipeline_run.settings,
        inputs={k: v.path if isinstance(v, StageResult) else v for k, v in stage.inputs.items()},
        tracker=tracker,
        pipeline_run=pipeline_run,
        threads=threads,
        seed=stage_seed(pipeline_run.settings.seed_of(stage.name), stage.name),
        fingerprint={"stage key": stage.key, "threads": str(threads)},
        allow_drift=pipeline_run.options.on_drift == "resume" or (("stage key",) if drift else False),
        stop=pipeline_run.stop,
    )
    with StageLog(stage.journal) as log, _closed_by_outcome(tracker, stage, log), torch_threads(threads):
        with collected() as counts:
            summary = _run_body(context, body)
        fault("stage.computed")
        if counts.get("out_of_memory"):
            summary["out_of_memory"] = int(counts["out_of_memory"])
            tracker.log_metrics({"perf/out_of_memory": counts["out_of_memory"]}, 0)
        if drift:
            summary["drift"] = drift
        is_registered = entry(stage.name).trains is not None and pipeline_run.options.trial is None
        if is_registered and (stage.folder / "model").is_dir():
            summary |= pipeline_run.models.register(tracker, stage.folder / "model", stage.name, summary)
        fault("stage.registered")
        seconds = round(tracker.seconds, 2)
        summary |= {"seconds": seconds, "threads": threads, "run_id": tracker.run_id or "", "key": stage.key}
        _record(pipeline_run, stage, tracker, summary)
        fault("stage.summarised")
    fault("stage.closed")
    return StageResult(
        stage=stage.name,
        folder=str(stage.final),
        digest=seal(stage),
        key=stage.key,
        cached=False,
        seconds=seconds,
        run_id=tracker.run_id or "",
        summary=summary,
    )


def _record(pipeline_run: PipelineRun, stage: KeyedStage, tracker: RunTracker, summary: dict[str, Any]) -> None:
    """Complete the summary by what the folder tells; write it, and show it and the folder's records in the run."""
    if epochs := kept_epochs(stage.folder):
        summary["epochs"] = epochs
    summary.setdefault("tokens_per_second", tokens_per_second(stage.journal))
    if damaged := damaged_lines(stage):
        summary["damaged_lines"] = damaged
        tracker.set_tag("damaged_lines", ", ".join(f"{name}: {count}" for name, count in damaged.items()))
    log_records(
        tracker, stage.folder, stage.final, stage.name,
        max_megabytes=pipeline_run.settings.tracking.records_megabytes,
    )  # fmt: skip
    tracker.log_dict(summary, "summary.json")
    if summary.get("note"):
        tracker.set_tag("result", result_text(str(summary["note"])))
    if stage.name in training_stages() and (curves := pipeline_run.tracking.charts_url(stage.name)):
        tracker.set_description(f"{summary.get('note', '')}\n\n[Curves, success first]({curves})".strip())
    write_json_atomic(stage.folder / "summary.json", summary)


def _threads(pipeline_run: PipelineRun, stage: KeyedStage) -> int:
    """The run's number of threads; with `threads: auto` the one that the stage's checkpoints were made with, if any."""
    threads = pipeline_run.threads
    if pipeline_run.settings.threads == "auto":
        kept = recorded_threads(stage.folder / THREADS)
        if kept is not None and kept != threads:
            logger.info("%s: goes on with %d threads, as its checkpoints", stage.label, kept)
            threads = kept
    note_threads(stage.folder, threads)
    return threads


def _run_body(context: StageContext, body: Callable[[StageContext], dict[str, Any]]) -> dict[str, Any]:
    """The body's summary, computed in this process or in those that the settings ask for."""
    recover_events(context.folder, context.tracker)
    launch = getattr(context.settings, "launch", None)
    in_workers = launch is not None and launch.kind == "torchrun"
    return dict(run_in_workers(context, body) if in_workers else body(context))


@contextlib.contextmanager
def _closed_by_outcome(tracker: RunTracker, stage: KeyedStage, log: StageLog) -> Iterator[None]:
    """Close the stage's run as finished, killed or failed; after an error of ours keep only checkpoints in its folder.

    Beginning, progress and outcome stand in its log, of which the tracking store gets the end.
    """
    log.say(f"{stage.label} begins, key {stage.key}, process {os.getpid()} on {platform.node()}")
    tracker.on_progress.append(log.progress)
    try:
        yield
    except BaseException as error:
        is_stopped = isinstance(error, Stopped) or is_stop(error)
        if is_stopped:
            log.say(f"stopped: {error}")
        else:
            log.say("failed\n" + "".join(traceback.format_exception(error)).rstrip(), level="ERROR")
            logger.info("%s failed; its log is %s", stage.label, log.path, extra={"for_people": True})
        if isinstance(error, PosttrainError) and not isinstance(error, Stopped):
            tracker.set_tag("error", f"{type(error).__name__}: {error}"[:4000])
            keep_checkpoints(stage.folder)
            with contextlib.suppress(OSError):  # checkpoints stay
                stage.folder.rmdir()
        tracker.log_text(log.tail, STAGE_LOG)
        if is_stopped:
            tracker.close("KILLED", timeout_s=STOP_SECONDS)
        else:
            tracker.close("FAILED")
        raise
    log.say(f"{stage.label} has finished after {tracker.seconds:.1f} s")
    tracker.log_text(log.tail, STAGE_LOG)
    tracker.close("FINISHED")


def tokens_per_second(journal: Path) -> float | None:
    """Tokens over seconds of all training steps in a stage's journal; None where it did not train."""
    tokens = seconds = 0.0
    for _, row in read_metrics(journal):
        if "perf/tokens_per_second" in row and "perf/step_seconds" in row:
            tokens += row["perf/tokens_per_second"] * row["perf/step_seconds"]
            seconds += row["perf/step_seconds"]
    return tokens / seconds if seconds else None
